"""Every key of a DeepSpeed file is carried, said to have no effect, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.deepspeed.config import CARRIED, REFUSED, UNUSED, Settings, batches_of, settings_of
from shoal.deepspeed.optimizers import optimizer_of
from shoal.errors import UsageError

PAGE = Path(__file__).parents[2] / "docs" / "migration" / "deepspeed.md"


def test_keys_are_carried() -> None:
    found = settings_of({
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "none"}},
        "steps_per_print": 10,
        "wall_clock_breakdown": False,
        "elasticity": {"enabled": False},
    })  # fmt: skip
    assert (found.train, found.micro, found.accumulation) == (32, 4, 2)
    assert (found.clip_norm, found.precision, found.zero) == (1.0, "bfloat16", 2)
    assert [note.split()[0] for note in found.notes] == ["steps_per_print", "wall_clock_breakdown"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "needs config="),
        ({"train_batch": 8}, "did you mean 'train_batch_size'"),
        ({"train_batch_size": "auto"}, "only transformers' Trainer fills it in"),
        ({"train_batch_size": 0}, "a whole number above 0"),
        ({"train_batch_size": True}, "a whole number above 0"),
        ({"gradient_clipping": -1}, "largest norm"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "both enabled"),
        ({"zero_optimization": {"stage": 4}}, "0, 1, 2 or 3"),
        ({"zero_optimization": {"stge": 3}}, "did you mean 'stage'"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "keeps parameters on the device"),
        ({"sparse_gradients": True}, "sparse=False"),
        ({"autotuning": {"enabled": True}}, "shoal plan"),
    ],
)
def test_what_is_not_carried_is_refused(config: dict[str, Any] | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        settings_of(config)


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 6}')
    assert settings_of(tmp_path / "ds.json").train == 6
    (tmp_path / "ds.json").write_text("[]")
    with pytest.raises(UsageError, match=r"ds\.json"):
        settings_of(str(tmp_path / "ds.json"))
    with pytest.raises(UsageError, match=r"missing\.json"):
        settings_of(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("train", "micro", "accumulation", "ranks", "loader", "expected"),
    [
        (32, 4, 2, 4, None, (32, 4, 2)),
        (32, 4, None, 4, None, (32, 4, 2)),
        (32, None, 2, 4, None, (32, 4, 2)),
        (32, None, None, 4, None, (32, 8, 1)),
        (None, 4, 2, 4, None, (32, 4, 2)),
        (None, None, None, 2, 3, (6, 3, 1)),
        (32, 4, 2, 2, None, (32, 4, 4)),  # written for four ranks
        (32, None, None, 2, 4, (32, 4, 4)),
    ],
)
def test_two_of_three_numbers_give_the_third(
    train: int | None, micro: int | None, accumulation: int | None, ranks: int, loader: int | None, expected: tuple
) -> None:
    found = batches_of(Settings(train, micro, accumulation), ranks=ranks, loader=loader)
    assert (found.step, found.micro, found.accumulation) == expected
    assert bool(found.notes) == (train is None or accumulation not in (None, found.accumulation))


@pytest.mark.parametrize(
    ("train", "micro", "accumulation", "ranks", "loader", "said"),
    [
        (None, None, 2, 2, None, "is missing"),
        (10, 4, None, 2, None, "no multiple of train_micro_batch_size_per_gpu = 4 x 2 ranks"),
        (10, None, 4, 1, None, "no multiple of 1 ranks x gradient_accumulation_steps = 4"),
        (8, 4, None, 1, 2, "batch_size of 2"),
        (2, None, None, 4, None, "no multiple of 4 ranks"),
    ],
)
def test_numbers_that_do_not_go_together(
    train: int | None, micro: int | None, accumulation: int | None, ranks: int, loader: int | None, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        batches_of(Settings(train, micro, accumulation), ranks=ranks, loader=loader)


def test_optimizers_have_deepspeeds_defaults() -> None:
    weights = [torch.nn.Parameter(torch.zeros(2))]
    made = optimizer_of({"type": "Adam", "params": {"lr": 0.1, "betas": [0.9, 0.95]}}, weights)
    assert type(made) is torch.optim.AdamW
    assert made.defaults["weight_decay"] == 0.0
    assert type(optimizer_of({"type": "Adam", "params": {"adam_w_mode": False}}, weights)) is torch.optim.Adam
    with_torch = optimizer_of({"type": "AdamW", "params": {"torch_adam": True}}, weights)
    assert with_torch.defaults["weight_decay"] == torch.optim.AdamW(weights).defaults["weight_decay"]
    assert type(optimizer_of({"type": "SGD", "params": {"lr": 0.1}}, weights)) is torch.optim.SGD


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, "optimizer.type is missing"),
        ({"type": "Lamb"}, 'optimizer.kind = "lamb"'),
        ({"type": "AdamWw"}, "did you mean 'AdamW'"),
        ({"type": "SGD", "params": {"momentun": 0.9}}, "momentun"),
        ({"type": "AdamW", "params": {"bias_correction": False}}, "bias_correction"),
    ],
)
def test_optimizers_that_there_are_not(table: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        optimizer_of(table, [torch.nn.Parameter(torch.zeros(2))])


@pytest.mark.parametrize("name", sorted({*CARRIED, *UNUSED, *REFUSED} - {"bfloat16"}))
def test_the_page_has_every_key(name: str) -> None:
    assert f"`{name}`" in PAGE.read_text()
