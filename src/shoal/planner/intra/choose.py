"""A split for every operator of a model over the ranks of one axis, the cheapest of all, and what roles cost instead.

    minimise  sum over operators of work(strategy)  +  sum over edges of conversion(made, used)

Alpa's intra-operator problem (arXiv:2201.12023, section 4.2), in the space of FlexFlow (arXiv:1807.05358), solved
exactly (`cheapest`). A tensor with several readers is brought to one place for all of them, a choice of
its own, and on from there. Work counts forward and backward of a microbatch, and the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shoal.cost.alpha_beta import Links
from shoal.cost.matmul import Rates, matmul_s, pass_s
from shoal.planner.intra.elimination import Cheapest, Edge, cheapest
from shoal.planner.intra.graph import Node
from shoal.planner.intra.strategies import (
    SHARED,
    VIEWS,
    WHOLE,
    OperatorPlacement,
    Strategy,
    conversion_s,
    split,
    strategies_of,
)
from shoal.planner.trace.operator import BACKWARD_ATTENTION

PASSES = 3
"""An operator that moves bytes reads and writes about twice as many in its backward as in its forward."""

ROLES: Mapping[str, int] = {"column": 0, "embedding": 0, "head": 0, "row": 1}
"""The dimension along which a role splits a weight; a bias of the first three along its only one."""


@dataclass(frozen=True)
class OperatorPrices:
    """What operators and conversions cost on one cluster; `update_bytes` as in `planner.predict.stack`."""

    rates: Rates
    links: Links
    update_bytes: float


@dataclass(frozen=True, kw_only=True)
class ParameterSplits:
    """How each parameter lies, by name, and what a microbatch costs so, seconds."""

    placements: Mapping[str, OperatorPlacement]
    cost_s: float


class Problem:
    """All strategies and costs of one graph."""

    def __init__(self, graph: Sequence[Node], prices: OperatorPrices) -> None:
        self._graph, self._prices = _with_hubs(graph), prices
        ranks = prices.links.ranks
        self._strategies = [_strategies(node, ranks) for node in self._graph]

    def solved(self, fixed: Mapping[str, OperatorPlacement] | None = None) -> ParameterSplits:
        """The cheapest choice; `fixed` says how some parameters lie."""
        found = cheapest(*self.costs(fixed))
        return ParameterSplits(placements=self._parameters(found), cost_s=found.cost)

    def costs(
        self, fixed: Mapping[str, OperatorPlacement] | None = None
    ) -> tuple[list[np.ndarray], dict[Edge, np.ndarray]]:
        """What `cheapest` takes: seconds of every strategy of a node, and of every pair along an edge."""
        return [self._own(v, fixed or {}) for v in range(len(self._graph))], self._between()

    def _own(self, v: int, fixed: Mapping[str, OperatorPlacement]) -> np.ndarray:
        node, wanted = self._graph[v], fixed.get(self._graph[v].label)
        costs = [work_s(node, strategy, self._prices) for strategy in self._strategies[v]]
        if wanted is not None:
            pairs = zip(self._strategies[v], costs, strict=True)
            costs = [cost if strategy.output == wanted else np.inf for strategy, cost in pairs]
        return np.array(costs)

    def _between(self) -> dict[Edge, np.ndarray]:
        tables: dict[Edge, np.ndarray] = {}
        for v, node in enumerate(self._graph):
            for place, u in enumerate(node.sources):
                costs = self._conversions(u, v, place)
                tables[u, v] = tables[u, v] + costs if (u, v) in tables else costs
        return tables

    def _conversions(self, u: int, v: int, place: int) -> np.ndarray:
        size, links = self._graph[u].size, self._prices.links
        return np.array(
            [
                [conversion_s(made.output, used.inputs[place], size, links) for used in self._strategies[v]]
                for made in self._strategies[u]
            ]
        )

    def _parameters(self, found: Cheapest) -> dict[str, OperatorPlacement]:
        return {
            node.label: self._strategies[v][found.choices[v]].output
            for v, node in enumerate(self._graph)
            if node.name == "parameter"
        }


def placements_of(roles: Mapping[str, str], graph: Sequence[Node], ranks: int) -> dict[str, OperatorPlacement]:
    """How roles (by parameter) lay the parameters of `graph`; what does not divide is whole."""
    found = {}
    for node in graph:
        if node.name == "parameter":
            dim = ROLES.get(roles[node.label])
            divides = dim is not None and dim < len(node.shape) and node.shape[dim] % ranks == 0
            found[node.label] = split(dim) if dim is not None and divides else WHOLE
    return found


def work_s(node: Node, strategy: Strategy, prices: OperatorPrices) -> float:
    """Seconds of one operator on one rank, forward and backward; of a parameter, its optimizer's step."""
    share = prices.links.ranks if strategy.shared_out else 1
    if node.name == "parameter":
        return node.numel * prices.update_bytes / share / prices.rates.memory_bytes_s
    if node.name in VIEWS or node.name in ("input", HUB):
        return 0.0
    rates = prices.rates
    if node.products:
        return _product_s(node, strategy, prices)
    if node.attention_flops:
        size, tokens = node.shape[-1], node.shape[-2]
        forward, backward = (rates.attention_flops_s(head_size=size, tokens=tokens, backward=b) for b in (False, True))
        seconds = (1 / forward + BACKWARD_ATTENTION / backward) * node.attention_flops / share
        return max(seconds, 2 * rates.kernel_s)
    return PASSES * pass_s(_moved(node) / share, rates)


HUB = "hub"
"""A node between a tensor and its several readers."""


def _product_s(node: Node, strategy: Strategy, prices: OperatorPrices) -> float:
    """The product of a rank's part, and those of its two gradients."""
    one, ranks = node.products[0].matmul, prices.links.ranks
    if strategy.shared_out:
        one = replace(one, **_part(node, strategy, ranks))
    three = (one, one.input_gradient(), one.weight_gradient())
    return sum(matmul_s(product, prices.rates, element_bytes=node.element_bytes) for product in three)


def _part(node: Node, strategy: Strategy, ranks: int) -> dict[str, int]:
    one, last = node.products[0].matmul, len(node.shape) - 1
    if strategy.output.kind == "partial":
        return {"inner": one.inner // ranks}
    if strategy.output.dim == last:
        return {"columns": one.columns // ranks}
    return {"rows": one.rows // ranks} if strategy.output.dim == last - 1 else {"batch": one.batch // ranks}


def _moved(node: Node) -> float:
    """Bytes; a table that is looked up in is not read whole."""
    read = node.numel if node.name == "aten.embedding" else sum(_count(shape) for shape in node.shapes)
    return float(node.element_bytes * (node.numel + read))


def _count(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _strategies(node: Node, ranks: int) -> tuple[Strategy, ...]:
    if node.name != HUB:
        return strategies_of(node, ranks)
    places = [WHOLE, SHARED, *(split(d) for d, size in enumerate(node.shape) if size % ranks == 0)]
    return tuple(Strategy((place,), place, shared_out=False) for place in places)


def _with_hubs(graph: Sequence[Node]) -> list[Node]:
    """A hub behind every node with several readers, which read it instead."""
    readers = [sum(v in node.sources for node in graph) for v in range(len(graph))]
    made: list[Node] = []
    place: dict[int, int] = {}
    for v, node in enumerate(graph):
        made.append(replace(node, sources=tuple(place[u] for u in node.sources)))
        place[v] = len(made) - 1
        if readers[v] > 1:
            hub = Node(
                name=HUB, label="", sources=(place[v],), shapes=(node.shape,), shape=node.shape,
                element_bytes=node.element_bytes,
            )  # fmt: skip
            made.append(hub)
            place[v] = len(made) - 1
    return made
