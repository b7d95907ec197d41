"""`sync.kind = "local"`: replicas take steps of their own and agree every few steps."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from shoal.engine.resume import resume
from shoal.errors import ConfigError
from shoal.launch.environment import Place
from shoal.recipes.run import Run, open_run
from shoal.runfile.rules import check_across
from tests.ranks import TestPlace
from tests.recipes.journey import save, whole_state
from tests.recipes.layouts import corpus, run_file_of

Tables = dict[str, Any]
LR, STEPS = 0.05, 12
SGD: Tables = {"optimizer": {"kind": "sgd", "clip_norm": None}, "precision": {"kind": "float64"}}
ADAM: Tables = {"precision": {"kind": "float64"}}
AVERAGE = {"kind": "local", "period": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
DILOCO = {"kind": "local", "period": 4}
SUM_ORDER = 1e-12  # float64


def opened(place: TestPlace, tables: Tables, folder: str, directory: Path, steps: int = STEPS) -> Run:
    run_file = run_file_of(Path(folder), **tables)
    own = msgspec.structs.replace(run_file.run, processes=place.size, directory=str(directory), steps=steps)
    run_file = msgspec.structs.replace(run_file, run=own)
    check_across(run_file, file="local.toml")
    return open_run(run_file, Place(place.rank, place.size, place.rank, place.size, 0, "shoal"), store=place.store)


def train(
    place: TestPlace, tables: Tables, folder: str, first: int = 0, last: int = STEPS, name: str = ""
) -> tuple[dict[str, Tensor], list[bool], int]:
    """Steps `first` + 1 .. `last`, from a checkpoint of `name` if there is one, saved there: the whole state at rank 0,
    after which steps replicas agreed, and bytes that this rank sent.
    """
    directory = Path(folder) / (name or "unused")
    run, agreed = opened(place, tables, folder, directory), []
    if first:
        resume(run.state, directory, announce=run.process.announce, warn=print)
    run.mesh.ledger.take()
    progress, sent = run.state.progress, 0
    with closing(run.feed()) as feed:
        for _ in range(first, last):
            fed = feed.next()
            progress.advance(fed.interval)
            result = run.step(progress.step, fed.microbatches, lr=LR)
            agreed.append(result.agreed is not None)
            sent += result.bytes_sent
    sent += sum(entry.bytes_sent for entry in run.mesh.ledger.take().values())
    if name:
        save(run, directory, place)
    return whole_state(run), agreed, sent


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("local")
    corpus(folder)
    return folder


def weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith("model/")}


@pytest.mark.parametrize("layout", [{"replicate": 2}, {"replicate": 2, "shard": 2}], ids=str)
def test_averaging_after_every_step_is_all_reduce(ranks, folder: Path, layout: Tables) -> None:
    """With plain SGD the mean of steps is the step of the mean; replicas have equally many tokens here."""
    size = 2 * layout.get("shard", 1)
    tables = SGD | {"layout": layout, "batch": {"global_samples": 4 * size, "denominator": "samples"}}
    (local, *_), *_ = ranks(size, train, tables | {"sync": AVERAGE}, str(folder))
    (plain, *_), *_ = ranks(size, train, tables, str(folder))
    for name, wanted in weights(plain).items():
        assert float((local[name] - wanted).norm() / wanted.norm()) < SUM_ORDER, name


def test_replicas_agree_when_a_period_is_over(ranks, folder: Path) -> None:
    """Every fourth step, and after the last one."""
    _, agreed, _ = ranks(2, train, ADAM | {"sync": DILOCO | {"period": 5}}, str(folder))[0]
    assert agreed == [step % 5 == 0 or step == STEPS for step in range(1, STEPS + 1)]


def test_an_agreement_a_period_sends_less(ranks, folder: Path) -> None:
    """A twelfth of the bytes of gradients, and a little for counting."""
    sync = DILOCO | {"period": STEPS, "outer_momentum": 0.0}
    (*_, local), *_ = ranks(2, train, ADAM | {"sync": sync}, str(folder))
    (*_, plain), *_ = ranks(2, train, ADAM, str(folder))
    assert local < 1.2 * plain / STEPS


@pytest.mark.parametrize("layout", [{"replicate": 2}, {"replicate": 2, "shard": 2}], ids=str)
def test_a_run_goes_on_bitwise(ranks, folder: Path, layout: Tables) -> None:
    """Each replica's moments, the outer momentum and the parameters are those of the run that was not interrupted."""
    size, name = 2 * layout.get("shard", 1), f"run-{len(layout)}"
    tables = ADAM | {"layout": layout, "sync": DILOCO, "batch": {"global_samples": 2 * size}}
    (whole, *_), *_ = ranks(size, train, tables, str(folder))
    ranks(size, train, tables, str(folder), 0, 8, name)
    (resumed, *_), *_ = ranks(size, train, tables, str(folder), 8, STEPS, name)
    assert resumed.keys() == whole.keys()
    assert {"sync/momentum/head.weight", "replica-1/optimizer/exp_avg/head.weight"} <= whole.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in resumed.items())


def test_replicas_have_moments_of_their_own(ranks, folder: Path) -> None:
    """Which a strategy that saved one of them for all would lose."""
    (state, *_), *_ = ranks(2, train, ADAM | {"sync": DILOCO}, str(folder))
    own, other = (state[f"replica-{number}/optimizer/exp_avg/head.weight"] for number in (0, 1))
    assert not torch.equal(own, other)


@pytest.mark.parametrize("sync", [{}, DILOCO], ids=["all-reduce", "local"])
def test_other_replicas_go_on_from_it(ranks, folder: Path, sync: Tables) -> None:
    """Three replicas, or a synchronous run, take over the state of two."""
    name = f"two-{len(sync)}"
    ranks(2, train, ADAM | {"sync": DILOCO, "batch": {"global_samples": 6}}, str(folder), 0, 8, name)
    tables = ADAM | {"batch": {"global_samples": 6}} | ({"sync": sync} if sync else {})
    (state, *_), *_ = ranks(3, train, tables, str(folder), 8, STEPS, name)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state.values())


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"run": {"processes": 1}}, "one replica: there is no other to agree with"),
        ({"layout": {"shard": 2}, "run": {"processes": 2}}, "one replica"),
        ({"gradients": {"schedule": "priority"}}, 'gradients.schedule = "priority"'),
        ({"precision": {"kind": "float16"}}, 'precision.kind = "float16"'),
    ],
)
def test_what_cannot_be_local_is_refused(tmp_path: Path, tables: Tables, words: str) -> None:
    """In a sentence, before any process starts."""
    corpus(tmp_path)
    tables = {"run": {"processes": 2}, "optimizer": {"clip_norm": None}, **tables, "sync": {"kind": "local"}}
    with pytest.raises(ConfigError, match=words):
        check_across(run_file_of(tmp_path, **tables), file="local.toml")
