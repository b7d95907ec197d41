"""Known outcomes on the virtual clock: the stability of delayed gradients, and the mean step time of backup workers."""

from __future__ import annotations

import random
from math import pi, sin

import pytest

from shoal.sync.admission import Asynchronous, Bounded, FirstComers, Rule
from tests.sync.admission_simulator import Change, Simulation, Watch

CURVATURE = 3.0


def harmonic(n: int) -> float:
    """H(n) = 1 + 1/2 + ... + 1/n."""
    return sum(1 / k for k in range(1, n + 1))


def distance(tau: int, step_size: float, *, updates: int) -> list[float]:
    """|x| after every update of x -= step_size * CURVATURE * x_old, x_old from tau updates before: tau + 1 workers
    that take equally long, one after the other.
    """
    x, distances = 1.0, []
    read: dict[int, float] = {}

    def on_read(worker: int, version: int) -> None:
        read[worker] = x

    def on_update(update) -> None:
        nonlocal x
        (contribution,) = update.contributions
        x -= step_size * CURVATURE * read[contribution.worker]
        distances.append(abs(x))

    watch = Watch(on_read, on_update)
    Simulation(Asynchronous(range(tau + 1)), lambda worker, number: 1.0, watch=watch).run(updates=updates)
    return distances


@pytest.mark.parametrize("tau", [0, 1, 4, 8])
def test_delayed_gradients_are_stable_up_to_the_known_bound(tau: int) -> None:
    """A quadratic of curvature a with delay tau is stable for eta * a < 2 sin(pi / (2 (2 tau + 1))): at 0.98 of it x
    shrinks, at 1.02 it grows.
    """
    bound = 2 * sin(pi / (2 * (2 * tau + 1))) / CURVATURE
    window = 4 * (2 * tau + 1)  # more than a period of its oscillation
    stable, unstable = (distance(tau, factor * bound, updates=5_000) for factor in (0.98, 1.02))
    assert max(stable[-window:]) < 1e-3 * max(stable[:window])
    assert max(unstable[-window:]) > 1e3 * max(unstable[:window])


@pytest.mark.parametrize(("counted", "backup", "published"), [(100, 0, 5.19), (96, 4, 3.10)])
def test_backup_workers_cut_the_tail(counted: int, backup: int, published: float) -> None:
    """With exponential times of mean 1 a step takes H(N + b) - H(b) on average: 5.19 for 100 + 0, 3.10 for 96 + 4."""
    draw, workers, steps = random.Random(7), counted + backup, 3_000
    rule = FirstComers(range(workers), counted=counted)
    contributions: list[int] = []
    simulation = Simulation(
        rule,
        lambda worker, number: draw.expovariate(1.0),
        watch=Watch(on_update=lambda update: contributions.append(len(update.contributions))),
        give_up=True,
    )
    simulation.run(updates=steps)
    mean = simulation.now_s / steps
    assert mean == pytest.approx(harmonic(workers) - harmonic(backup), rel=0.02)
    assert mean == pytest.approx(published, rel=0.02)
    assert set(contributions) == {counted}


def test_a_slow_worker_holds_up_the_synchronous_and_not_the_asynchronous() -> None:
    """One of four takes four times as long: 100 updates of four take 400 s, or 100 of one 31 s."""
    slow = lambda worker, number: 4.0 if worker == 0 else 1.0  # noqa: E731
    together, apart = Simulation(FirstComers(range(4)), slow), Simulation(Asynchronous(range(4)), slow)
    together.run(updates=100)
    apart.run(updates=100)
    assert together.now_s == 400.0
    assert apart.now_s == pytest.approx(100 / 3.25, rel=0.05)
    assert together.accounts.by_worker[1].waited_s == 300.0
    assert apart.accounts.by_worker[1].waited_s == 0.0
    assert apart.accounts.by_worker[0].staleness / apart.accounts.by_worker[0].counted > 9


def test_slack_absorbs_delays_that_change_places() -> None:
    """A worker that is late now and then holds up synchronous training each time, and bounded staleness hardly."""

    def hiccup(worker: int, number: int) -> float:
        return 5.0 if number % 8 == 2 * worker else 1.0

    times = []
    for bound in (0, 4):
        simulation = Simulation(Bounded(range(4), bound=bound), hiccup)
        simulation.run(updates=80)
        times.append(simulation.now_s)
    assert times[0] == 80 + 4 * 40
    assert times[1] < 0.6 * times[0]


@pytest.mark.parametrize(
    "rule",
    [FirstComers(range(3)), FirstComers(range(3), counted=2), Bounded(range(3), bound=1), Asynchronous(range(3))],
    ids=["sync", "backup", "bounded", "async"],
)
def test_a_death_and_a_return_do_not_stop_the_others(rule: Rule) -> None:
    """The dead worker's contributions are missed while it is away, and come again afterwards."""
    counted: list[tuple[float, int]] = []
    simulation = Simulation(
        rule,
        lambda worker, number: 1.0 + 0.01 * worker,
        changes=[Change(10.5, 1, "leave"), Change(20.5, 1, "join")],
        watch=Watch(
            on_update=lambda update: counted.extend((simulation.now_s, c.worker) for c in update.contributions)
        ),
    )
    simulation.run(updates=120)
    assert rule.version >= 120
    away = {worker for time_s, worker in counted if 12 < time_s < 20}
    assert away
    assert 1 not in away
    assert rule.present == {0, 1, 2}


def test_the_same_arguments_give_the_same_events() -> None:
    """Bit for bit."""

    def trace() -> list[tuple[float, int, int]]:
        draw, events = random.Random(3), []
        watch = Watch(
            on_update=lambda update: events.append((simulation.now_s, update.version, update.contributions[0].worker))
        )
        simulation = Simulation(Asynchronous(range(5), cap=3), lambda *_: draw.expovariate(1.0), watch=watch)
        simulation.run(updates=200)
        return events

    assert len(trace()) == 200
    assert trace() == trace()
