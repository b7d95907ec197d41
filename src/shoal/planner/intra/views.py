"""Where the dimensions of a tensor go when it is looked at in another shape.

Dimensions that are merged or parted stay split if it is the outermost of them, whose parts lie together, and both
sizes divide; another dimension of them cannot stay split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.planner.intra.graph import Dims, Node

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
