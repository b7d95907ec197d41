"""Mixing matrices: what they keep, whom they connect, and what is refused."""

from __future__ import annotations

import re
from functools import reduce

import pytest

from shoal.maths.mixing import (
    Matrix,
    check_mixing,
    equal_shares,
    metropolis,
    one_peer_exponential,
    ring,
    torus,
)

EXACT = 1e-12


def sums(matrix: Matrix) -> tuple[list[float], list[float]]:
    """Of rows, and of columns."""
    return [sum(row) for row in matrix], [sum(column) for column in zip(*matrix, strict=True)]


def times(left: Matrix, right: Matrix) -> Matrix:
    """The matrix product: first `right` mixes, then `left`."""
    size = range(len(left))
    return tuple(tuple(sum(left[i][k] * right[k][j] for k in size) for j in size) for i in size)


@pytest.mark.parametrize("replicas", [2, 3, 4, 6, 8, 9, 12])
def test_metropolis_weights_are_doubly_stochastic(replicas: int) -> None:
    """On rings and tori, and on a star, whose degrees differ."""
    star = [[*range(1, replicas)], *([0] for _ in range(1, replicas))]
    for neighbours in (ring(replicas), torus(replicas), star):
        matrix = metropolis(neighbours)
        rows, columns = sums(matrix)
        assert rows == pytest.approx([1.0] * replicas, abs=EXACT)
        assert columns == pytest.approx([1.0] * replicas, abs=EXACT)
        check_mixing([matrix], replicas=replicas, doubly=True)


def test_equal_shares_keep_the_sum_on_a_directed_graph() -> None:
    """Columns sum to 1; rows do not, which push-sum allows and D-PSGD does not."""
    matrix = equal_shares([[1, 2], [2], [0]])
    rows, columns = sums(matrix)
    assert columns == pytest.approx([1.0] * 3, abs=EXACT)
    assert max(rows) > 1.1
    check_mixing([matrix], replicas=3, doubly=False)
    with pytest.raises(ValueError, match=r"row 0 sums to 0\.8333"):
        check_mixing([matrix], replicas=3, doubly=True)


@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_one_peer_exponential_mixing_is_exact_after_k_rounds(rounds: int) -> None:
    """With 2^k replicas the product of the k matrices is 1/n everywhere, without a rounding error."""
    matrices = one_peer_exponential(2**rounds)
    assert len(matrices) == rounds
    product = reduce(lambda done, matrix: times(matrix, done), matrices)
    assert {entry for row in product for entry in row} == {1 / 2**rounds}


def test_one_peer_exponential_sends_to_one() -> None:
    """With any number of replicas, each sends to one other in a step, and is connected to all over the period."""
    for replicas in (2, 3, 5, 6, 7, 8, 13):
        matrices = one_peer_exponential(replicas)
        assert all(sum(weight > 0 for weight in row) == 2 for matrix in matrices for row in matrix)
        check_mixing(matrices, replicas=replicas, doubly=True)


def test_a_torus_has_four_neighbours() -> None:
    """In a grid of 3 by 3 and more; of 4 replicas the grid is a square."""
    assert [len(row) for row in torus(9)] == [4] * 9
    assert torus(12)[0] == [1, 3, 4, 8]
    assert [len(row) for row in torus(4)] == [2] * 4


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        (((1.0, 0.0), (0.0, 1.0)), "what replica 0 has never reaches replica 1"),
        (((0.5, 0.0), (0.5, 1.0)), "what replica 1 has never reaches replica 0"),
        (((0.0, 1.0), (1.0, 0.0)), "replica 0 keeps 0 of its own"),
        (((0.5, 0.5), (0.4, 0.5)), "column 0 sums to 0.9: it must sum to 1"),
        (((1.5, 0.5), (-0.5, 0.5)), "the weight of row 1, column 0 is -0.5"),
        (((0.5, float("nan")), (0.5, 0.5)), "the weight of row 0, column 1 is nan"),
        (((1.0,),), "a matrix of 1 rows of 1 for 2 replicas"),
    ],
)
def test_bad_matrices_are_refused(matrix: Matrix, words: str) -> None:
    """In a sentence that names the place."""
    with pytest.raises(ValueError, match=re.escape(words)):
        check_mixing([matrix], replicas=2, doubly=False)


def test_bad_graphs_are_refused() -> None:
    """Edges in one direction, to nobody, to oneself; a torus of a prime number."""
    with pytest.raises(ValueError, match="replica 0 sends to 1 and not 1 to 0"):
        metropolis([[1], []])
    with pytest.raises(ValueError, match=r"replica 1 sends to 2: replicas are 0 \.\. 1"):
        equal_shares([[1], [2]])
    with pytest.raises(ValueError, match="replica 0 sends to itself"):
        equal_shares([[0], [0]])
    with pytest.raises(ValueError, match="a torus of 7 replicas: the number is prime"):
        torus(7)
