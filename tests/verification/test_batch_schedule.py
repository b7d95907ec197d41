"""`batch.schedule`: steps that grow, with every sample accounted, in every layout and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.assembly.splitting import microbatching
from shoal.data.config import BatchConfig, BatchPhase
from shoal.data.feed import Feed, StepShare
from shoal.data.order import Order
from shoal.runfile.rules import refusal
from tests.assembly.journey import Leg, travel
from tests.verification.layouts import corpus, run_file_of, verified

SAME_MATH = 1e-12
"""Losses in float64, relative."""
FLOAT64 = {"precision": {"kind": "float64"}}
PHASES = [{"samples": 2, "until": 4}, {"samples": 4, "until": 13}]
BATCH = {"batch": {"global_samples": 8, "schedule": PHASES}}
SIZES = [2, 2, 4, 4, 4, 8, 8]
"""Of the first steps: the third phase begins at the first step from 13 on, which is at 16."""

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "microbatches": (1, {"batch": {**BATCH["batch"], "micro_samples": 3}}),
    "replicate": (2, {"layout": {"replicate": 2}}),
    "ZeRO-3": (2, {"layout": {"shard": 2}, "memory": {"zero": 3}}),
    "pipeline": (2, {"layout": {"pipeline": 2}, "pipeline": {"microbatches": 2}}),
    "tensor x replicate": (4, {"layout": {"tensor": 2, "replicate": 2}}),
}
FEW = ["microbatches", "replicate", "ZeRO-3", "pipeline"]
STRESS = pytest.mark.stress


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("batches")
    corpus(folder)
    return folder


def phases(*pairs: tuple[int, int]) -> tuple[BatchPhase, ...]:
    return tuple(BatchPhase(samples, until) for samples, until in pairs)


@pytest.mark.parametrize(
    "schedule",
    [(), phases((2, 4), (4, 13)), phases((3, 1), (5, 2), (7, 100)), phases((8, 3)), phases((1, 50), (6, 51))],
)
def test_sizes_of_steps_are_those_of_a_walk(schedule: tuple[BatchPhase, ...]) -> None:
    """By number and by position, and how many there are to a position."""
    batch, position = BatchConfig(8, schedule=schedule), 0
    for number in range(1, 80):
        size = batch.samples_at(position)
        assert batch.samples_of(number) == size
        assert StepShare(8, schedule=schedule).samples_at(position) == size
        assert {batch.steps_to(at) for at in range(position + 1, position + size + 1)} == {number}
        position += size


class Numbers:
    """As many samples."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return np.full(1, index, dtype=np.float32), np.float32(0)


def test_every_sample_is_used_once_by_all_ranks_together() -> None:
    """Also from the middle of a phase on, as a resumed run reads."""
    for start, sizes in ((0, SIZES), (8, SIZES[3:])):
        positions: list[int] = []
        share = [StepShare(8, replica, 2, schedule=phases((2, 4), (4, 13))) for replica in range(2)]
        with (
            Feed(Numbers(), Order(64, 0), share[0], start=start) as one,
            Feed(Numbers(), Order(64, 0), share[1], start=start) as other,
        ):
            for size in sizes:
                steps = [one.next(), other.next()]
                assert {len(step.interval) for step in steps} == {size}
                positions += [int(p) for step in steps for batch in step.microbatches for p in batch.positions]
        assert positions == list(range(start, start + sum(sizes)))


@pytest.mark.parametrize("layout", [pytest.param(n, marks=() if n in FEW else STRESS) for n in LAYOUTS])
def test_it_is_proved_in_every_layout(ranks, folder: Path, layout: str) -> None:
    """Through all phases; rates follow the batch where it is asked for."""
    world, tables = LAYOUTS[layout]
    optimizer = {"optimizer": {"kind": "sgd", "lr": 0.1, "lr_for_samples": 8}}
    verdict, *_ = ranks(world, verified, BATCH | optimizer | tables, str(folder), True, len(SIZES))
    assert verdict["holds"], verdict["sentence"]


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_the_middle_of_a_phase(ranks, folder: Path) -> None:
    """In other layouts: the losses are those of one process without a break."""
    legs: list[Leg] = []
    for layout, steps in (("one", 3), ("ZeRO-3", 2), ("pipeline", 2)):
        world, tables = LAYOUTS[layout]
        legs.append(ranks(world, travel, BATCH | tables | FLOAT64, str(folder), "growing", steps)[0])
    straight = ranks(1, travel, BATCH | FLOAT64, str(folder), "straight", len(SIZES))[0]
    assert [loss for leg in legs for loss in leg.losses] == pytest.approx(straight.losses, rel=SAME_MATH)


def test_small_steps_of_a_split_model_are_not_filled_up(folder: Path) -> None:
    """A step of a phase has as many microbatches as its own samples ask for."""
    layout = {"layout": {"shard": 2}, "batch": {**BATCH["batch"], "micro_samples": 1}}
    run_file = run_file_of(folder, **layout)
    uniform = microbatching(run_file, run_file.layout.layout(2)).uniform
    assert uniform is not None
    assert list(uniform.counts) == [1, 2, 4]


REFUSED = [
    ({"layout": {"shard": 4}}, 4, "use a multiple of 1 from 4 on"),
    ({"layout": {"shard": 2}, "batch": {"global_samples": 9, "schedule": PHASES}}, 2, "use multiples of 2"),
    ({"sync": {"kind": "local"}}, 2, 'set it to "allreduce"'),
    ({"elastic": {"min": 1}}, 2, "leave one of the two out"),
    ({"batch": {**BATCH["batch"], "division": "by_speed"}}, 2, "leave one of the two out"),
]


@pytest.mark.parametrize(("tables", "processes", "repair"), REFUSED)
def test_it_is_refused_where_steps_are_of_one_size(
    folder: Path, tables: dict[str, Any], processes: int, repair: str
) -> None:
    """With what to do."""
    run_file = run_file_of(folder, **(BATCH | tables))
    run_file = msgspec.structs.replace(run_file, run=msgspec.structs.replace(run_file.run, processes=processes))
    assert repair in (refusal(run_file) or "")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"schedule": phases((2, 8), (4, 4))}, "ascending"),
        ({"schedule": phases((16, 8))}, "raise global_samples"),
        ({"schedule": phases((2, 8)), "epoch_end": "short"}, "leave epoch_end out"),
    ],
)
def test_phases_that_make_no_sense_are_refused(keys: dict[str, Any], said: str) -> None:
    """By the table itself."""
    with pytest.raises(ValueError, match=said):
        BatchConfig(8, **keys)
