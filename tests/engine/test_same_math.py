"""Promise 1: every world size and every accumulation computes the same update."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from shoal.comm.conditions import Conditions, Fault
from shoal.engine.tally import PendingTally
from tests.comm.groups import replicas
from tests.engine.same_math import (
    ADAM,
    EXACT,
    Case,
    Pictures,
    Weighted,
    alone,
    dropping_gpt,
    feed,
    gpt,
    grouped_net,
    train_step,
    trajectory,
)
from tests.ranks import TestPlace

# docs/reference/tolerances.md: trajectories of losses, relative
FLOAT32, FLOAT64 = 1e-5, 1e-12
# weights after SGD steps, relative to their norm; a few steps deep in float32
WEIGHTS32 = 1e-5

CASES = {
    "own module, float32": Case(),
    "own module, float64": Case(precision=EXACT, steps=20),
    "own module, AdamW": Case(optimizer=ADAM),
    "averaged over samples": Case(denominator="samples", precision=EXACT),
    "the user's weights": Case(data=Weighted, precision=EXACT),
    "GPT with tied head and grouped queries": Case(model=gpt, precision=EXACT, optimizer=ADAM),
    "GPT with dropout": Case(model=dropping_gpt, precision=EXACT),
    "batch statistics over groups": Case(model=grouped_net, data=Pictures, precision=EXACT, group=3),
}


def difference(got, want) -> tuple[float, float, float]:
    """The largest relative difference of losses, norms and final weights."""
    losses = max(abs(a - b) / abs(b) for a, b in zip(got[0], want[0], strict=True))
    norms = max(abs(a - b) / abs(b) for a, b in zip(got[1], want[1], strict=True))
    weights = max(float((got[2][n] - w).norm() / w.norm().clamp_min(1e-9)) for n, w in want[2].items())
    return losses, norms, weights


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("world", "micro"), [(2, None), (3, 3), (4, 3)])
def test_world_size_and_accumulation_change_nothing(ranks, name: str, world: int, micro: int | None) -> None:
    """Losses, norms and weights of 2, 3 and 4 ranks with and without accumulation are those of one process."""
    case = CASES[name]
    want = alone(case)
    exact = case.precision == EXACT
    for got in ranks(world, trajectory, case, micro):
        losses, norms, weights = difference(got, want)
        assert losses <= (FLOAT64 if exact else FLOAT32)
        assert norms <= (FLOAT64 * 10 if exact else FLOAT32)
        assert weights <= (FLOAT64 * 10 if exact else WEIGHTS32)


@pytest.mark.parametrize("micro", [6, 3, 1, 5])
def test_accumulation_on_one_process_changes_nothing(micro: int) -> None:
    """2, 4, 12 and uneven microbatches of one process are the whole batch at once."""
    case = Case(precision=EXACT)
    losses, norms, weights = difference(alone(case, micro), alone(case))
    assert max(losses, norms, weights) <= FLOAT64 * 10


def test_a_step_trains_whatever_mode_it_finds() -> None:
    """A sample of the text between two steps leaves a model that does not drop: the next step drops again."""
    case = Case(model=dropping_gpt, precision=EXACT, steps=2)
    mesh = replicas(TestPlace(0, 1, dist.HashStore()))
    step, losses = train_step(case, mesh), []
    with feed(case, mesh, None) as source:
        for number in (1, 2):
            step.context.model.eval()
            losses.append(step(number, source.next().microbatches, lr=case.optimizer.lr).loss)
    assert losses == alone(case)[0]
    assert all(module.training for module in step.context.model.modules())


def test_all_ranks_hold_the_same_bits(ranks) -> None:
    """Losses, norms and weights are bitwise equal on every rank: ranks never drift apart."""
    first, *others = ranks(3, trajectory, Case(optimizer=ADAM), 2)
    for other in others:
        assert other[:2] == first[:2]
        assert all(torch.equal(other[2][name], tensor) for name, tensor in first[2].items())


class OwnCount(PendingTally):
    """A denominator broken on purpose: each rank divides by its own weights, as an average of averages does."""

    def __init__(self, microbatches, group, **others) -> None:
        self._own = sum(batch.weight for batch in microbatches) * group.size
        super().__init__(microbatches, group, **others)

    def wait(self):
        return dataclasses.replace(super().wait(), denominator=self._own)


def with_own_count(place, case: Case) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.engine.rank_context.PendingTally", OwnCount)
        return trajectory(place, case, None)[0]


def test_a_broken_denominator_shows(ranks) -> None:
    """Dividing by a rank's own count, the field's classic mistake, is far outside the tolerance: the test has teeth."""
    case = Case(precision=EXACT)
    want = alone(case)[0]
    got = ranks(2, with_own_count, case)[0]
    assert max(abs(a - b) / abs(b) for a, b in zip(got, want, strict=True)) > 1e-4


def test_a_corrupted_sum_shows(ranks) -> None:
    """One wrong number in one bucket of one step changes the trajectory beyond the tolerance."""
    case = Case(precision=EXACT)
    fault = Conditions(faults=[Fault("all_reduce", 5, "corrupt")])
    losses, _, weights = difference(ranks(2, trajectory, case, None, fault)[0], alone(case))
    assert max(losses, weights) > 1e-6
