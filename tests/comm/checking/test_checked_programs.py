"""Random programs under the check: what is alike goes through, and one call that is not is named by all ranks."""

from __future__ import annotations

import random

import pytest
import torch

from shoal.comm.collective import Collective, Handle
from shoal.comm.config import TransportName
from shoal.errors import CollectiveError
from tests.comm.checking.test_checked import checked

Program = list[tuple[str, int]]
STEPS, PROGRAMS = 12, 3


def program(draw: random.Random) -> Program:
    """Steps of the same calls, now and then with others between them; the end is told from all else."""
    step = [(draw.choice(["sum", "max", "gather", "scatter", "broadcast"]), 3 * draw.randrange(1, 4)) for _ in range(7)]
    between = [("sum", 30), ("broadcast", 6)]
    calls = [call for number in range(STEPS) for call in step + between * (number % 5 == 4)]
    return [*calls, ("sum", 99), ("barrier", 0)]


def mutated(calls: Program, draw: random.Random) -> Program:
    """One call left out, added, of another size or kind, or before its neighbour."""
    place, changed = draw.randrange(len(calls) // 2, len(calls) - 2), list(calls)
    kind, size = calls[place]
    changes: list[Program] = [[], [("sum", 33), calls[place]], [(kind, size + 3)], [("min", size)]]
    changed[place : place + 1] = draw.choice(changes)
    return changed


def started(world: Collective, kind: str, size: int) -> Handle:
    """One call of `size` numbers."""
    if kind == "barrier":
        return world.barrier()
    if kind == "gather":
        return world.all_gather(torch.empty(size * world.size), torch.ones(size))
    if kind == "scatter":
        return world.reduce_scatter(torch.empty(size), torch.ones(size * world.size))
    if kind == "broadcast":
        return world.broadcast(torch.ones(size), root=0)
    return world.all_reduce(torch.ones(size), kind)  # type: ignore[arg-type]


def run(world: Collective, calls: Program, draw: random.Random) -> None:
    """Some are waited for at once, the others later."""
    under_way: list[Handle] = []
    for kind, size in calls:
        under_way.append(started(world, kind, size))
        if draw.random() < 0.5:
            for handle in under_way:
                handle.wait()
            under_way.clear()
    for handle in under_way:
        handle.wait()


def outcome(place, transport: TransportName, seed: int, mistake: bool) -> str:
    """What this rank is told."""
    draw = random.Random(seed)
    calls = program(draw)
    wrong = mutated(calls, draw)
    culprit = draw.randrange(place.size)
    world = checked(place, transport).world
    try:
        run(world, wrong if mistake and place.rank == culprit else calls, random.Random(seed + place.rank))
    except CollectiveError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("transport", "seed"), [*(("gloo", seed) for seed in range(PROGRAMS)), ("hierarchical", PROGRAMS)]
)
def test_a_wrong_call_anywhere_in_a_program_is_named(ranks, transport: TransportName, seed: int) -> None:
    """By every rank, not by a timeout, although most calls were made without asking; and no process ends."""
    for sentence in ranks(3, outcome, transport, seed, True):
        assert "differs between ranks" in sentence, sentence


@pytest.mark.parametrize("transport", ["gloo", "hierarchical", "shm"])
def test_a_program_that_is_alike_goes_through(ranks, transport: TransportName) -> None:
    """Nobody is accused, however the ranks order their waits."""
    for seed in range(PROGRAMS):
        assert ranks(3, outcome, transport, seed, False) == [""] * 3
