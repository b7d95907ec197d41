"""What becomes of each field of `TrainingArguments`, and of methods and collators that a run cannot have."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.errors import UsageError, UserCodeError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow  # the import of transformers' Trainer takes seconds


@dataclass
class ForeignArguments(transformers.TrainingArguments):
    """Those of a library that extends transformers."""

    beta: float = 0.1


def arguments(folder: Path, **given: Any) -> Any:
    from shoal.huggingface import TrainingArguments

    return TrainingArguments(str(folder), use_cpu=True, **given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fsdp": "full_shard"}, "TrainingArguments.fsdp"),
        ({"auto_find_batch_size": True}, "batch.micro_samples"),
        ({"neftune_noise_alpha": 5.0}, "keyed on the sample"),
        ({"push_to_hub": True}, "upload the folder"),
        ({"data_seed": 3}, "run.seed"),
        ({"save_only_model": True}, "trainer.save_model(folder)"),
        ({"average_tokens_across_devices": False}, "the mean over all tokens"),
        ({"length_column_name": "size"}, "data.group_by_length"),
        ({"optim": "adafactor"}, "optimizers=(optimizer, scheduler)"),
        ({"optim": "adamw_bnb_8bit"}, "optimizers=(optimizer, scheduler)"),
        ({"hub_revision": "main"}, "does not carry it out"),
    ],
)
def test_what_is_not_carried_is_refused(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    """In one sentence, which names the field, or the way to have it."""
    from shoal.huggingface.arguments import require_carried

    with pytest.raises(UsageError, match=r"TrainingArguments\.") as refusal:
        require_carried(arguments(tmp_path, **given))
    assert words in str(refusal.value)


def test_deepspeed_is_refused_before_transformers_sees_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which would look for the package, and let it divide every model that is loaded."""
    with pytest.raises(SystemExit) as ended:
        arguments(tmp_path, deepspeed={"zero_optimization": {"stage": 2}})
    assert ended.value.code == 2
    assert "'stage': 2}}: use layout.shard and memory.zero" in capsys.readouterr().err


def test_what_is_of_no_use_is_said(tmp_path: Path) -> None:
    from shoal.huggingface.arguments import require_carried, unused

    given = arguments(tmp_path, dataloader_num_workers=4, ddp_find_unused_parameters=False)
    require_carried(given)
    assert [sentence.split()[0] for sentence in unused(given)] == [
        "TrainingArguments.dataloader_num_workers",
        "TrainingArguments.ddp_find_unused_parameters",
    ]
    assert unused(arguments(tmp_path)) == []


def test_each_field_has_one_answer() -> None:
    """No field is carried and refused; what is named exists in some version of transformers, most of it in this one."""
    from shoal.huggingface.arguments import CARRIED, REFUSED, UNUSED

    assert not CARRIED & (REFUSED.keys() | UNUSED.keys())
    assert not REFUSED.keys() & UNUSED.keys()
    known = {field.name for field in fields(transformers.TrainingArguments)}
    assert (CARRIED | REFUSED.keys() | UNUSED.keys()) - known <= {"warmup_ratio", "logging_dir"}


def test_transformers_own_arguments_are_refused(tmp_path: Path) -> None:
    from shoal.huggingface.arguments import require_carried

    class Theirs(transformers.TrainingArguments):
        pass

    with pytest.raises(UsageError, match=r"from shoal\.huggingface import TrainingArguments"):
        require_carried(transformers.TrainingArguments(str(tmp_path), use_cpu=True))
    with pytest.raises(UsageError, match=r"write shoal\.huggingface\.on_shoal\(Theirs\)"):
        require_carried(Theirs(str(tmp_path), use_cpu=True))


def test_arguments_of_another_library(tmp_path: Path) -> None:
    """Are those of a run, and what they were before, also behind a copy and a file."""
    from shoal.huggingface import on_shoal
    from shoal.huggingface.arguments import OfRun, require_carried

    mixed = on_shoal(ForeignArguments)
    assert on_shoal(mixed) is mixed is on_shoal(ForeignArguments)
    given = mixed(str(tmp_path), use_cpu=True, beta=0.3)
    require_carried(given)
    for same in (given, copy.deepcopy(given), pickle.loads(pickle.dumps(given))):
        assert isinstance(same, ForeignArguments)
        assert isinstance(same, OfRun)
        assert (same.beta, same.output_dir, same.world_size) == (0.3, str(tmp_path), 1)
    given.sync_ref_model = True
    with pytest.raises(UsageError, match=r"ForeignArguments\.sync_ref_model = True: no checkpoint holds"):
        require_carried(given)


def test_tables_of_the_run(tmp_path: Path) -> None:
    from shoal.huggingface.arguments import tables_of

    tables = tables_of(arguments(tmp_path, bf16=True, seed=3, save_total_limit=2))
    assert tables["run"] == {"directory": f"{tmp_path}/shoal", "seed": 3, "device": "cpu"}
    assert tables["precision"] == {"kind": "bfloat16"}
    assert tables["checkpoint"] == {"every_steps": 0, "keep": 2}
    grouped = tables_of(arguments(tmp_path, train_sampling_strategy="group_by_length"))
    assert grouped["data"] == {"group_by_length": "shoal.huggingface.labels:lengths"}


def test_the_length_of_a_run(tmp_path: Path) -> None:
    """The batch is that of one process; keys count before the configuration, and both before the arguments."""
    from shoal.huggingface.arguments import plan_of

    given = arguments(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=1.5)
    plan = plan_of(given, None, [], samples=26)
    assert (plan.batch, plan.steps_per_epoch, plan.steps) == (8, 4, 6)
    assert plan.tables["batch"] == {"micro_samples": 4}
    plan = plan_of(given, {"batch": {"global_samples": 13}, "run": {"steps": 9}}, ["run.steps=3"], samples=26)
    assert (plan.batch, plan.steps_per_epoch, plan.steps) == (13, 2, 3)
    assert plan.tables["run"]["seed"] == 42
    with pytest.raises(UsageError, match="set max_steps"):
        plan_of(given, None, [], samples=None)


def test_methods_that_would_not_be_called_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With exit code 2; those of another library's subclass of transformers' before there is an object."""
    from shoal.huggingface import Trainer, on_shoal

    class Mine(Trainer):
        def _get_train_sampler(self, *given: Any, **named: Any) -> Any: ...

    class Theirs(transformers.Trainer):
        def get_train_dataloader(self) -> Any: ...

    with pytest.raises(SystemExit) as ended:
        Mine(torch.nn.Linear(2, 2), arguments(tmp_path))
    assert ended.value.code == 2
    assert "Mine._get_train_sampler would not be called: train_sampling_strategy=" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        on_shoal(Theirs)
    assert "Theirs.get_train_dataloader would not be called: pass train_dataset" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        on_shoal(torch.nn.Linear)
    assert "on_shoal(Linear): it is neither a Trainer nor a TrainingArguments" in capsys.readouterr().err


def test_methods_that_leave_the_run_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before a search has begun, and before anybody is asked for on the network."""
    from shoal.huggingface import Trainer

    trainer = Trainer(torch.nn.Linear(2, 2), arguments(tmp_path))
    for call, instead in ((trainer.hyperparameter_search, "shoal sweep"), (trainer.push_to_hub, "upload the folder")):
        with pytest.raises(SystemExit) as ended:
            call()
        assert ended.value.code == 2
        assert instead in capsys.readouterr().err


def test_a_loss_of_ones_own_is_told_what_it_is_taken_for() -> None:
    """Unless the class says what it is a mean over; a method that is not called is named."""
    from shoal.huggingface import Trainer
    from shoal.huggingface.arguments import doubtful
    from shoal.huggingface.trainer import OnShoal

    class Doubtful(Trainer):
        def compute_loss(self, *given: Any, **named: Any) -> Any: ...
        def _save_checkpoint(self, *given: Any, **named: Any) -> None: ...

    class Told(Doubtful):
        def loss_weight(self, inputs: Any) -> float:
            return 1.0

    assert doubtful(Trainer, OnShoal) == []
    assert ["_save_checkpoint is not called" in doubtful(Told, OnShoal)[0], len(doubtful(Told, OnShoal))] == [True, 1]
    assert "override loss_weight too" in doubtful(Doubtful, OnShoal)[1]


def test_a_run_resumes_from_its_own_checkpoint_alone(tmp_path: Path) -> None:
    from shoal.huggingface.arguments import require_own_checkpoint

    for own in (None, True, False, tmp_path / "output", str(tmp_path / "output/shoal")):
        require_own_checkpoint(own, str(tmp_path / "output"))
    with pytest.raises(UsageError, match=r"checkpoint-4': a run resumes from the newest checkpoint in its own"):
        require_own_checkpoint(str(tmp_path / "another/checkpoint-4"), str(tmp_path / "output"))


def test_a_collator_that_draws_is_refused() -> None:
    """What it draws would depend on the number of ranks. One that pads is not."""
    from shoal.huggingface.labels import require_repeatable

    data = [{"input_ids": torch.arange(3)} for _ in range(4)]

    def pads(items: list[dict[str, Any]]) -> dict[str, Any]:
        return {"input_ids": torch.stack([item["input_ids"] for item in items])}

    def draws(items: list[dict[str, Any]]) -> dict[str, Any]:
        return {"input_ids": pads(items)["input_ids"] * (torch.rand(len(items), 3) > 0.1)}

    require_repeatable(pads, data)
    with pytest.raises(UserCodeError, match=r"\(draws\) draws random numbers"):
        require_repeatable(draws, data)


def test_samples_that_cannot_be_put_together_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of different lengths without a tokenizer to pad them; a column that the model does not take is left out first."""
    from shoal.huggingface import Trainer

    config = transformers.BertConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    data = [{"input_ids": [1] * length, "labels": 1, "text": "unused"} for length in (2, 3)]
    trainer = Trainer(transformers.BertForSequenceClassification(config), arguments(tmp_path), train_dataset=data)
    with pytest.raises(SystemExit):
        trainer.train()
    assert "cannot put 2 samples together" in (refusal := capsys.readouterr().err)
    assert "processing_class=tokenizer" in refusal


def test_the_labels_that_count() -> None:
    """Those other than -100; of a causal model all but the first, which nothing predicts; without labels, samples."""
    from shoal.huggingface.labels import label_count

    model = torch.nn.Linear(1, 1)
    labels = torch.tensor([[5, 6, -100], [7, -100, -100]])
    assert label_count({"labels": labels}, model, shifted=False) == 3
    assert label_count({"labels": labels}, model, shifted=True) == 1
    assert label_count({"labels": labels, "shift_labels": labels}, model, shifted=True) == 3
    assert label_count({"input_ids": labels}, model, shifted=False) == 2


def test_lengths_and_tokens_of_samples() -> None:
    """A column of lengths counts before the tokens themselves; padding counts where it is asked for."""
    import datasets

    from shoal.huggingface.labels import input_tokens, lengths

    rows = [{"input_ids": [1] * n} for n in (3, 1, 2)]
    assert lengths(rows) == lengths(datasets.Dataset.from_list(rows)) == [3, 1, 2]
    assert lengths(datasets.Dataset.from_list([{**row, "length": 7} for row in rows])) == [7, 7, 7]
    batch = {"input_ids": torch.ones(2, 3), "attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}
    model = torch.nn.Linear(1, 1)
    assert (input_tokens(batch, model, padding=True), input_tokens(batch, model, padding=False)) == (6, 3)


def test_rows_of_uneven_batches_are_padded() -> None:
    """With -100, to the longest; in the order in which they came."""
    from shoal.huggingface.run_accelerator import gathered

    rows = gathered([torch.ones(2, 3), torch.zeros(1, 1)], 1, torch.device("cpu"))
    assert rows.tolist() == [[1, 1, 1], [1, 1, 1], [0, -100, -100]]


def test_each_sample_is_evaluated_by_one_rank() -> None:
    """Each computes as many batches as any other; what is a copy counts for nothing. Also of a stream."""
    from shoal.huggingface.evaluation import shares

    data = [{"input_ids": torch.tensor([number])} for number in range(5)]
    loader = torch.utils.data.DataLoader(data, batch_size=2)  # pyright: ignore[reportArgumentType]
    found = [list(shares(loader, rank=rank, ranks=4)) for rank in range(4)]
    counted = [int(each) for rank in found for share in rank for each in share.numbers if each >= 0]
    assert sorted(counted) == [0, 1, 2, 3, 4]
    assert [share.numbers.tolist() for share in found[3]] == [[-1, -1]]
    read = [int(each) for rank in found[:3] for share in rank for each in share.batch["input_ids"]]
    assert read == counted

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(data)

    for each in (loader, torch.utils.data.DataLoader(Stream(), batch_size=2)):
        numbers = [[share.numbers.tolist() for share in shares(each, rank=rank, ranks=2)] for rank in range(2)]
        assert numbers == [[[0, 1], [4]], [[2, 3], [-1, -1]]]


def test_an_evaluation_has_batches_of_the_size_that_was_asked_for() -> None:
    """Also of the loader that transformers makes, which accelerate wraps."""
    from accelerate import Accelerator

    from shoal.huggingface.evaluation import shares

    data = [{"input_ids": torch.tensor([number])} for number in range(5)]
    loader = Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(data, batch_size=2))  # pyright: ignore
    assert [len(share.numbers) for share in shares(loader, rank=0, ranks=1)] == [2, 2, 1]
