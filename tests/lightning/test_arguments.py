"""Each argument of Lightning's `Trainer` has an answer; batches of an evaluation are divided without loss."""

from __future__ import annotations

from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import UsageError
from shoal.lightning.arguments import CARRIED, REFUSED, require_callback, require_optimizers, settings_of, steps_of
from shoal.lightning.data import shares
from shoal.observe.sink import OPEN_END

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
slow = pytest.mark.slow  # the import of lightning takes seconds
PAGE = Path(__file__).parents[2] / "docs" / "migration" / "lightning.md"


@slow
def test_every_argument_has_an_answer_and_a_row() -> None:
    """One that is neither carried nor refused would be lost; each stands on the page."""
    from lightning import Trainer

    for name in set(signature(Trainer).parameters) - {"suggest_integrations"}:
        assert (name in CARRIED) != (name in REFUSED), name
        assert f"`{name}" in PAGE.read_text(), name


@slow
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"use_distributed_sampler": False}, "divides the samples"),
        ({"plugins": [1]}, "precision.kind"),
        ({"strategy": "ddp_magic"}, "memory.zero"),
        ({"strategy": "deepspeed_stage_3_offload"}, "memory.offload"),
        ({"precision": "bf16-true"}, "bfloat16_params"),
        ({"accelerator": "tpu"}, "run.device"),
        ({"devices": 0}, "give their number"),
        ({"reload_dataloaders_every_n_epochs": 1}, "once"),
    ],
)
def test_what_is_not_carried_is_refused(given: dict[str, Any], sentence: str) -> None:
    """In one sentence, with what to do instead."""
    with pytest.raises(UsageError, match=sentence):
        settings_of(given)


@slow
def test_an_unknown_argument_is_an_error_of_python() -> None:
    with pytest.raises(TypeError, match="max_epoch"):
        settings_of({"max_epoch": 3})


@slow
@pytest.mark.skipif(find_spec("jsonargparse") is None, reason="LightningCLI needs jsonargparse")
def test_the_command_line_of_lightning_finds_the_arguments() -> None:
    """`LightningCLI(trainer_class=Trainer)` takes `--trainer.max_epochs` and the others."""
    from lightning.pytorch.cli import LightningArgumentParser

    from shoal.lightning import Trainer

    parser = LightningArgumentParser()
    parser.add_lightning_class_args(Trainer, "trainer")
    assert parser.parse_args(["--trainer.max_epochs=3"]).trainer.max_epochs == 3


@slow
def test_callbacks_that_take_steps_of_their_own_are_refused() -> None:
    from lightning.pytorch.callbacks import BackboneFinetuning, EarlyStopping, StochasticWeightAveraging

    class Own(StochasticWeightAveraging):
        pass

    require_callback(EarlyStopping("loss"))
    for each in (StochasticWeightAveraging(1e-2), Own(1e-2)):
        with pytest.raises(UsageError, match="WeightAveraging"):
            settings_of({"callbacks": each})
    with pytest.raises(UsageError, match="on_train_start"):
        settings_of({"callbacks": BackboneFinetuning()})


@slow
@pytest.mark.parametrize(
    ("devices", "nodes", "processes"), [("auto", 1, 1), (4, 2, 8), ("3", 1, 3), ([0, 2], 1, 2), ("0,1", 1, 2)]
)
def test_devices_say_how_many_processes_the_script_is_written_for(devices: Any, nodes: int, processes: int) -> None:
    found = settings_of({"accelerator": "cpu", "devices": devices, "num_nodes": nodes})
    assert (found.processes, found.zero) == (processes, None)


@slow
@pytest.mark.parametrize(
    ("strategy", "zero"),
    [("auto", None), ("ddp_find_unused_parameters_true", None), ("fsdp", 3), ("deepspeed_stage_1", 1)],
)
def test_a_strategy_is_a_stage(strategy: str, zero: int | None) -> None:
    assert settings_of({"strategy": strategy}).zero == zero


def test_steps_follow_from_epochs_and_steps() -> None:
    """Accumulation rounds up in each epoch; manual optimization counts the updates of all optimizers."""
    known = {"batches": 7, "accumulation": 2, "optimizers": 1}
    assert steps_of(**known, max_epochs=3, max_steps=-1) == 12
    assert steps_of(**known, max_epochs=3, max_steps=5) == 5
    assert steps_of(**known, max_epochs=-1, max_steps=-1) == OPEN_END
    assert steps_of(**{**known, "optimizers": 2}, max_epochs=None, max_steps=5) == OPEN_END


@pytest.mark.parametrize("samples", range(1, 30))
@pytest.mark.parametrize(("size", "ranks"), [(4, 2), (4, 4), (8, 3), (2, 2), (1, 2), (3, 4)])
def test_an_evaluation_has_each_sample_once(samples: int, size: int, ranks: int) -> None:
    """In as many batches on every rank; where a batch can be shared, by all of them; else they take turns."""
    each = [shares(samples, size, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert sorted(number for own in each for rows in own for number in rows) == list(range(samples))
    assert {len(own) for own in each} == {-(-samples // size)}
    if samples >= size >= 2 * ranks:
        assert all(rows for own in each for rows in own)
    have = [sum(len(rows) for rows in own) for own in each]
    assert size >= ranks or max(have) - min(have) <= 1


@slow
def test_modules_that_would_train_otherwise_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Each by a sentence, before anything starts."""
    import torch
    from lightning import LightningModule
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    from shoal.lightning import Trainer

    class Own(LightningModule):
        def training_step(self, batch: Any) -> Any: ...

        def configure_optimizers(self) -> Any: ...

    class Backward(Own):
        def backward(self, loss: Any) -> None: ...

    class Iterates(Own):
        def training_step(self, dataloader_iter: Any) -> Any: ...

    class Adds(Own):
        def configure_callbacks(self) -> Any:
            return StochasticWeightAveraging(1e-2)

    def refusal(module: Any, **given: Any) -> str:
        trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1)
        with pytest.raises(SystemExit) as ended:
            trainer.fit(module, [1, 2], **given)
        assert ended.value.code == 2
        return capsys.readouterr().err

    assert "on_after_backward" in refusal(Backward())
    assert "take batch" in refusal(Iterates())
    assert "WeightAveraging" in refusal(Adds())
    assert "load_from_checkpoint" in refusal(Own(), ckpt_path="a.ckpt")
    assert "DataLoader" in refusal(Own())
    assert "no LightningModule" in refusal(torch.nn.Linear(1, 1))
    with pytest.raises(UsageError, match="several times over"):
        require_optimizers([torch.optim.LBFGS(torch.nn.Linear(1, 1).parameters())])
