"""What follows the links: chosen anew when they change, alike on all ranks, recorded and repeated."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore

from shoal.comm.config import WireConfig
from shoal.comm.link_watch import LinkWatch
from shoal.comm.mesh import Mesh, build_mesh
from shoal.errors import ConfigError
from shoal.gradients.replicated import BucketSearch
from shoal.topology.layout import Layout
from shoal.topology.links import Links, clustered, uniform

MIB = 1 << 20
QUIET_S, STEPS = 0.003, 14
FLAT = uniform(4, latency_s=1e-4, bytes_s=1e9)
TWO_HOSTS = clustered([0, 0, 1, 1], inner=(1e-5, 1e10), outer=(1e-3, 1e7))
Step = tuple[float, float]
"""Seconds that ranks wait in a step, and that one all-reduce takes."""


class Played(LinkWatch):
    """A watch whose link is what the test says."""

    link_s = QUIET_S
    timings = 0

    def _timed_s(self) -> float:
        self.timings += 1
        return self.link_s


def four(place, algorithm: str, name: str, transport: str = "gloo") -> Mesh:
    return build_mesh(
        Layout(replicate=place.size),
        place.rank,
        store=PrefixStore(name, place.store),
        device=torch.device("cpu"),
        wire=WireConfig(timeout_s=60, transport=transport, algorithm=algorithm),  # pyright: ignore[reportArgumentType]
    )


def taken(watch: Played, mesh: Mesh, search: BucketSearch, steps: list[Step], rank: int) -> list[tuple[str, int, int]]:
    """(algorithm of 1 MiB, bytes of a bucket, looks so far) of each step; rank 1 waits for the others longer."""
    watched = mesh.opened()["world"][1].backend == "gloo"
    group, found, now = mesh.opened()["world"][1].inner, [], [0.0]
    watch._clock = lambda: now[0]
    for waited_s, watch.link_s in steps:
        watch.begin()
        found.append((group.name_for(MIB) if watched else "", search.size, watch.timings))
        now[0] += 0.1 + waited_s
        mesh.ledger.waited("all_reduce", waited_s + 0.5 * (rank == 1))
        if search.searching:
            search.note(waited_s)
        watch.end()
    return found


def followed(place, steps: list[Step], links: list[Links], recorded: list[str] | None = None) -> Any:
    """What the ranks chose, what they recorded, what they said."""
    with pytest.MonkeyPatch.context() as patch:
        given = iter(links)
        patch.setattr("shoal.comm.algorithms.group.probe", lambda *_, **__: next(given))
        mesh = four(place, "auto", "repeated" if recorded else "measured")
        mesh.ranks(range(place.size), lane="other")
        said: list[str] = []
        replayed = None if recorded is None else iter(recorded)

        def decided(text: str) -> str:
            said.append(text if replayed is None else next(replayed))
            return said[-1]

        search = BucketSearch([MIB, 4 * MIB])
        watch = Played(mesh.world, mesh.ledger, mesh.opened, search, decided=decided, repeats=recorded is not None)
        return taken(watch, mesh, search, steps, place.rank), said, watch.take_lines()


SLOWER: list[Step] = [(0.01, QUIET_S)] * STEPS + [(1.0, 0.4)] * (STEPS + 3)


def test_a_slower_link_is_followed_alike_by_all_and_repeated(ranks) -> None:
    """After the step that shows it and two that confirm it: another algorithm, and the sizes are tried anew. A replay
    measures nothing, on other links, and uses the same. Two groups of the same ranks measure their links once.
    """
    measured = ranks(4, followed, SLOWER, [FLAT, FLAT, TWO_HOSTS])
    chosen, said, lines = measured[0]
    names, sizes = [name for name, _, _ in chosen], [size for _, size, _ in chosen]
    assert all((each, text) == (chosen, said) for each, text, _ in measured)
    assert set(names[: STEPS + 3]) == {names[0]} != {"hierarchical"}
    assert set(names[STEPS + 3 :]) == {"hierarchical"}
    assert set(sizes[:10]) == {MIB, 4 * MIB} == set(sizes[STEPS + 3 : STEPS + 13])
    assert "3.0 ms and take 400.0" in lines[1]
    assert "by hierarchical instead of" in lines[1]
    repeated = ranks(4, followed, [(9.0, 9.0)] * len(SLOWER), [FLAT, FLAT], said)
    for each, text, _ in repeated:
        assert [step[:2] for step in each] == [step[:2] for step in chosen]
        assert text == said
        assert {looks for _, _, looks in each} == {0}


def test_a_wait_that_grew_for_another_reason_changes_nothing(ranks) -> None:
    """One all-reduce is timed, once: the link takes what it took."""
    steps: list[Step] = [(0.01, QUIET_S)] * STEPS + [(1.0, QUIET_S)] * STEPS
    for chosen, said, lines in ranks(4, followed, steps, [FLAT, FLAT]):
        assert len({name for name, _, _ in chosen}) == 1
        assert chosen[-1][2] == 4
        assert json.loads(said[-1])["bucket bytes"] == chosen[-1][1]
        assert len(lines) == 1


@pytest.mark.parametrize(
    ("timed", "looks"),
    [((0.4, QUIET_S), 5), ((0.4, 0.4, QUIET_S), 6), ((0.0045 + QUIET_S,) * 3, 4)],
    ids=["one timing of three", "two", "too little beside a step"],
)
def test_a_noisy_timing_changes_nothing(ranks, timed: tuple[float, ...], looks: int) -> None:
    """Another one does not confirm it; or what it differs by is no notable part of the step."""
    steps: list[Step] = [(0.01, QUIET_S)] * STEPS + [(1.0, seconds) for seconds in (QUIET_S, *timed)]
    steps += [(1.0, QUIET_S)] * STEPS
    for chosen, _, lines in ranks(4, followed, steps, [FLAT, FLAT]):
        assert len({name for name, _, _ in chosen}) == 1
        assert len({size for _, size, _ in chosen[10:]}) == 1
        assert chosen[-1][2] == looks
        assert len(lines) == 1


def in_memory(place, steps: list[Step]) -> Any:
    mesh, search = four(place, "backend", "memory", "shm"), BucketSearch([MIB, 4 * MIB])
    watch = Played(mesh.world, mesh.ledger, mesh.opened, search)
    return taken(watch, mesh, search, steps, place.rank), watch.take_lines()


def test_ranks_that_share_memory_watch_no_link(ranks) -> None:
    """Sizes are searched once."""
    for chosen, lines in ranks(2, in_memory, SLOWER):
        assert chosen[-1][2] == 0
        assert len({size for _, size, _ in chosen[10:]}) == 1
        assert len(lines) == 1


def elsewhere(place, said: str) -> None:
    """A replay over groups that choose no algorithm."""
    mesh = four(place, "ring", "elsewhere")
    watch = LinkWatch(mesh.world, mesh.ledger, mesh.opened, None, decided=lambda text: said, repeats=True)
    with pytest.raises(ConfigError, match=r"chose algorithms for the groups .'world'., and this one would for"):
        watch.begin()


def test_a_replay_on_other_hosts_says_so(ranks) -> None:
    """The recorded links are those of a group that is none here."""
    ranks(2, elsewhere, json.dumps({"world": [[[0, 1], [1, 0]], [[1, 1], [1, 1]], [0, 1], 0]}))
