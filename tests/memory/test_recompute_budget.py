"""What is kept under a budget: near the best choice there is, within its bytes, and of no influence on gradients."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from shoal.memory import recompute_budget
from shoal.memory.recompute import Recomputed, recompute
from shoal.memory.recompute_budget import Candidate, Exchange, KeptOutputs, Profile, RecomputeBudget, chosen, profiled
from shoal.memory.tracker import SavedActivations, measured_activation_bytes

WIDTH, SAMPLES = 24, 16


def drawn(seed: int, *, blocks: int, operators: int) -> list[Profile]:
    """Blocks with operators of any bytes and times; what autograd saves is more than the largest of them."""
    draws = random.Random(seed)
    found = []
    for _ in range(blocks):
        own = tuple(
            Candidate((f"op{n}", 0), draws.randint(1, 30), float(draws.randint(1, 99))) for n in range(operators)
        )
        found.append(Profile(own, draws.randint(max(c.bytes for c in own), sum(c.bytes for c in own) + 20)))
    return found


def least_time(profiles: list[Profile], budget: int) -> float:
    """The least time that is repeated, by dynamic programming over bytes along the chain of blocks: exact.

    best[b] is the least time of the blocks so far with b bytes kept. Each block adds what any set of its operators
    keeps, itself by the knapsack's recursion, or all that it saves.
    """
    best = {0: 0.0}
    for profile in profiles:
        own = {0: profile.time}
        for each in profile.candidates:
            for size, time in list(own.items()):
                own[size + each.bytes] = min(own.get(size + each.bytes, profile.time), time - each.time)
        own[profile.saved_bytes] = 0.0
        after: dict[int, float] = {}
        for (held, time), (more, rest) in ((a, b) for a in best.items() for b in own.items()):
            if held + more <= budget:
                after[held + more] = min(after.get(held + more, float("inf")), time + rest)
        best = after
    return min(best.values())


def by_trying(profile: Profile, budget: int) -> float:
    """The same of one block, over all sets."""
    sets = (s for n in range(len(profile.candidates) + 1) for s in combinations(profile.candidates, n))
    times = [profile.time - sum(c.time for c in s) for s in sets if sum(c.bytes for c in s) <= budget]
    return min([*times, *([0.0] if profile.saved_bytes <= budget else [])])


@pytest.mark.parametrize("seed", range(6))
def test_the_oracle_is_exact(seed: int) -> None:
    (profile,) = drawn(seed, blocks=1, operators=8)
    for budget in (0, 5, 17, 40, 80, 1000):
        assert least_time([profile], budget) == pytest.approx(by_trying(profile, budget))


@pytest.mark.parametrize("seed", range(12))
def test_greedy_is_within_one_operator_of_the_best(seed: int) -> None:
    """And within its budget. With nothing it keeps nothing, with enough it repeats nothing."""
    profiles = drawn(seed, blocks=5, operators=6)
    largest = max(profile.time for profile in profiles)
    enough = sum(profile.saved_bytes for profile in profiles)
    for budget in (0, enough // 8, enough // 3, enough // 2, enough):
        found = chosen(profiles, budget)
        assert sum(choice.bytes for choice in found) <= budget
        best = least_time(profiles, budget)
        assert best - 1e-9 <= sum(choice.time for choice in found) <= best + largest
    assert chosen(profiles, 0) == [KeptOutputs(time=profile.time) for profile in profiles]
    assert all(choice.time == 0 for choice in chosen(profiles, enough))


def test_of_blocks_that_are_alike_the_last_ones_keep_theirs() -> None:
    """Their backward comes first, and what they repeated would lie beside all that the blocks before them keep."""
    alike = [Profile((Candidate(("op", 0), 10, 5.0),), 10, overhead=1.0)] * 4
    assert [choice.whole for choice in chosen(alike, 20)] == [False, False, True, True]


class Block(nn.Module):
    """Two products, a norm and a non-linearity, of a user's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        """`[samples, width]` to the same."""
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


def model(budget: int | None) -> nn.Sequential:
    torch.manual_seed(3)
    made = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(4))}))
    made.forward = lambda x: _run(made, x)  # type: ignore[method-assign]
    if budget is not None:
        recompute(made, "budget", budget_bytes=budget)
    return made


def _run(made: nn.Sequential, x: Tensor) -> Tensor:
    x = made[0](x)
    for block in made.get_submodule("1.blocks").children():
        x = block(x)
    return x


@pytest.fixture(autouse=True)
def _calls_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """These blocks are so small that none would be kept in part."""
    monkeypatch.setattr(recompute_budget, "BYTES_OF_A_CALL", {"cpu": 0.0, "cuda": 0.0})


def steps(budget: int | None, *, half: bool = False) -> tuple[list[Tensor], int, int]:
    """(gradients of two steps, bytes that the graph of the second held, bytes that the budget's choices keep)"""
    made, found, held = model(budget), [], 0
    for step in range(2):
        torch.manual_seed(10 + step)
        made.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            x = torch.randn(SAMPLES, WIDTH)
            held = measured_activation_bytes(lambda x=x: made(x).float().square().sum())
            torch.manual_seed(20 + step)
            loss = made(x).float().square().sum()
        loss.backward()
        found += [p.grad.clone() for p in made.parameters() if p.grad is not None]
    forward: Any = made.get_submodule("1.blocks.0").forward
    kept = forward.budget.kept_bytes if isinstance(forward, Recomputed) and forward.budget is not None else 0
    return found, held, kept


@pytest.mark.parametrize("half", [False, True])
def test_a_budget_holds_and_gradients_are_the_same_bits(half: bool) -> None:
    """Of a user's model with dropout: from keeping nothing to keeping all, in steps."""
    wanted, whole, _ = steps(None, half=half)
    _, least, _ = steps(0, half=half)
    assert least < whole
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        budget = int(share * (whole - least))
        found, held, kept = steps(budget, half=half)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), share
        assert kept <= budget
        assert held <= least + budget + 4 * 64, "beside a few numbers that a graph holds of each block"
        assert share < 0.5 or kept > 0.5 * budget, "the budget is used"


def held_by(made: nn.Module, *shape: int) -> int:
    """Bytes of the graph of one forward."""
    torch.manual_seed(5)
    x = torch.randn(*shape, WIDTH)
    return measured_activation_bytes(lambda: made(x).square().sum())


def test_a_budget_holds_while_inputs_grow() -> None:
    """It is chosen from the largest so far, in whichever dimension, and used again from the next forward on."""
    largest = (1, 32 * SAMPLES)
    least = {shape: held_by(model(0), *shape) for shape in [(1, SAMPLES), (4, 2 * SAMPLES), (16, 8), largest]}
    budget = (held_by(model(None), *largest) - least[largest]) // 2
    made = model(budget)
    for shape in [(1, SAMPLES), (1, SAMPLES), (4, 2 * SAMPLES), largest, (16, 8), *least]:
        assert held_by(made, *shape) <= least[shape] + budget + 4 * 64, shape
    assert held_by(made, *largest) > least[largest] + 0.5 * budget
    assert held_by(made, 1, SAMPLES) > least[1, SAMPLES], "small inputs keep a part of it"


def test_blocks_behind_one_that_is_looked_at_keep_nothing() -> None:
    """Choices of before and after a look are not mixed in one forward: each has spent the budget."""
    (profile,) = drawn(1, blocks=1, operators=4)
    budget, small, large = RecomputeBudget(profile.saved_bytes), ((4, 8),), ((4, 9),)
    forward = lambda *sizes: [budget.choice(n, each, lambda: profile) for n, each in enumerate(sizes)]  # noqa: E731
    assert forward(small, small, small) == [KeptOutputs()] * 3
    kept = forward(small, small, small)
    assert 0 < sum(choice.bytes for choice in kept) <= budget.bytes
    assert forward(small, large, small) == [kept[0], KeptOutputs(), KeptOutputs()]
    assert forward(small, large, small) == kept
    budget.looks_again = False
    assert forward(((4, 10),), ((4, 10),), ((4, 10),)) == kept, "other ranks would have to look, too"
    budget.looks_again = True
    assert forward(((2, 8),), small, ((4, 8), (4, 8)))[2] == KeptOutputs(), "one tensor more"


def test_ranks_that_exchange_something_choose_alike() -> None:
    """From the larger of what each has seen, as an expert has other numbers of tokens on each rank."""
    seen = [drawn(seed, blocks=3, operators=4) for seed in (1, 2)]
    every = [msgspec.to_builtins(dict(enumerate(profiles))) for profiles in seen]
    size = max(sum(profile.saved_bytes for profile in profiles) for profiles in seen) // 2

    def second(own: Sequence[Profile], exchange: Exchange | None) -> list[KeptOutputs]:
        budget = RecomputeBudget(size, exchange=exchange)
        forwards = [[budget.choice(n, ((4, 8),), lambda: p) for n, p in enumerate(own)] for _ in range(2)]  # noqa: B023
        return forwards[1]

    alone = [second(own, None) for own in seen]
    one, other = (second(own, lambda _: every) for own in seen)
    assert alone[0] != alone[1]
    assert one == other
    assert 0 < sum(choice.bytes for choice in one) <= size


def test_small_blocks_are_kept_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where looking at each call takes longer than what it saves."""
    monkeypatch.setattr(recompute_budget, "BYTES_OF_A_CALL", {"cpu": 1e5, "cuda": 1e7})
    made = model(8 * SAMPLES * WIDTH * 4 * 4)
    made(torch.randn(SAMPLES, WIDTH))
    budget: RecomputeBudget = made.get_submodule("1.blocks.0").forward.budget  # type: ignore[union-attr]
    found = chosen(list(budget.profiles.values()), budget.bytes)
    assert all(choice.whole or not choice.operators for choice in found)
    assert any(choice.whole for choice in found)


def test_a_profile_has_what_autograd_saves() -> None:
    """Its bytes are those that `SavedActivations` counts, and products cost more than what surrounds them."""
    block, x = Block().eval(), torch.randn(4096, WIDTH, requires_grad=True)
    profile = profiled(lambda: block(x), [x, *block.parameters()])
    with SavedActivations(apart=[x, *block.parameters()]) as saved:
        out = block(x)
        assert profile.saved_bytes == saved.bytes
    del out
    times = {candidate.operator: candidate.time for candidate in profile.candidates}
    assert max(times, key=lambda operator: times[operator]) == ("aten::addmm", 0)
    assert ("aten::addmm", 1) not in times, "no backward needs anything behind it"
