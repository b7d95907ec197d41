"""What becomes of each argument of `accelerate.Accelerator`, of its calls, and of batches that ranks cannot share."""

from __future__ import annotations

import sys
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from shoal.errors import UsageError, UserCodeError

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow  # the imports of accelerate and transformers take seconds
COMM = accelerate.utils.DDPCommunicationHookType
PAGE = (Path(__file__).parents[3] / "docs" / "migration" / "accelerate.md").read_text(encoding="utf-8")


def settings(**given: Any) -> Any:
    from shoal.huggingface.accelerate.arguments import settings_of

    return settings_of(given)


def accelerator(**given: Any) -> Any:
    from shoal.huggingface import Accelerator

    return Accelerator(cpu=True, **given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fsdp_plugin": object()}, r"fsdp_plugin=\.\.\.\): layout.shard and memory.zero"),
        ({"deepspeed_plugin": object()}, "layout.shard and memory.zero"),
        ({"megatron_lm_plugin": object()}, "need shoal.train"),
        ({"dynamo_backend": "inductor"}, r"model.compile\(\) before prepare"),
        ({"mixed_precision": "fp8"}, "others are a precision.kind"),
        ({"dataloader_config": accelerate.DataLoaderConfiguration(dispatch_batches=True)}, "reads its own part"),
        ({"kwargs_handlers": [accelerate.GradScalerKwargs()]}, r"GradScalerKwargs .*keys of \[precision\]"),
        (
            {"kwargs_handlers": [accelerate.DistributedDataParallelKwargs(comm_hook=COMM.FP16)]},
            r"comm_hook='fp16'\).*codec.kind",
        ),
        (
            {
                "gradient_accumulation_plugin": accelerate.utils.GradientAccumulationPlugin(
                    num_steps=2, sync_with_dataloader=False
                )
            },
            "sync_with_dataloader=False",
        ),
    ],
)
def test_what_is_not_carried_is_refused(given: dict[str, Any], words: str) -> None:
    """In one sentence, which says what to do instead."""
    with pytest.raises(UsageError, match=words):
        settings(**given)


@pytest.mark.parametrize("name", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DYNAMO_BACKEND"])
def test_what_a_launcher_asks_for_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the answers of `accelerate config`; "no" and "false" ask for nothing."""
    monkeypatch.setenv(name, "no")
    assert settings().accumulation == 1
    monkeypatch.setenv(name, "true")
    with pytest.raises(UsageError, match=f"accelerate launch has set {name}=true"):
        settings()


def test_a_launcher_says_precision_and_accumulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `accelerate launch` hands them over."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    found = settings()
    assert (found.precision, found.accumulation) == ("bfloat16", 3)


def test_what_is_of_no_use_is_said() -> None:
    """A sentence for each."""
    found = settings(
        rng_types=["torch"],
        dataloader_config=accelerate.DataLoaderConfiguration(split_batches=True),
        kwargs_handlers=[accelerate.DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    assert [each.split(" is not used")[0] for each in found.notes] == [
        "rng_types",
        "DataLoaderConfiguration.split_batches",
        "DistributedDataParallelKwargs",
    ]


def test_every_argument_has_an_answer_on_the_page() -> None:
    """Also those of a later version, which are refused until somebody has thought of them."""
    from shoal.huggingface.accelerate.arguments import CARRIED, REFUSED, UNUSED

    names = set(signature(accelerate.Accelerator).parameters)
    assert names == {*CARRIED, *REFUSED, *UNUSED}
    assert not [name for name in names if f"`{name}`" not in PAGE]
    with pytest.raises(TypeError, match="'gradient_steps'"):
        settings(gradient_steps=2)


def test_every_call_has_an_answer() -> None:
    """It is carried, or has the same value in every run, or is refused with what to do instead."""
    from shoal.huggingface.accelerate.arguments import ANSWERS, METHODS_REFUSED

    ours = accelerator()
    there = {name for name in dir(accelerate.Accelerator) if not name.startswith("_")}
    carried = {name for name in there if hasattr(type(ours), name)}
    assert there == carried | (there & {*ANSWERS, *METHODS_REFUSED})
    methods = {name for name in there if callable(getattr(accelerate.Accelerator, name))}
    likes = {"on_main_process", "on_local_main_process", "on_last_process", "on_process", "on_local_process"}
    own = {"verify_device_map", "deepspeed_ulysses_dl_adapter"}
    hooks = {"register_load_state_pre_hook", "register_save_state_pre_hook"}
    assert not [name for name in methods - likes - own - hooks if f"`{name}" not in PAGE]
    with pytest.raises(UserCodeError, match="part of the backward"):
        _ = ours.lomo_backward
    assert (ours.scaler, ours.native_amp) == (None, False)
    with pytest.raises(AttributeError, match="no attribute 'gather_all'"):
        _ = ours.gather_all


def refused(capsys: pytest.CaptureFixture[str], call: Any) -> str:
    """What a script is told that ends with the exit code of a refusal."""
    with pytest.raises(SystemExit) as ended:
        call()
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_what_cannot_start_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that ranks cannot share, another step in the run file, an iterable without an end, nothing to train."""
    data: Any = [torch.randn(2) for _ in range(8)]

    def begin(loader: Any = None, **given: Any) -> Any:
        model = nn.Linear(2, 1)
        loader = DataLoader(data, 3) if loader is None else loader
        ours = accelerator(overrides=["run.name=mine", "run.processes=2"], **given)
        _, _, prepared = ours.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
        return lambda: next(iter(prepared))

    assert "batch_size of 3, which 2 ranks cannot share: make it a multiple of 2" in refused(capsys, begin())
    said = refused(capsys, begin(DataLoader(data, 4), config={"batch": {"global_samples": 16}}))
    assert "batch.global_samples = 16, and the DataLoader's batch_size x gradient_accumulation_steps is 4 x 1" in said

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(data)

    assert "an iterable, which has no epochs: set run.steps" in refused(capsys, begin(DataLoader(Endless(), 4)))
    short = begin(DataLoader(data, 2, drop_last=True), gradient_accumulation_steps=3)
    assert "4 batches in an epoch, which gradient_accumulation_steps = 3 does not divide" in refused(capsys, short)
    alone = accelerator()
    prepared = alone.prepare(DataLoader(data, 4))
    assert "there is nothing to train" in refused(capsys, lambda: next(iter(prepared)))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "accelerate.local_sgd", sys)
        assert 'set sync.kind = "local" and sync.period' in refused(capsys, begin(DataLoader(data, 4)))
    noisy = DataLoader(data, 4, collate_fn=lambda rows: torch.stack(rows) + torch.randn(()))
    with pytest.raises(SystemExit):
        begin(noisy)()
    assert "draws random numbers for a batch" in capsys.readouterr().err


def test_a_folder_of_others_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`load_state` goes on with a run of Shoal, and nothing else."""
    ours = accelerator()
    said = refused(capsys, lambda: ours.load_state(tmp_path))
    assert "does not stand for a checkpoint of a run of Shoal" in said
    assert "finds no checkpoint" in refused(capsys, ours.load_state)


def test_before_the_run_a_process_is_alone() -> None:
    """What scripts plan with is the plan of one process, and exchanges give back what they were given."""
    ours = accelerator(gradient_accumulation_steps=4, mixed_precision="bf16")
    assert (ours.num_processes, ours.process_index, ours.is_main_process) == (1, 0, True)
    assert (ours.gradient_accumulation_steps, ours.mixed_precision, ours.sync_gradients) == (4, "bf16", True)
    rows = torch.arange(3)
    assert ours.gather(rows) is rows
    assert ours.reduce({"a": rows})["a"] is rows
    assert ours.gather_for_metrics(["a", "b"]) == ["a", "b"]
    with ours.split_between_processes(list(range(5)), apply_padding=True) as part:
        assert part == list(range(5))
    assert ours.on_main_process(lambda: 3)() == 3
    assert ours.on_process(process_index=1)(lambda: 3)() is None


def test_what_was_prepared_may_be_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    """As automatic_gradient_accumulation.py does it: another number of batches in a step, and all of it anew."""
    ours = accelerator(overrides=["run.name=mine", "run.processes=2"])
    data: Any = [torch.randn(2) for _ in range(8)]

    def prepared(batch: int) -> Any:
        ours.free_memory()
        model = nn.Linear(2, 1)
        return ours.prepare(model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(data, batch))[2]

    prepared(8)
    ours.gradient_accumulation_steps = 4
    loader = prepared(3)
    assert (ours.gradient_accumulation_steps, len(loader)) == (4, 3)
    said = refused(capsys, lambda: next(iter(loader)))  # of 2 ranks, so that no run begins here
    assert "batch_size of 3, which 2 ranks cannot share" in said
    ours.run = object()
    said = refused(capsys, lambda: setattr(ours, "gradient_accumulation_steps", 2))
    assert "start the script for each" in said


def test_a_loss_of_a_model_keeps_its_weight() -> None:
    """Also where the loop has divided it by the batches of a step, as run_ner_no_trainer.py does; not what was computed
    from it in another way.
    """
    from transformers import BertConfig, BertForTokenClassification

    from shoal.huggingface.accelerate.state import ModelLosses

    model = BertForTokenClassification(
        BertConfig(vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
    )
    losses, words = ModelLosses(), torch.randint(0, 9, (2, 6))
    losses.watch(model)
    labels = torch.tensor([[0, 1, 1, -100, -100, -100], [1, -100, -100, -100, -100, -100]])
    loss = model(input_ids=words, labels=labels).loss
    for own in (loss, loss / 1, loss / 4, (loss / 4).float(), loss / torch.tensor(4), loss.mean(), loss.clone().sum()):
        assert losses.weight_of(own, batches=4) == 4
    for other in (loss * 0.7, loss / 2, loss + loss, loss * loss.detach(), loss + model.classifier.bias.sum()):
        assert losses.weight_of(other, batches=4) is None
    with pytest.raises(UserCodeError, match="num_items_in_batch"):
        model(input_ids=words, labels=labels, num_items_in_batch=4)
    with torch.no_grad():
        model(input_ids=words, labels=labels, num_items_in_batch=4)
    compiled: Any = torch.compile(model, backend="eager")
    losses = ModelLosses()
    losses.watch(compiled)
    assert losses.weight_of(compiled(input_ids=words, labels=labels).loss, batches=4) == 4


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor])
def test_parts_are_those_of_accelerate(kind: Any) -> None:
    """Ranks with one more come first, and padding repeats the last."""
    from shoal.huggingface.accelerate.data import part_of

    parts = [list(part_of({"a": kind([*range(5)])}, rank=r, ranks=2, fills=True)["a"]) for r in range(2)]
    assert parts == [[0, 1, 2], [3, 4, 4]]
    assert [len(part_of(kind([*range(5)]), rank=r, ranks=3, fills=False)) for r in range(3)] == [2, 2, 1]


def test_rows_that_count_for_metrics() -> None:
    """A loss that is repeated for a whole batch counts as often as a rank has samples, a copy not at all."""
    from shoal.huggingface.accelerate.data import counted_rows, once_repeated

    loss, logits = torch.ones(4), torch.ones(2, 3)
    found = counted_rows((loss, logits), rows=2, size=4)
    assert [len(each) for each in found] == [2, 2]
    assert [len(each) for each in counted_rows((loss, logits[:1]), rows=0, size=4)] == [0, 0]
    assert len(counted_rows(torch.ones(12), rows=2, size=4)) == 12
    both = torch.tensor([1.0, 2.0, 3.0, 4.0])  # two for each of two samples, as in a loss with a prior
    assert len(counted_rows(both, rows=2, size=4)) == len(once_repeated(both, rows=2, size=4)) == 4
    assert [len(once_repeated(loss, rows=rows, size=4)) for rows in (3, 0)] == [3, 1]
    assert len(once_repeated(loss * torch.nan, rows=2, size=4)) == 2
    assert counted_rows(["a", "b"], rows=0, size=4) == []
    right = torch.ones(4, dtype=torch.bool)  # of four tokens of this rank's samples
    assert len(counted_rows(right, rows=2, size=4)) == len(once_repeated(right, rows=2, size=4)) == 4
