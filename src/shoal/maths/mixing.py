"""Mixing matrices of gossip: what each replica takes from each other one. Pure Python; imports no torch.

    x_i <- sum over j of W[i][j] x_j

Columns that sum to 1 keep the sum of x; rows that also sum to 1 keep equal replicas equal (doubly stochastic).
Repeated, mixing brings all x to one limit if every replica keeps a positive part of its own and the graph is strongly
connected; the edges of a graph that varies in time count together over one period. Weights of an undirected graph are
Metropolis's (Xiao, Boyd, "Fast Linear Iterations for Distributed Averaging", 2004, section 4.2); the one-peer
exponential graph is that of Assran et al. (arXiv:1811.10792, appendix A).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite, isqrt

Matrix = tuple[tuple[float, ...], ...]
"""Row i says what replica i takes."""

Neighbours = Sequence[Sequence[int]]
"""For each replica those that it sends to, itself not among them."""

SUM_TOLERANCE = 1e-6
"""A row or column of decimals written by hand sums to 1 within this."""


def ring(replicas: int) -> Neighbours:
    """Each with the one before and the one behind it."""
    return [sorted({(i - 1) % replicas, (i + 1) % replicas} - {i}) for i in range(replicas)]


def torus(replicas: int) -> Neighbours:
    """Each with its four neighbours in a grid that is as square as it can be and closed at its edges.

    Raises `ValueError` for a prime number of replicas from 5 on: their only grid is a ring.
    """
    rows = next(rows for rows in range(isqrt(replicas), 0, -1) if replicas % rows == 0)
    if rows == 1 and replicas > 3:
        raise ValueError(
            f"a torus of {replicas} replicas: the number is prime and has no grid; use the ring, or another number"
        )
    columns = replicas // rows
    found = []
    for i in range(replicas):
        row, column = divmod(i, columns)
        beside = {row * columns + (column + step) % columns for step in (-1, 1)}
        above = {(row + step) % rows * columns + column for step in (-1, 1)}
        found.append(sorted((beside | above) - {i}))
    return found


def one_peer_exponential(replicas: int) -> tuple[Matrix, ...]:
    """One matrix a step, again and again: in step k replica i sends half to i + 2^k. Doubly stochastic.

    With n = 2^m replicas the product of the m matrices is 1/n everywhere: consensus after m steps.
    """
    period = max(1, (replicas - 1).bit_length())
    return tuple(_one_peer(replicas, 2**k) for k in range(period))


def metropolis(neighbours: Neighbours) -> Matrix:
    """W[i][j] = 1 / (1 + max(d_i, d_j)) along the edges of an undirected graph; d are degrees. Doubly stochastic.

    Raises `ValueError` if an edge is given in one direction only.
    """
    check_neighbours(neighbours)
    edges = {(i, j) for i, row in enumerate(neighbours) for j in row}
    for i, j in sorted(edges):
        if (j, i) not in edges:
            raise ValueError(
                f"replica {i} sends to {j} and not {j} to {i}: a doubly stochastic matrix needs both directions; add "
                "the other one, or use push-sum (SGP)"
            )
    degree = [len(set(row)) for row in neighbours]
    weights = {(i, j): 1.0 / (1 + max(degree[i], degree[j])) for i, j in edges}
    return _with_rest(len(neighbours), weights)


def equal_shares(neighbours: Neighbours) -> Matrix:
    """Each replica divides what it has evenly among itself and those it sends to. Column-stochastic."""
    check_neighbours(neighbours)
    weights = {(i, j): 1.0 / (1 + len(set(row))) for j, row in enumerate(neighbours) for i in row}
    return _with_rest(len(neighbours), weights)


def check_neighbours(neighbours: Neighbours) -> None:
    """Raises `ValueError` for a neighbour that is not there, or is the replica itself."""
    for i, row in enumerate(neighbours):
        for j in row:
            if not 0 <= j < len(neighbours):
                raise ValueError(f"replica {i} sends to {j}: replicas are 0 .. {len(neighbours) - 1}")
            if i == j:
                raise ValueError(f"replica {i} sends to itself: leave it out; what it keeps follows from the weights")


def check_mixing(matrices: Sequence[Matrix], *, replicas: int, doubly: bool) -> None:
    """Raises `ValueError` if repeated mixing by `matrices` in turn does not bring all replicas to their average.

    `doubly`: rows have to sum to 1 too. Without it only the sums are kept, which is enough for push-sum.
    """
    for matrix in matrices:
        _check_shape(matrix, replicas)
        for i, row in enumerate(matrix):
            if row[i] <= 0:
                raise ValueError(f"replica {i} keeps {row[i]:g} of its own: every replica must keep a positive part")
        for j in range(replicas):
            _check_sum(sum(row[j] for row in matrix), f"column {j}", "or the sum over the replicas would not be kept")
        if doubly:
            for i, row in enumerate(matrix):
                _check_sum(sum(row), f"row {i}", "or equal replicas would not stay equal; push-sum (SGP) needs no rows")
    lost = _unreached(matrices, replicas)
    if lost is not None:
        raise ValueError(
            f"what replica {lost[0]} has never reaches replica {lost[1]}: the graph must be connected in the "
            "direction of its edges; add edges"
        )


def _one_peer(replicas: int, distance: int) -> Matrix:
    weights = {((i + distance) % replicas, i): 0.5 for i in range(replicas) if distance % replicas}
    return _with_rest(replicas, weights)


def _with_rest(replicas: int, weights: dict[tuple[int, int], float]) -> Matrix:
    """Each replica keeps what it does not send: columns sum to 1."""
    sent = [0.0] * replicas
    for (_, j), weight in sorted(weights.items()):
        sent[j] += weight
    return tuple(
        tuple(1.0 - sent[j] if i == j else weights.get((i, j), 0.0) for j in range(replicas)) for i in range(replicas)
    )


def _check_shape(matrix: Matrix, replicas: int) -> None:
    if len(matrix) != replicas or any(len(row) != replicas for row in matrix):
        widths = sorted({len(row) for row in matrix})
        raise ValueError(
            f"a matrix of {len(matrix)} rows of {' or '.join(map(str, widths))} for {replicas} replicas: it needs a "
            "row and a column for each"
        )
    for i, row in enumerate(matrix):
        for j, weight in enumerate(row):
            if not (isfinite(weight) and weight >= 0):
                raise ValueError(f"the weight of row {i}, column {j} is {weight:g}: weights are numbers from 0 on")


def _check_sum(found: float, where: str, why: str) -> None:
    if abs(found - 1) > SUM_TOLERANCE:
        raise ValueError(f"{where} sums to {found:g}: it must sum to 1, {why}")


def _unreached(matrices: Sequence[Matrix], replicas: int) -> tuple[int, int] | None:
    """(from, to) of a pair without a path; None if the edges of all matrices together connect all replicas."""
    out = [{i for m in matrices for i in range(replicas) if m[i][j] > 0} for j in range(replicas)]
    back = [{j for m in matrices for j in range(replicas) if m[i][j] > 0} for i in range(replicas)]
    for edges, forward in ((out, True), (back, False)):
        missing = set(range(replicas)) - _reached(edges)
        if missing:
            return (0, min(missing)) if forward else (min(missing), 0)
    return None


def _reached(edges: Sequence[Iterable[int]]) -> set[int]:
    """Those that a path leads to from 0."""
    seen, todo = {0}, [0]
    while todo:
        new = set(edges[todo.pop()]) - seen
        seen |= new
        todo += new
    return seen
