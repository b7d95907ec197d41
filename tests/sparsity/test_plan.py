"""When masks change, and how many weights each layer keeps."""

from __future__ import annotations

import math

import msgspec
import pytest

from shoal.sparsity.config import L0, SET, Magnitude, MaskSchedule, RigL, Snip, Sparse
from shoal.sparsity.mask_plan import MaskPlan, erk


def plan(config: Sparse, **schedule: object) -> MaskPlan:
    changed = msgspec.structs.replace(config, schedule=msgspec.convert({**schedule}, MaskSchedule))
    return MaskPlan(changed, steps=100)


def test_a_cubic_schedule_is_that_of_its_paper() -> None:
    """arXiv:1710.01878, equation 1, from density 1 to 0.1 between steps 10 and 50."""
    of = plan(Magnitude(density=0.1), begin=10, end=50, every=10)
    assert [step for step in range(1, 101) if of.due(step)] == [10, 20, 30, 40, 50]
    sparsities = [1 - of.density(step) for step in (10, 20, 30, 40, 50, 90)]
    assert sparsities == pytest.approx([0.9 * (1 - (1 - t) ** 3) for t in (0, 0.25, 0.5, 0.75, 1, 1)])
    assert of.density(9) == 1.0


def test_the_last_step_of_a_schedule_is_due_whatever_the_interval() -> None:
    of = plan(Magnitude(density=0.1), begin=3, end=50, every=20)
    assert [step for step in range(1, 101) if of.due(step)] == [3, 23, 43, 50]
    assert of.density(50) == 0.1


def test_one_shot_prunes_once() -> None:
    of = plan(Magnitude(density=0.25), shape="one_shot", begin=7)
    assert [step for step in range(1, 101) if of.due(step)] == [7]
    assert [of.density(step) for step in (6, 7, 100)] == [1.0, 0.25, 0.25]


def test_masks_that_are_made_once_are_late_after_their_step() -> None:
    """Where that step was skipped, the next one makes them; gradual ones have other steps."""
    for of, once in (
        (plan(Snip(density=0.25), shape="one_shot", begin=7), 7),
        (plan(L0(density=0.25), begin=2, end=9), 9),
    ):
        assert [step for step in range(1, 101) if not of.late(step)] == list(range(1, once + 1))
    assert not any(plan(Magnitude(density=0.25), begin=7, end=9).late(step) for step in range(1, 101))
    assert not any(plan(SET(density=0.25), shape="one_shot").late(step) for step in range(1, 101))


def test_rigl_moves_fewer_weights_by_a_cosine() -> None:
    """arXiv:1911.11134, section 3: from `drop` to nothing; no change at the end."""
    of = plan(RigL(density=0.1, drop=0.4), every=10, end=80)
    assert [step for step in range(1, 101) if of.due(step)] == list(range(10, 80, 10))
    assert [of.moved(step) for step in (0, 40, 80)] == pytest.approx([0.4, 0.2, 0.0])
    assert of.density(1) == 0.1


def test_erk_keeps_more_of_small_layers_and_the_density_of_all() -> None:
    shapes = {"small": (16, 8, 3, 3), "large": (256, 128, 3, 3), "head": (10, 256)}
    shares = erk(shapes, 0.1)
    numbers = {name: math.prod(shape) for name, shape in shapes.items()}
    kept = sum(shares[name] * numbers[name] for name in shapes)
    assert kept == pytest.approx(0.1 * sum(numbers.values()))
    assert shares["small"] == shares["head"] == 1.0
    assert shares["large"] < 0.1
    raw = {name: sum(shape) / math.prod(shape) for name, shape in {"a": (64, 64), "b": (256, 256)}.items()}
    found = erk({"a": (64, 64), "b": (256, 256)}, 0.1)
    assert found["a"] / found["b"] == pytest.approx(raw["a"] / raw["b"])


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"kind": "magnitude"}, "density is missing"),
        ({"kind": "magnitude", "pattern": "4:4"}, "masks nothing"),
        ({"kind": "magnitude", "pattern": "2:4", "density": 0.1}, "leave density out"),
        ({"kind": "magnitude", "pattern": "2:4", "distribution": "erk"}, "leave distribution out"),
        ({"kind": "rigl", "pattern": "2:4"}, "moves weights anywhere"),
        ({"kind": "set", "density": 0.1, "distribution": "global"}, "whose layers keep their densities"),
        ({"kind": "top_kast", "density": 0.6, "trained": 0.5}, "trained is at least density"),
        ({"kind": "magnitude", "density": 0.1, "schedule": {"begin": 5, "end": 4}}, "is before begin"),
    ],
)
def test_a_table_that_cannot_be_is_refused_in_a_sentence(table: dict[str, object], sentence: str) -> None:
    from shoal.sparsity.config import SparsityConfig

    with pytest.raises(msgspec.ValidationError, match=sentence):
        msgspec.convert(table, SparsityConfig)
