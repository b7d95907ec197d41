"""`batch.division = "by_speed"`: who computes what changes, and nothing else."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from shoal.errors import ConfigError
from shoal.runfile.rules import check_across
from tests.assembly.journey import whole_state
from tests.ranks import TestPlace
from tests.sync.test_server import LR, SGD, distance, opened
from tests.verification.layouts import corpus, run_file_of

Tables = dict[str, Any]
STEPS = 8
SUM_ORDER = 1e-12  # float64
SPEEDS = [(3, [3.0, 1.0]), (5, [1.0, 5.0])]
"""After which step which speeds are told."""
BY_SPEED: Tables = {"batch": {"global_samples": 8, "division": "by_speed", "denominator": "samples"}}
AVERAGE: Tables = {"sync": {"kind": "local", "period": 1, "outer_lr": 1.0, "outer_momentum": 0.0}}


def train(place: TestPlace, tables: Tables, folder: str, divides: bool) -> tuple[dict[str, Tensor], list[list[int]]]:
    """The state after the last step, and the positions that this rank computed in each step."""
    run, positions = opened(place, tables, folder, Path(folder) / "unused", STEPS), []
    with closing(run.feed()) as feed:
        for number in range(1, STEPS + 1):
            fed = feed.next()
            run.state.progress.advance(fed.interval)
            positions.append([int(p) for batch in fed.microbatches for p in batch.positions])
            run.step(number, fed.microbatches, lr=LR)
            for after, speeds in SPEEDS if divides else ():
                if after == number:
                    feed.divide(speeds)
    return whole_state(run), positions


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("division")
    corpus(folder)
    return folder


@pytest.mark.matrix(first=2)
@pytest.mark.parametrize(
    "sync",
    [{}, {"sync": {"kind": "server"}}, {"sync": {"kind": "server", "admission": "bounded", "bound": 0}}, AVERAGE],
    ids=["all-reduce", "server", "bounded", "local"],
)
def test_weights_are_those_of_even_shares(ranks, folder: Path, sync: Tables) -> None:
    """Though replicas compute other samples: a gradient counts as much as its samples weigh."""
    found = ranks(2, train, SGD | BY_SPEED | sync, str(folder), True)
    even, *_ = ranks(2, train, SGD | BY_SPEED, str(folder), False)
    assert distance(found[0][0], even[0]) < SUM_ORDER
    counts = [[len(step) for step in positions] for _, positions in found]
    assert [4, 4] in list(map(list, zip(*counts, strict=True)))
    assert [6, 2] in list(map(list, zip(*counts, strict=True)))
    assert counts[1][-1] > counts[0][-1]


def test_the_batch_and_its_order_stay(ranks, folder: Path) -> None:
    """The positions of all replicas, one behind the other, are those of the step."""
    (_, first), (_, second) = ranks(2, train, SGD | BY_SPEED, str(folder), True)
    for step, (one, other) in enumerate(zip(first, second, strict=True)):
        assert one + other == list(range(8 * step, 8 * step + 8))


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"sync": {"kind": "gossip"}}, 'sync.kind = "gossip": it counts all replicas the same'),
        ({"sync": {"kind": "allreduce", "order": "canonical", "logical_shards": 4}}, 'sync.order = "canonical"'),
        ({"layout": {"tensor": 2}, "run": {"processes": 4}}, "layout.tensor = 2: it is for replicas of one rank"),
    ],
)
def test_what_cannot_be_divided_is_refused(tmp_path: Path, tables: Tables, words: str) -> None:
    """In a sentence, before any process starts."""
    corpus(tmp_path)
    tables = {"run": {"processes": 2}, **BY_SPEED, **tables}
    with pytest.raises(ConfigError, match=f'batch.division = "by_speed" with {words}'):
        check_across(run_file_of(tmp_path, **tables), file="division.toml")
