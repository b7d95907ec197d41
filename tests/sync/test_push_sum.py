"""Push-sum as a state machine: what is kept whatever the network does."""

from __future__ import annotations

import random

import pytest
import torch

from shoal.maths.mixing import one_peer_exponential, ring
from shoal.sync.push_sum import PushSum, Share

CONSERVED = 1e-12


def nodes_of(number: int, seed: int = 3) -> list[PushSum]:
    """With random vectors, in float64."""
    generator = torch.Generator().manual_seed(seed)
    return [PushSum(rank, [torch.randn(5, generator=generator, dtype=torch.float64)]) for rank in range(number)]


def total(nodes: list[PushSum], flying: list[tuple[int, Share]]) -> tuple[torch.Tensor, float]:
    """The sums of x and of the weight, on nodes and on their way."""
    x = sum((node.x[0] for node in nodes), torch.zeros(5, dtype=torch.float64))
    x = sum((share.x[0] for _, share in flying), x)
    return x, sum(node.weight for node in nodes) + sum(share.weight for _, share in flying)


@pytest.mark.parametrize("seed", range(5))
def test_sums_are_kept_under_delay_loss_and_repetition(seed: int) -> None:
    """Shares come late, in any order, twice, or are lost and sent again; all the while nothing is lost or made.

    On an irregular directed graph, so that weights differ. In the end, when all has come, nodes are at the average.
    """
    chance, number = random.Random(seed), 6
    edges = [[(i + 1) % number, *([(i + 2) % number] if i % 2 else [])] for i in range(number)]
    nodes, flying = nodes_of(number, seed), []
    (x, weight), (first_x, first_weight) = total(nodes, flying), total(nodes, flying)
    average = first_x / number
    weights = set()
    for _ in range(400):
        for node in nodes:
            if chance.random() < 0.5:
                flying += node.push({to: 1 / (1 + len(edges[node.rank])) for to in edges[node.rank]}).items()
        chance.shuffle(flying)
        kept = []
        for to, share in flying:
            if chance.random() < 0.4:
                kept.append((to, share))  # late, or lost and to be sent again
                continue
            assert nodes[to].receive(share)
            if chance.random() < 0.3:
                assert not nodes[to].receive(share), "the same share counts once"
        flying = kept
        x, weight = total(nodes, flying)
        assert float((x - first_x).abs().max()) < CONSERVED
        assert abs(weight - first_weight) < CONSERVED
        weights |= {round(node.weight, 3) for node in nodes}
    assert len(weights) > 100, "the graph was to be irregular"
    for to, share in flying:
        nodes[to].receive(share)
    for node in nodes:
        assert float((node.z()[0] - average).abs().max()) < 1e-6


@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_consensus_on_the_one_peer_exponential_graph_is_exact(rounds: int) -> None:
    """After k rounds with 2^k nodes, whole numbers have their average in every bit."""
    number = 2**rounds
    nodes = [PushSum(rank, [torch.tensor([float(7 * rank + 3), -float(rank)])]) for rank in range(number)]
    for matrix in one_peer_exponential(number):
        shares = [
            (to, share)
            for node in nodes
            for to, share in node.push(
                {to: row[node.rank] for to, row in enumerate(matrix) if to != node.rank and row[node.rank] > 0}
            ).items()
        ]
        for to, share in shares:
            nodes[to].receive(share)
    wanted = torch.tensor([7 * (number - 1) / 2 + 3, -(number - 1) / 2])
    assert all(torch.equal(node.z()[0], wanted) for node in nodes)
    assert all(node.weight == 1.0 for node in nodes)


def test_a_node_keeps_something() -> None:
    """Fractions that leave nothing are refused."""
    node = PushSum(0, [torch.ones(2)])
    with pytest.raises(ValueError, match="fractions must sum to less than 1"):
        node.push(dict.fromkeys(ring(3)[0], 0.5))
