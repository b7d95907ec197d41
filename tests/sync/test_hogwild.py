"""`sync.kind = "hogwild"`: processes of one host write the same parameters."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.engine.recovery import resume
from shoal.errors import ConfigError
from shoal.runfile.rules import check_across
from tests.assembly.journey import save
from tests.assembly.test_embedding_tables import tables as clicks
from tests.ranks import TestPlace
from tests.sync.test_server import BATCH, LR, SGD, opened
from tests.verification.layouts import corpus, run_file_of

Tables = dict[str, Any]
STEPS, TURNS = 8, 4
SUM_ORDER = 1e-12  # float64
HOGWILD: Tables = {"sync": {"kind": "hogwild", "period": 4}}


def parameters(run: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])


def train(place: TestPlace, tables: Tables, folder: str, first: int, last: int, name: str) -> tuple[Any, list[bool]]:
    """Steps `first` + 1 .. `last`: this rank's parameters where it began, and where it ended."""
    directory = Path(folder) / name
    run, agreed = opened(place, tables, folder, directory, STEPS), []
    if first:
        resume(run.state, directory, announce=run.process.announce, warn=print)
    run.mesh.world.barrier().wait()
    began, progress = parameters(run), run.state.progress
    with closing(run.feed()) as feed:
        for _ in range(first, last):
            fed = feed.next()
            progress.advance(fed.interval)
            agreed.append(run.step(progress.step, fed.microbatches, lr=LR).agreed is not None)
    run.mesh.world.barrier().wait()
    ended = parameters(run)
    if last < STEPS:
        save(run, directory, place)
    return (began, ended), agreed


def take_turns(place: TestPlace, tables: Tables, folder: str) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Ranks step one after the other, so that no two write at once: the parameters at the end, what plain SGD on the
    gradients that were computed comes to, and how many of those were sparse in each step.
    """
    run = opened(place, tables, folder, Path(folder) / "turns", TURNS + 1)  # no agreement
    expected, others, sparse = parameters(run), f"turn of {place.rank}", dict[int, int]()
    with closing(run.feed()) as feed:
        for number in range(1, TURNS + 1):
            batches = feed.next().microbatches
            gradient = []

            def wait_and_see(norm: float, number: int = number, gradient: list[torch.Tensor] = gradient) -> None:
                found = [owned.parameter.grad for owned in run.generation.gradients.owned]
                gradient += [one.to_dense().flatten().clone() for one in found]
                sparse[number] = sum(one.is_sparse for one in found)
                if place.rank:
                    place.store.wait([f"turn {number}"])

            run.step(number, batches, lr=LR, on_gradients=wait_and_see)
            if place.rank == 0:
                place.store.set(f"turn {number}", others)
            moved = torch.cat(gradient) * (LR / place.size)
            run.mesh.world.all_reduce(moved).wait()
            expected -= moved
    run.mesh.world.barrier().wait()
    return parameters(run), expected, list(sparse.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hogwild")
    corpus(folder)
    return folder


def test_parameters_are_those_of_all_processes(ranks, folder: Path) -> None:
    """All see the same before and after training; and they do change."""
    found = ranks(3, train, SGD | BATCH | HOGWILD, str(folder), 0, STEPS, "equal")
    (began, ended), agreed = found[0]
    assert agreed == [False, False, False, True] * 2
    assert not torch.equal(began, ended)
    assert bool(torch.isfinite(ended).all())
    for (other_began, other_ended), _ in found[1:]:
        assert torch.equal(began, other_began)
        assert torch.equal(ended, other_ended)


def test_every_update_arrives_where_no_two_write_at_once(ranks, folder: Path) -> None:
    """Each process moves the parameters by its share of the step of the global batch."""
    for found, expected, sparse in ranks(2, take_turns, SGD | BATCH | {"sync": {"kind": "hogwild"}}, str(folder)):
        assert float((found - expected).norm() / expected.norm()) < SUM_ORDER
        assert not any(sparse)


def test_rows_of_tables_are_written_alone(ranks, folder: Path) -> None:
    """The gradient of an embedding table stays sparse, and each process moves the rows of its own samples by its share
    of the step.
    """
    keys = clicks() | SGD | BATCH | {"sync": {"kind": "hogwild"}}
    for found, expected, sparse in ranks(2, take_turns, keys, str(folder)):
        assert float((found - expected).norm() / expected.norm()) < SUM_ORDER
        assert sparse == [1] * TURNS


def test_a_run_goes_on_from_its_checkpoint(ranks, folder: Path) -> None:
    """From the parameters that were saved."""
    ((_, saved), _), *_ = ranks(2, train, SGD | BATCH | HOGWILD, str(folder), 0, 4, "resumed")
    found = ranks(2, train, SGD | BATCH | HOGWILD, str(folder), 4, STEPS, "resumed")
    assert all(torch.equal(began, saved) for (began, _), _ in found)
    assert all(not torch.equal(ended, saved) for (_, ended), _ in found)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"optimizer": {"kind": "adamw", "clip_norm": None}}, 'optimizer.kind = "adamw"'),
        ({"optimizer": {"kind": "sgd", "momentum": 0.9}}, "optimizer.momentum = 0.9"),
        ({"run": {"processes": 1}}, "one replica"),
        ({"layout": {"tensor": 2}, "run": {"processes": 4}}, "layout.tensor = 2"),
    ],
)
def test_what_cannot_be_shared_is_refused(tmp_path: Path, tables: Tables, words: str) -> None:
    """In a sentence, before any process starts."""
    corpus(tmp_path)
    tables = {"run": {"processes": 2}, "optimizer": {"kind": "sgd"}, **tables, "sync": {"kind": "hogwild"}}
    if tables["optimizer"]["kind"] == "sgd":
        tables["optimizer"] = {"lr": 0.1, **tables["optimizer"]}
    with pytest.raises(ConfigError, match=words):
        check_across(run_file_of(tmp_path, **tables), file="hogwild.toml")
