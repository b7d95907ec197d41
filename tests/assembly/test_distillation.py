"""A teacher beside the targets, in every layout that holds whole samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shoal.assembly.job import restore
from shoal.checkpoint.weights import weights_of
from shoal.config.load import dumps
from shoal.engine.loss import cross_entropy, divergence
from shoal.errors import ConfigError
from shoal.models.config import GPTConfig
from shoal.models.gpt import GPT
from shoal.observe.sink import Sinks
from shoal.runfile.sparsity_rules import partly_trained_refusal
from tests.ranks import TestPlace
from tests.sync.steps import SGD, gap, opened, train
from tests.verification.layouts import corpus, run_file_of, verified

STUDENT = {"kind": "gpt", "vocabulary": 61, "layers": 1, "width": 16, "heads": 2}
TEACHER = {"kind": "gpt", "vocabulary": 61, "layers": 2, "width": 24, "heads": 2}


def test_the_divergence_is_that_of_both_softened_distributions() -> None:
    generator = torch.Generator().manual_seed(0)
    own, wanted = (torch.randn(3, 5, 7, dtype=torch.float64, generator=generator) for _ in range(2))
    p, q = (F.softmax(logits / 3.0, -1) for logits in (wanted, own))
    assert torch.allclose(divergence(own, wanted, 3.0), 9.0 * (p * (p / q).log()).sum(-1))
    assert torch.allclose(divergence(own, own, 3.0), torch.zeros(3, 5, dtype=torch.float64))


@pytest.fixture(scope="module")
def taught(ranks, tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """A teacher of three steps, and the tables of its student."""
    folder = tmp_path_factory.mktemp("taught")
    corpus(folder)
    ranks(1, train, SGD | {"model": TEACHER}, str(folder), 0, 3, "teacher")
    (folder / "teacher" / "run.toml").write_text(dumps(run_file_of(folder, **SGD, model=TEACHER)))
    table = {"teacher": str(folder / "teacher"), "weight": 0.75, "temperature": 3.0}
    return folder, SGD | {"model": STUDENT, "distillation": table}


def first_loss(place: TestPlace, tables: dict[str, Any], folder: str) -> tuple[float, float, dict[str, torch.Tensor]]:
    """The loss of the first step, the student's own, and the first microbatch with the weights before it."""
    run = opened(place, tables, folder, Path(folder) / "student")
    restore(run, Path(folder) / "student", Sinks())
    feed = run.feed()
    (microbatch,) = feed.next().microbatches
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    own = float(cross_entropy(run.model(microbatch.inputs), microbatch.targets).mean())
    loss = run.step(1, [microbatch], lr=0.1).loss
    feed.close()
    return loss, own, before | {"inputs": microbatch.inputs, "targets": microbatch.targets}


@pytest.mark.slow
def test_the_loss_is_a_mean_of_both(ranks, taught: tuple[Path, dict[str, Any]]) -> None:
    folder, tables = taught
    loss, own, found = ranks(1, first_loss, tables, str(folder))[0]
    teacher = GPT(GPTConfig(**{key: value for key, value in TEACHER.items() if key != "kind"})).double()
    teacher.load_state_dict(weights_of(folder / "teacher"))
    student = GPT(GPTConfig(**{key: value for key, value in STUDENT.items() if key != "kind"})).double()
    student.load_state_dict({name: each for name, each in found.items() if name not in ("inputs", "targets")})
    both = divergence(student(found["inputs"]), teacher(found["inputs"]), 3.0).mean()
    assert loss == pytest.approx(0.25 * own + 0.75 * float(both), rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"replicate": 2}, {"shard": 2}], ids=["replicate", "ZeRO-3"])
def test_every_layout_trains_as_one_process(ranks, taught: tuple[Path, dict[str, Any]], layout: dict[str, int]) -> None:
    folder, tables = taught
    wanted = ranks(1, train, tables, str(folder), 0, 4)[0]
    found = ranks(2, train, tables | {"layout": layout}, str(folder), 0, 4)[0]
    assert gap(found.weights, wanted.weights) < 1e-12
    verdict, *_ = ranks(2, verified, tables | {"layout": layout}, str(folder), False, 2)
    assert verdict["holds"], verdict["sentence"]


@pytest.mark.slow
def test_compiled_blocks_learn_from_the_teacher_too(ranks, taught: tuple[Path, dict[str, Any]]) -> None:
    """A loss that is compiled without its teacher would train, and say nothing."""
    folder, tables = taught
    wanted, own, _ = ranks(1, first_loss, tables, str(folder))[0]
    found, *_ = ranks(1, first_loss, tables | {"run": {"compile": "blocks"}}, str(folder))[0]
    assert found == pytest.approx(wanted, rel=1e-10) != own


def refused(place: TestPlace, tables: dict[str, Any], folder: str) -> str:
    with pytest.raises(ConfigError) as found:
        opened(place, tables, folder, Path(folder) / "refused")
    return str(found.value)


@pytest.mark.slow
def test_a_teacher_without_a_run_file_is_refused(ranks, taught: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    _, tables = taught
    corpus(tmp_path)
    ranks(1, train, SGD | {"model": TEACHER}, str(tmp_path), 0, 1, "unnamed")
    table = tables["distillation"] | {"teacher": str(tmp_path / "unnamed")}
    assert "has no run.toml" in ranks(1, refused, tables | {"distillation": table}, str(tmp_path))[0]


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ({"layout": {"tensor": 2}}, "[distillation] with layout.tensor = 2"),
        ({"layout": {"pipeline": 2}}, "[distillation] with layout.pipeline = 2"),
        ({"memory": {"loss_chunks": 2}}, "[distillation] with memory.loss_chunks"),
        ({"loss": {"kind": "squared_error"}}, '[distillation] with loss.kind = "squared_error"'),
    ],
)
def test_what_a_teacher_cannot_serve(tmp_path: Path, tables: dict[str, Any], named: str) -> None:
    sentence = partly_trained_refusal(run_file_of(tmp_path, **tables, distillation={"teacher": "runs/base"}))
    assert sentence is not None
    assert sentence.startswith(named)
