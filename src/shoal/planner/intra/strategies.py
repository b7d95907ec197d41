"""How an operator can be shared out over the ranks of one axis: where its tensors lie, and what it costs to move them.

    whole      every rank has the tensor; so has it its gradient
    shared     every rank has it; of its gradient each rank has one term of a sum
    partial    each rank has one term of a sum; every rank has its gradient
    split d    each rank has a part along dimension d, and that part of its gradient

A value and its gradient are moved separately: the value from where it is made to where it is used, the gradient back.

    move(term -> whole) = all-reduce      move(term -> part)  = reduce-scatter     move(part -> whole) = all-gather
    move(part -> other part) = all-to-all of a rank's share                        everything else is free

so that cost(x -> y) = move(value of x -> value of y) + move(gradient of y -> gradient of x). They are the layouts and
conversions of Alpa's intra-operator plans (arXiv:2201.12023, section 4.1), sums of gradients included. The strategies:

    product [m, k] x [k, n]   rows of the first: its second is shared; columns of the second: its first is shared;
                              the inner dimension of both: what comes out is partial
    elementwise               along any dimension; what is broadcast along it is shared
    norm, softmax             along any dimension but those that they run over
    fused attention           samples, heads
    embedding                 features; the vocabulary, partial; the tokens, the table shared
    sum, mean                 along another dimension; along a summed one, partial
    view                      as dimensions go; whole, shared and partial as they are

and every operator whole on every rank. An operator without a rule is whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.cost.alpha_beta import Links
from shoal.planner.intra.graph import Dims, Node

Kind = Literal["whole", "shared", "partial", "split"]
State = Literal["all", "term"] | int
"""What a rank has of a value: all of it, one term of a sum, or a part along a dimension."""


@dataclass(frozen=True, slots=True)
class OperatorPlacement:
    """`dim` where it is split, counted from 0."""

    kind: Kind
    dim: int = -1

    @property
    def value(self) -> State:
        """What a rank has of the tensor."""
        if self.kind == "split":
            return self.dim
        return "term" if self.kind == "partial" else "all"

    @property
    def gradient(self) -> State:
        """What a rank has of its gradient."""
        if self.kind == "split":
            return self.dim
        return "term" if self.kind == "shared" else "all"

    def __str__(self) -> str:
        return f"split {self.dim}" if self.kind == "split" else self.kind


WHOLE, SHARED, PARTIAL = OperatorPlacement("whole"), OperatorPlacement("shared"), OperatorPlacement("partial")


def split(dim: int) -> OperatorPlacement:
    """Each rank has a part along `dim`."""
    return OperatorPlacement("split", dim)


def conversion_s(made: OperatorPlacement, used: OperatorPlacement, size: float, links: Links) -> float:
    """Seconds to bring `size` bytes from where they are made to where they are used, and their gradient back."""
    return _move_s(made.value, used.value, size, links) + _move_s(used.gradient, made.gradient, size, links)


def _move_s(there: State, wanted: State, size: float, links: Links) -> float:
    if there == wanted or there == "all" or wanted == "term":
        return 0.0
    if there == "term":
        return links.all_reduce(size) if wanted == "all" else links.all_gather(size)
    return links.all_gather(size) if wanted == "all" else links.all_to_all(size / links.ranks)


# Where the dimensions of a tensor go when it is looked at in another shape.
#
# Dimensions that are merged or parted stay split if it is the outermost of them, whose parts lie together, and both
# sizes divide; another dimension of them cannot stay split.


SAME = frozenset({"aten.detach", "aten.alias", "aten.expand", "aten.clone", "aten._to_copy", "aten.contiguous"})
FOLDED = frozenset({"aten.view", "aten._unsafe_view", "aten.reshape", "aten.squeeze", "aten.unsqueeze"})
TURNED = frozenset({"aten.permute", "aten.transpose", "aten.t"})
CUT = frozenset({"aten.slice", "aten.select", "aten.split", "aten.split_with_sizes", "aten.unbind", "aten.narrow"})
COMPLEX = frozenset({"aten.view_as_complex", "aten.view_as_real"})
VIEWS = SAME | FOLDED | TURNED | CUT | COMPLEX


def dims_after(node: Node) -> Mapping[int, int]:
    """Dimension before -> dimension after, of those that can stay split."""
    before, after = node.shapes[0], node.shape
    if node.name in TURNED:
        return {there: place for place, there in enumerate(_order(node, len(before)))}
    if node.name in CUT:
        return _beside_cut(node, before, after)
    if node.name in FOLDED:
        return folded(before, after)
    if node.name in COMPLEX:  # a last dimension of two parts comes or goes
        return {d: d for d in range(min(len(before), len(after)))}
    shift = len(after) - len(before)
    return {d: d + shift for d, size in enumerate(before) if size == after[d + shift]}


def folded(before: Dims, after: Dims) -> dict[int, int]:
    """Of a reshape: the outermost dimension of each group that both shapes share."""
    pairs, i, j = {}, 0, 0
    while i < len(before) and j < len(after):
        first, second = i, j
        here, there = before[i], after[j]
        while here != there:
            if here < there:
                i += 1
                here *= before[i]
            else:
                j += 1
                there *= after[j]
        a, b = _outermost(before, first, i), _outermost(after, second, j)
        if a is not None and b is not None:
            pairs[a] = b
        i, j = i + 1, j + 1
    return pairs


def _outermost(shape: Dims, first: int, last: int) -> int | None:
    return next((d for d in range(first, last + 1) if shape[d] > 1), None)


def _order(node: Node, count: int) -> Sequence[int]:
    """The dimension before of each dimension after."""
    if node.name == "aten.permute":
        return [d % count for d in node.arguments[1]]
    order = list(range(count))
    a, b = (0, count - 1) if node.name == "aten.t" else (node.arguments[1] % count, node.arguments[2] % count)
    order[a], order[b] = order[b], order[a]
    return order


def _beside_cut(node: Node, before: Dims, after: Dims) -> dict[int, int]:
    """All dimensions but the one that is cut, which `select` and `unbind` take away."""
    place = {"aten.select": 1, "aten.unbind": 1, "aten.slice": 1, "aten.narrow": 1}.get(node.name, 2)
    cut = node.arguments[place] % len(before) if len(node.arguments) > place else 0
    gone = len(after) < len(before)
    return {d: d - (gone and d > cut) for d in range(len(before)) if d != cut}


LINEAR = frozenset({"aten.add", "aten.sub", "aten.add_", "aten.neg"})
"""Sums of terms are terms of the sum."""
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"


@dataclass(frozen=True)
class Strategy:
    """Where each tensor of an operator lies, where its output does, and whether its work is shared out."""

    inputs: tuple[OperatorPlacement, ...]
    output: OperatorPlacement
    shared_out: bool


def strategies_of(node: Node, ranks: int) -> tuple[Strategy, ...]:
    """All of them, the whole one first; only such as divide evenly over `ranks` ranks."""
    whole = Strategy((WHOLE,) * len(node.sources), WHOLE, shared_out=False)
    others = {s: None for s in _others(node) if _divides(node, s, ranks)}
    return (whole, *others)


def _divides(node: Node, strategy: Strategy, ranks: int) -> bool:
    placed = [*zip(strategy.inputs, node.shapes, strict=True), (strategy.output, node.shape)]
    return all(one.kind != "split" or shape[one.dim] % ranks == 0 for one, shape in placed)


def _others(node: Node) -> Iterable[Strategy]:
    if not node.sources:
        return _leaf(node)
    if node.name in VIEWS:
        return _view(node)
    rule = _RULES.get(node.name)
    if rule is not None:
        return rule(node)
    return _pointwise(node) if node.pointwise else ()


def _leaf(node: Node) -> Iterator[Strategy]:
    """A parameter may lie in parts; an input comes whole, and taking a part of it is free."""
    if node.name == "parameter":
        for dim in range(len(node.shape)):
            yield Strategy((), split(dim), shared_out=True)


def _view(node: Node) -> Iterator[Strategy]:
    others = (WHOLE,) * (len(node.sources) - 1)
    for placement in (SHARED, PARTIAL):
        yield Strategy((placement, *others), placement, shared_out=False)
    for before, after in dims_after(node).items():
        yield Strategy((split(before), *others), split(after), shared_out=True)


def _product(node: Node) -> Iterator[Strategy]:
    """`[.., m, k] x [.., k, n]`, batched or not, with or without a summand of the output's shape or its last ones."""
    batch = len(node.shape) - 2
    row, column = batch, batch + 1
    pairs = [
        (split(row), SHARED, split(row)),
        (SHARED, split(column), split(column)),
        (split(column), split(row), PARTIAL),
        *((split(d), split(d), split(d)) for d in range(batch)),
    ]
    for first, second, output in pairs:
        if len(node.sources) == 2:
            yield Strategy((first, second), output, shared_out=True)
        else:
            summand = PARTIAL if output is PARTIAL else _broadcast(node.shapes[0], node.shape, output.dim)
            yield Strategy((summand, first, second), output, shared_out=True)


def _pointwise(node: Node) -> Iterator[Strategy]:
    for dim in range(len(node.shape)):
        inputs = tuple(_broadcast(shape, node.shape, dim) for shape in node.shapes)
        yield Strategy(inputs, split(dim), shared_out=True)
    if node.name in LINEAR and all(shape == node.shape for shape in node.shapes):
        yield Strategy((PARTIAL,) * len(node.sources), PARTIAL, shared_out=False)


def _broadcast(shape: Dims, out: Dims, dim: int) -> OperatorPlacement:
    """Of an input where the output is split along `dim`."""
    own = dim - (len(out) - len(shape))
    return split(own) if own >= 0 and shape[own] == out[dim] else SHARED


def _norm(node: Node) -> Iterator[Strategy]:
    """`native_layer_norm`: input, the normalised sizes, weight and bias."""
    rest = (SHARED,) * (len(node.sources) - 1)
    for dim in range(len(node.shape) - len(node.arguments[1])):
        yield Strategy((split(dim), *rest), split(dim), shared_out=True)


def _softmax(node: Node) -> Iterator[Strategy]:
    over = node.arguments[1] % len(node.shape)
    for dim in range(len(node.shape)):
        if dim != over:
            yield Strategy((split(dim),), split(dim), shared_out=True)


def _attention(node: Node) -> Iterator[Strategy]:
    for dim in (0, 1):
        yield Strategy((split(dim),) * len(node.sources), split(dim), shared_out=True)


def _embedding(node: Node) -> Iterator[Strategy]:
    last = len(node.shape) - 1
    yield Strategy((split(1), WHOLE), split(last), shared_out=True)
    yield Strategy((split(0), WHOLE), PARTIAL, shared_out=True)
    for dim in range(last):
        yield Strategy((SHARED, split(dim)), split(dim), shared_out=True)


def _reduction(node: Node) -> Iterator[Strategy]:
    """`sum` and `mean`, over some dimensions (the second argument) or all."""
    before = len(node.shapes[0])
    asked = node.arguments[1] if len(node.arguments) > 1 and isinstance(node.arguments[1], list | tuple) else ()
    over = {dim % before for dim in asked} or set(range(before))
    kept = len(node.shape) == before
    for dim in range(before):
        after = dim if kept else dim - sum(gone < dim for gone in over)
        yield Strategy((split(dim),), PARTIAL if dim in over else split(after), shared_out=True)


def _likelihood(node: Node) -> Iterator[Strategy]:
    """`nll_loss_forward`: the targets' log-probabilities, one each or their sum."""
    rest = (split(0),) * (len(node.sources) - 1)
    yield Strategy((split(0), *rest), split(0) if node.shape else PARTIAL, shared_out=True)


_RULES = {
    "aten.mm": _product,
    "aten.addmm": _product,
    "aten.bmm": _product,
    "aten.baddbmm": _product,
    "aten.native_layer_norm": _norm,
    "aten._log_softmax": _softmax,
    "aten._softmax": _softmax,
    ATTENTION: _attention,
    "aten.embedding": _embedding,
    "aten.sum": _reduction,
    "aten.mean": _reduction,
    "aten.nll_loss_forward": _likelihood,
}
