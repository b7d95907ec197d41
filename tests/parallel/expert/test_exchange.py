"""A mixture split over ranks is the mixture."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.comm.collective import Alone
from shoal.errors import LayoutError
from shoal.models.mixture import Mixture, MixtureOptions
from shoal.parallel.expert import ExpertGroups, GroupExchange, bounds, by_expert, check_experts
from tests.parallel.expert.split_layer import Case, alone, assembled, differences, on_rank

# float64 sums in another order.
EXACT = 1e-12
FULL: dict[str, Any] = {"capacity_factor": 0.6}

CASES = [
    Case({"shard": 2, "expert": 2}),
    Case({"replicate": 2}, options=FULL),
    Case({"tensor": 2, "expert": 2}, options=FULL, seq=7),
    Case({"tensor": 2, "expert": 1}, options={"gate": "sigmoid"}, seq=7),
    Case({"tensor": 2, "expert": 2}, sequence_parallel=True, options=FULL),
    Case({"context": 2, "expert": 2}, options=FULL),
    Case({"context": 2, "expert": 1}, options={"top_k": 1, "normalise_gates": False}, padding=1),
    Case({"context": 2, "tensor": 2, "expert": 4}, options=FULL, padding=2),
    Case({"context": 2, "tensor": 2, "expert": 2}, sequence_parallel=True, options=FULL, padding=1),
    Case({"shard": 2, "tensor": 2, "expert": 4}, sequence_parallel=True),
    Case({"shard": 2, "tensor": 2, "expert": 2}, options={**FULL, "gate": "sigmoid", "balance": "bias"}, padding=1),
    Case({"shard": 2, "context": 2, "expert": 4}, options={"capacity_factor": 0.3}),
    Case({"tensor": 4, "expert": 4}, options=FULL, seq=3),
    Case({"tensor": 4, "expert": 2}, options={**FULL, "router_z_loss": 0.0, "balance": "none"}, seq=10),
    Case({"replicate": 2, "shard": 2, "expert": 2}),
]


def name_of(case: Case) -> str:
    sizes = "-".join(f"{axis}{size}" for axis, size in case.layout.items())
    return sizes + ("-sp" if case.sequence_parallel else "")


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_output_losses_and_gradients_are_those_of_one_process(ranks, case: Case) -> None:
    """Output, auxiliary losses, loads and every gradient, put together as the layout says, equal one process."""
    outcomes = ranks(case.of_layout.world_size, on_rank, case)
    assert differences(assembled(case, outcomes), alone(case), tolerance=EXACT) == []


def test_an_unscaled_loss_and_a_dropped_router_gradient_are_seen(ranks) -> None:
    """The comparison finds two planted faults, and names the router's weight."""
    case = Case({"tensor": 2, "expert": 2})
    outcomes, reference = ranks(2, on_rank, case), alone(case)
    dropped = assembled(case, outcomes, leave_out=1)
    assert differences(dropped, reference, tolerance=EXACT) == ["router.weight"]
    unscaled = Case({"tensor": 2, "expert": 2}, wrong_scale=True)
    found = differences(assembled(unscaled, ranks(2, on_rank, unscaled)), reference, tolerance=EXACT)
    assert sorted(found) == ["router.weight", "x"]


def test_capacity_really_drops(ranks) -> None:
    """The cases above would not notice if nothing were dropped: with and without capacity the outputs differ."""
    assert "out" in differences(
        alone(Case({}, options=FULL)), alone(Case({}, options={"capacity_factor": None})), tolerance=1e-3
    )


def test_rows_are_sorted_by_expert_over_the_ranks_they_came_from() -> None:
    """Rank-major rows become expert-major, in rank order within an expert."""
    counts = torch.tensor([[2, 0, 1], [1, 2, 0]])  # rows 0 1 | 2 of rank 0, 3 | 4 5 of rank 1
    assert by_expert(counts).tolist() == [0, 1, 3, 4, 5, 2]


@pytest.mark.parametrize("seq", [1, 4, 7])
def test_slices_are_those_of_tensor_split(seq: int) -> None:
    """Every token has one rank, also where they do not divide."""
    for size in (1, 2, 3, 4):
        groups = [Alone() for _ in range(size)]
        for rank, group in enumerate(groups):
            group.rank, group.size = rank, size
        found = [list(range(*bounds(seq, group))) for group in groups]
        assert found == [part.tolist() for part in torch.arange(seq).tensor_split(size)]


def test_experts_that_do_not_divide_are_refused() -> None:
    """The sentence has the number and the nearest ones on both sides."""
    with pytest.raises(LayoutError, match=r"6 experts, which expert=4 .* expert=3 or expert=6, or 4 or 8 experts"):
        check_experts(6, 4, name="blocks.0")


def test_split_samples_without_positions_are_refused() -> None:
    """Nobody guesses where in its sample a token of a context rank is."""
    one, two = Alone(), Alone()
    two.size = 2
    mixture = Mixture(4, MixtureOptions(experts=2, top_k=1, expert_width=2), feed_forward="gelu", name="blocks.0")
    mixture.exchange = GroupExchange(ExpertGroups(one, one, two))
    with pytest.raises(RuntimeError, match=r"split over context found no positions; pass"):
        mixture(torch.zeros(1, 3, 4))
