"""Choices of splits: exact against every combination, and Megatron's own for a transformer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.cost.alpha_beta import group_of
from shoal.cost.matmul import Rates
from shoal.errors import UserCodeError
from shoal.models.build import build
from shoal.models.config import GPTConfig
from shoal.models.roles import roles_of
from shoal.planner.intra import elimination
from shoal.planner.intra.choose import OperatorPrices, ParameterSplits, Problem, placements_of
from shoal.planner.intra.elimination import cheapest
from shoal.planner.intra.graph import Node, graph_of
from shoal.planner.intra.strategies import (
    PARTIAL,
    SHARED,
    WHOLE,
    OperatorPlacement,
    conversion_s,
    folded,
    split,
    strategies_of,
)
from shoal.planner.trace.operator import TracedGroup
from shoal.topology.cluster_file import known_cluster
from tests.planner.trace.models import subject
from tests.planner.trace.test_trace import entropy

RANKS, SAMPLES = 4, 4
EXACT = 1e-9
"""Sums of the same costs in another order."""
LINKS = group_of(known_cluster("dgx-h100", 1), RANKS, stride=1, world=8)
RATES = Rates(matmul_flops_s=4e14, peak_flops_s=5e14, memory_bytes_s=2.7e12, units=132, kernel_s=4e-6)
PRICES = OperatorPrices(RATES, LINKS, 40.0)


def traced(
    build_model: Callable[[], nn.Module],
    inputs: tuple[int, ...],
    *,
    integers: bool = False,
    loss: Callable[[Tensor], Tensor] = entropy,
) -> tuple[Node, ...]:
    """The graph of a model with a loss of its outputs."""

    def made(samples: int) -> Tensor:
        return torch.zeros(samples, *inputs, dtype=torch.int64 if integers else torch.float32)

    one = subject(build_model, made, loss)
    with one.mode:
        step = one.steps(one.model, SAMPLES, vocabulary=None, group=TracedGroup(1))
    return graph_of(one.model, step.loss, mode=one.mode)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[np.ndarray], dict[tuple[int, int], np.ndarray]]:
    """Up to seven variables of up to three choices, any edges, some choices forbidden."""
    count = draw(st.integers(1, 7))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32)))
    sizes = [int(size) for size in numbers.integers(1, 4, count)]
    own = [np.where(numbers.random(size) < 0.1, np.inf, numbers.random(size)) for size in sizes]
    pairs = [pair for pair in itertools.combinations(range(count), 2) if numbers.random() < 0.5]
    return own, {(u, v): numbers.random((sizes[u], sizes[v])) for u, v in pairs}


def cost_of(choice: Sequence[int], own: list[np.ndarray], between: dict[tuple[int, int], np.ndarray]) -> float:
    """Of one combination."""
    alone = sum(costs[x] for costs, x in zip(own, choice, strict=True))
    return float(alone + sum(costs[choice[u], choice[v]] for (u, v), costs in between.items()))


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_the_choice_is_the_best_of_all_combinations(
    graph: tuple[list[np.ndarray], dict[tuple[int, int], np.ndarray]],
) -> None:
    """On any graph, and its cost is that of what was chosen."""
    own, between = graph
    best = min(cost_of(choice, own, between) for choice in itertools.product(*(range(len(costs)) for costs in own)))
    found = cheapest(own, between)
    assert found.cost == pytest.approx(best, rel=EXACT)
    assert cost_of(found.choices, own, between) == pytest.approx(best, rel=EXACT)


def test_a_small_model_is_split_as_every_combination_says() -> None:
    """All strategies of all operators of two layers and their loss, tried one by one."""
    layers = lambda: (nn.Linear(512, 1024, bias=False), nn.ReLU(), nn.Linear(1024, 256, bias=False))  # noqa: E731
    graph = traced(lambda: nn.Sequential(*layers()), (512,), loss=Tensor.sum)
    problem = Problem(graph, PRICES)
    own, between = problem.costs()
    assert 1000 < np.prod([len(costs) for costs in own]) < 100_000
    best = min(cost_of(choice, own, between) for choice in itertools.product(*(range(len(costs)) for costs in own)))
    assert problem.solved().cost_s == pytest.approx(best, rel=EXACT)


@pytest.fixture(scope="module")
def gpt() -> tuple[tuple[Node, ...], dict[str, str], Problem]:
    """A wide GPT of two blocks, its roles, and its problem."""
    config = GPTConfig(vocabulary=512, layers=2, width=4096, heads=32, feed_forward_width=11008)
    with torch.device("meta"):
        roles = {name: role.kind for name, role in roles_of(build(config)).items()}
    graph = traced(lambda: build(config), (1024,), integers=True)
    return graph, roles, Problem(graph, PRICES)


def test_a_gpt_is_split_as_its_roles_say(gpt: tuple[tuple[Node, ...], dict[str, str], Problem]) -> None:
    """Without being told, attention and feed-forward get columns and rows (arXiv:1909.08053); it costs no more than
    the roles, and both cost less than nothing split."""
    graph, roles, problem = gpt
    fixed = placements_of(roles, graph, RANKS)
    found, by_roles = problem.solved(), problem.solved(fixed)
    whole = problem.solved(dict.fromkeys(fixed, WHOLE))
    assert found.cost_s <= by_roles.cost_s < whole.cost_s
    assert {n: p for n, p in found.placements.items() if "blocks" in n} == {
        n: p for n, p in fixed.items() if "blocks" in n
    }


def test_a_fixed_placement_is_kept(gpt: tuple[tuple[Node, ...], dict[str, str], Problem]) -> None:
    """And costs at least as much as a free one."""
    name = "blocks.0.feed_forward.down.weight"
    choice: ParameterSplits = gpt[2].solved({name: split(0)})
    assert choice.placements[name] == split(0)
    assert choice.cost_s >= gpt[2].solved().cost_s


def test_two_linear_layers_on_few_samples_need_one_sum_each_way() -> None:
    """Column, then row: an all-reduce of what comes out and one of the gradient of what went in, which nobody needs."""
    layers = lambda: (nn.Linear(8192, 32768, bias=False), nn.GELU(), nn.Linear(32768, 8192, bias=False))  # noqa: E731
    graph = traced(lambda: nn.Sequential(*layers()), (8192,))
    found = Problem(graph, PRICES).solved()
    assert found.placements == {"0.weight": split(0), "2.weight": split(1)}


@pytest.mark.parametrize(
    ("made", "used", "expected"),
    [
        (WHOLE, SHARED, ["all_reduce"]),
        (PARTIAL, WHOLE, ["all_reduce"]),
        (PARTIAL, SHARED, ["all_reduce", "all_reduce"]),
        (split(0), WHOLE, ["all_gather"]),
        (split(0), SHARED, ["all_gather", "all_gather"]),
        (PARTIAL, split(1), ["all_gather", "all_gather"]),
        (WHOLE, split(1), ["all_gather"]),
        (split(0), split(1), ["all_to_all", "all_to_all"]),
        (WHOLE, PARTIAL, []),
        (SHARED, WHOLE, []),
        (split(1), split(1), []),
    ],
)
def test_what_is_said_between_placements(made: OperatorPlacement, used: OperatorPlacement, expected: list[str]) -> None:
    """There and back; a part of what one has whole, and a term of it, are free."""
    size = 1e6
    cost = {
        "all_reduce": LINKS.all_reduce(size),
        "all_gather": LINKS.all_gather(size),
        "all_to_all": LINKS.all_to_all(size / RANKS),
    }
    assert conversion_s(made, used, size, LINKS) == pytest.approx(sum(cost[kind] for kind in expected))


@pytest.mark.parametrize("name", ["aten.addmm", "aten.mm", "aten.bmm"])
def test_strategies_of_products_give_the_product(name: str) -> None:
    """Each rank's part, put together as the placements say, is the whole product; so it is for its gradients."""
    numbers = torch.Generator().manual_seed(0)
    shapes = {"aten.mm": [(8, 4), (4, 12)], "aten.bmm": [(4, 8, 4), (4, 4, 12)], "aten.addmm": [(12,), (8, 4), (4, 12)]}
    operator = {"aten.mm": torch.mm, "aten.bmm": torch.bmm, "aten.addmm": torch.addmm}[name]
    tensors = [torch.randn(shape, generator=numbers, dtype=torch.float64) for shape in shapes[name]]
    node = Node(
        name=name, label="", sources=tuple(range(len(tensors))), shapes=tuple(shapes[name]),
        shape=tuple(operator(*tensors).shape), element_bytes=8,
    )  # fmt: skip
    assert len(strategies_of(node, 4)) >= 4
    for strategy in strategies_of(node, 4):
        if strategy.shared_out:
            outputs = [
                operator(*(_part(t, p, r) for t, p in zip(tensors, strategy.inputs, strict=True))) for r in range(4)
            ]
            assert torch.allclose(_together(outputs, strategy.output), operator(*tensors))


def _part(tensor: Tensor, placement: OperatorPlacement, rank: int) -> Tensor:
    if placement.kind == "split":
        return tensor.chunk(4, placement.dim)[rank]
    return tensor / 4 if placement.kind == "partial" else tensor


def _together(parts: list[Tensor], placement: OperatorPlacement) -> Tensor:
    return torch.cat(parts, placement.dim) if placement.kind == "split" else torch.stack(parts).sum(0)


@pytest.mark.parametrize(
    ("before", "after", "pairs"),
    [
        ((4, 6, 8), (24, 8), {0: 0, 2: 1}),
        ((24, 8), (4, 6, 8), {0: 0, 1: 2}),
        ((4, 6, 8), (4, 6, 2, 4), {0: 0, 1: 1, 2: 2}),
        ((1, 6), (6,), {1: 0}),
        ((6, 4), (4, 6), {0: 0}),
    ],
)
def test_reshaped_dimensions(before: tuple[int, ...], after: tuple[int, ...], pairs: dict[int, int]) -> None:
    """The outermost of those that are merged or parted."""
    assert folded(before, after) == pairs


def test_a_tangle_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no exact answer is at hand there is a sentence, not another answer."""
    monkeypatch.setattr(elimination, "MOST_ENTRIES", 100)
    own = [np.zeros(4) for _ in range(6)]
    with pytest.raises(UserCodeError, match="hang together"):
        cheapest(own, {pair: np.zeros((4, 4)) for pair in itertools.combinations(range(6), 2)})


def test_softmax_is_not_split_along_its_own_dimension() -> None:
    """Nor a norm along what it runs over."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(F.softmax(self.norm(x), dim=-1))

    for node in traced(Both, (16,)):
        if node.name in ("aten._softmax", "aten.native_layer_norm"):
            assert {s.output for s in strategies_of(node, RANKS)} == {WHOLE, split(0)}
