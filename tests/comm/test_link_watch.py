"""What follows the links: chosen anew when they change, alike on all ranks, recorded and repeated."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore

from shoal.comm.config import WireConfig
from shoal.comm.ledger import Ledger
from shoal.comm.link_watch import REGULAR, LinkWatch, Timing, between_s, unexplained_s, waits_for_cores
from shoal.comm.mesh import Mesh, build_mesh
from shoal.errors import ConfigError
from shoal.gradients.replicated import BucketSearch
from shoal.topology.layout import Layout
from shoal.topology.links import Links, clustered, uniform
from tests.waiting import wait_until

MIB = 1 << 20
QUIET_S, STEPS = 0.003, 14
FLAT = uniform(4, latency_s=1e-4, bytes_s=1e9)
TWO_HOSTS = clustered([0, 0, 1, 1], inner=(1e-5, 1e10), outer=(1e-3, 1e7))
Step = tuple[float, float | Timing]
"""Seconds that ranks wait in a step, and that one all-reduce takes."""
CROWDED = Timing(0.4, 0.21)
"""Nearly all of it is waiting for a core."""


class Played(LinkWatch):
    """A watch whose link is what the test says."""

    link_s: float | Timing = QUIET_S
    timings = 0
    longer = 1.0
    """What an all-reduce takes by another algorithm than the first, over what it takes by that."""
    first = ""

    def _timed(self) -> Timing:
        self.timings += 1
        timing = self.link_s if isinstance(self.link_s, Timing) else Timing(self.link_s, 0.0)
        names = {group.name_for(MIB) for _, _, group in self._groups().values()}
        self.first = self.first or min(names)
        return timing if names == {self.first} else Timing(timing.seconds * self.longer, timing.for_core_s)


def four(place, algorithm: str, name: str, transport: str = "gloo") -> Mesh:
    return build_mesh(
        Layout(replicate=place.size),
        place.rank,
        store=PrefixStore(name, place.store),
        device=torch.device("cpu"),
        wire=WireConfig(timeout_s=60, transport=transport, algorithm=algorithm),  # pyright: ignore[reportArgumentType]
    )


def taken(
    watch: Played, mesh: Mesh, search: BucketSearch, steps: Sequence[Step], rank: int
) -> list[tuple[str, int, int]]:
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


def followed(
    place, steps: Sequence[Step], links: list[Links], recorded: list[str] | None = None, longer: float = 1.0
) -> Any:
    """What the ranks chose, what they recorded, what they said."""
    with pytest.MonkeyPatch.context() as patch:
        given = iter(links)
        patch.setattr("shoal.comm.algorithms.group.probe", lambda *_, **__: next(given))
        patch.setattr("shoal.comm.algorithms.group.race", lambda *_: (False, False))
        mesh = four(place, "auto", "repeated" if recorded else "measured")
        mesh.ranks(range(place.size), lane="other")
        said: list[str] = []
        replayed = None if recorded is None else iter(recorded)

        def decided(text: str) -> str:
            said.append(text if replayed is None else next(replayed))
            return said[-1]

        search = BucketSearch([MIB, 4 * MIB])
        watch = Played(mesh.world, mesh.ledger, mesh.opened, search, decided=decided, repeats=recorded is not None)
        watch.longer = longer
        return taken(watch, mesh, search, steps, place.rank), said, watch.take_lines()


SLOWER: Sequence[Step] = [(0.01, QUIET_S)] * STEPS + [(1.0, 0.4)] * (STEPS + 3)


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


@pytest.mark.parametrize("longer", [0.5, 2.0])
def test_another_algorithm_is_no_change_of_the_link(ranks, longer: float) -> None:
    """By it an all-reduce takes another time, which is usual from then on; a link that changes back is still seen."""
    steps: Sequence[Step] = [*SLOWER, *[(1.0, 0.4)] * STEPS]
    for chosen, _, lines in ranks(4, followed, steps, [FLAT, FLAT, TWO_HOSTS, TWO_HOSTS], None, longer):
        assert chosen[-1][0] == "hierarchical"
        assert [line for line in lines if "has changed" in line] == [lines[1]]
    back = [*SLOWER[: STEPS + 4], *[(0.01, QUIET_S)] * (2 * STEPS)]
    for chosen, _, lines in ranks(4, followed, back, [FLAT, FLAT, TWO_HOSTS, FLAT], None, longer):
        assert chosen[-1][0] == chosen[0][0]
        assert len([line for line in lines if "has changed" in line]) == 2


def test_on_a_link_that_is_back_nothing_is_measured_or_searched(ranks) -> None:
    """What was chosen on it is used again, at once; on one that is neither of those before, links are measured."""
    back: Sequence[Step] = [*SLOWER, *[(0.01, QUIET_S)] * STEPS]
    for chosen, _, lines in ranks(4, followed, back, [FLAT, FLAT, TWO_HOSTS]):
        first = chosen[STEPS - 1][:2]
        begins = next(at for at, step in enumerate(chosen) if at > len(SLOWER) and step[0] != "hierarchical")
        assert {step[:2] for step in chosen[begins:]} == {first}
        assert "as it was before, and so are algorithms with buckets of" in lines[-1]
    third = [*SLOWER, *[(0.3, 0.05)] * STEPS]
    for chosen, _, lines in ranks(4, followed, third, [FLAT, FLAT, TWO_HOSTS, TWO_HOSTS]):
        assert chosen[-1][0] == "hierarchical"
        assert "as it was before" not in " ".join(lines)


def a_late_group(place: Any) -> list[str]:
    """What ranks say of a link that is back, after two of them have opened a group of their own."""
    with pytest.MonkeyPatch.context() as patch:
        given = iter([FLAT, TWO_HOSTS, FLAT])
        pair = uniform(2, latency_s=1e-4, bytes_s=1e9)
        patch.setattr("shoal.comm.algorithms.group.probe", lambda of, **_: next(given) if of.size == 4 else pair)
        patch.setattr("shoal.comm.algorithms.group.race", lambda *_: (False, False))
        mesh = four(place, "auto", "late")
        search = BucketSearch([MIB])
        watch = Played(mesh.world, mesh.ledger, mesh.opened, search)
        taken(watch, mesh, search, SLOWER, place.rank)
        if place.rank < 2:
            mesh.ranks((0, 1), lane="late")
        taken(watch, mesh, search, [(0.01, QUIET_S)] * STEPS, place.rank)
        return watch.take_lines()


@pytest.mark.slow
def test_ranks_of_which_some_have_opened_another_group_measure_again(ranks: Any) -> None:
    """All or none: what ranks have chosen before has nothing for that group."""
    for lines in ranks(4, a_late_group):
        assert len([line for line in lines if "the link has changed" in line]) == 2
        assert "as it was before" not in lines[-1]


def test_a_wait_that_grew_for_another_reason_changes_nothing(ranks) -> None:
    """One all-reduce is timed, once: the link takes what it took."""
    steps: Sequence[Step] = [(0.01, QUIET_S)] * STEPS + [(1.0, QUIET_S)] * STEPS
    for chosen, said, lines in ranks(4, followed, steps, [FLAT, FLAT]):
        assert len({name for name, _, _ in chosen}) == 1
        assert chosen[-1][2] == 4
        assert json.loads(said[-1])["bucket bytes"] == chosen[-1][1]
        assert len(lines) == 1


@pytest.mark.parametrize(("slow_steps", "changes"), [(4, 0), (8, 1)])
def test_a_small_change_takes_more_steps_to_be_believed(ranks, slow_steps: int, changes: int) -> None:
    """A sum that takes 1.7 times as long, as on a machine that others share; the step that rings and six timings."""
    steps: Sequence[Step] = [(0.01, 0.3)] * STEPS + [(1.0, 0.51)] * slow_steps + [(0.01, 0.3)] * 2
    for _, _, lines in ranks(4, followed, steps, [FLAT, FLAT, TWO_HOSTS, TWO_HOSTS]):
        assert len([line for line in lines if "has changed" in line]) == changes


@pytest.mark.parametrize(
    ("timed", "looks"),
    [((0.4, QUIET_S), 5), ((0.4, 0.4, QUIET_S), 6), ((0.0045 + QUIET_S,) * 3, 4)],
    ids=["one timing of three", "two", "too little beside a step"],
)
def test_a_noisy_timing_changes_nothing(ranks, timed: tuple[float, ...], looks: int) -> None:
    """Another one does not confirm it; or what it differs by is no notable part of the step."""
    steps: Sequence[Step] = [(0.01, QUIET_S)] * STEPS + [(1.0, seconds) for seconds in (QUIET_S, *timed)]
    steps += [(1.0, QUIET_S)] * STEPS
    for chosen, _, lines in ranks(4, followed, steps, [FLAT, FLAT]):
        assert len({name for name, _, _ in chosen}) == 1
        assert len({size for _, size, _ in chosen[10:]}) == 1
        assert chosen[-1][2] == looks
        assert len(lines) == 1


@pytest.mark.parametrize(
    ("now", "usual", "left_s"),
    [
        (Timing(0.010, 0.006), Timing(0.001, 0.001), 0.0),
        (Timing(0.043, 0.001), Timing(0.003, 0.001), 0.04),
        (Timing(0.043, 0.011), Timing(0.003, 0.001), 0.02),
        (Timing(0.001, 0.001), Timing(0.010, 0.006), 0.0),
        (Timing(0.003, 0.001), Timing(0.043, 0.001), -0.04),
        (Timing(0.003, 0.001), Timing(0.043, 0.011), -0.02),
        (Timing(0.020, 0.011), Timing(0.043, 0.001), -0.023),
        (Timing(0.043, 0.001), Timing(0.020, 0.011), 0.023),
    ],
    ids=[
        "load",
        "slower",
        "slower under load",
        "load gone",
        "faster",
        "faster, load gone",
        "faster, load",
        "slower, load gone",
    ],
)
def test_processors_explain_what_they_took_and_no_more(now: Timing, usual: Timing, left_s: float) -> None:
    assert unexplained_s(now, usual) == pytest.approx(left_s)


class Loaded:
    """A group of one rank whose sums take a second, for half of which a thread waits for a core."""

    now_s = 0.0

    def barrier(self) -> Loaded:
        return self

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> Loaded:
        self.now_s += 1.0 if tensor.numel() > 2 else 0.0
        return self

    def wait(self) -> None:
        """It is over."""


def test_waits_for_cores_and_nothing_else_explain_a_slow_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the seconds of processors, which are those of a thread that reads data, too."""
    group: Any = Loaded()
    monkeypatch.setattr("shoal.comm.link_watch.waits_for_cores", lambda: {"a thread": int(5e8 * group.now_s)})
    watch: Any = LinkWatch(group, Ledger(), dict, None, clock=lambda: group.now_s)
    assert watch._timed() == pytest.approx(Timing(1.0, 0.5))


@pytest.mark.skipif(
    not any(waits_for_cores().values()), reason="this system does not say how long threads wait for a core"
)
def test_threads_that_share_a_core_wait_for_it() -> None:
    """Of three, two wait at any time; the seconds for which they run are those of one core."""
    over, cores = threading.Event(), os.sched_getaffinity(0)

    def work() -> None:
        os.sched_setaffinity(0, {min(cores)})  # of this thread alone
        block = bytes(4 * MIB)
        while not over.is_set():
            hashlib.sha256(block)  # without the interpreter's lock

    def waited_s() -> float:
        files = {f"/proc/self/task/{thread.native_id}/schedstat" for thread in threads}
        return between_s({}, {file: waited for file, waited in waits_for_cores().items() if file in files})

    threads, begin_s = [threading.Thread(target=work) for _ in range(3)], time.perf_counter()
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: waited_s() > 1.3 * (time.perf_counter() - begin_s))
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_threads_that_end_and_begin_take_no_wait_along() -> None:
    assert between_s({"ends": 9_000_000_000, "stays": 1}, {"stays": 5, "begins": 7}) == pytest.approx(11e-9)


def test_a_busy_machine_is_no_change_of_the_link(ranks) -> None:
    """It comes and goes; a link that becomes slow meanwhile is seen, and one that does so unheard by regular looks."""
    steps: Sequence[Step] = [(0.01, QUIET_S)] * STEPS + [(1.0, CROWDED), (0.01, QUIET_S)] * REGULAR
    for chosen, _, lines in ranks(4, followed, steps, [FLAT, FLAT]):
        assert len({name for name, _, _ in chosen}) == 1
        assert len(lines) == 1
        assert chosen[-1][2] > 4
    unheard = [*steps, *[(0.5, Timing(0.8, CROWDED.for_core_s))] * (REGULAR + 3)]
    for chosen, _, lines in ranks(4, followed, unheard, [FLAT, FLAT, TWO_HOSTS]):
        assert chosen[-1][0] == "hierarchical"
        assert "take 800.0" in lines[1]


def test_a_run_that_begins_on_a_busy_machine_learns_what_is_usual(ranks) -> None:
    """The first quiet timing is it; half of that rate is then a change."""
    steps: Sequence[Step] = [(1.0, CROWDED)] * STEPS + [(0.01, QUIET_S)] * STEPS + [(0.5, 3 * QUIET_S + 0.1)] * STEPS
    for chosen, _, lines in ranks(4, followed, steps, [FLAT, FLAT, TWO_HOSTS]):
        assert chosen[-1][0] == "hierarchical"
        assert "took 3.0 ms" in lines[1]


def crowded(place, steps: int) -> list[str]:
    """What a watch says of Gloo over loopback, while others compute in bursts on all cores."""
    bursts = "import random, time\nwhile True:\n    end = time.perf_counter() + random.uniform(0, 1)\n"
    bursts += "    while time.perf_counter() < end: sum(range(10_000))\n    time.sleep(random.uniform(0, 1))\n"
    mesh, said = four(place, "auto", "crowded"), []
    watch, numbers = LinkWatch(mesh.world, mesh.ledger, mesh.opened, None), torch.zeros(MIB // 4)
    others = [subprocess.Popen([sys.executable, "-c", bursts]) for _ in range(6)]
    try:
        for _ in range(steps):
            watch.begin()
            sum(range(100_000))
            mesh.world.all_reduce(numbers).wait()
            watch.end()
            said += watch.take_lines()
    finally:
        for process in others:
            process.kill()
    return said


@pytest.mark.stress
def test_a_crowded_machine_raises_no_alarm(ranks) -> None:
    """Twelve processes take two cores in turns: of old, several of 1,000 steps said that the link had changed."""
    assert ranks(2, crowded, 1000) == [[], []]


def in_memory(place, steps: Sequence[Step]) -> Any:
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
