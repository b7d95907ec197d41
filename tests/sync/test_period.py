"""When replicas agree: every H steps, or with an H that follows the loss, or the link."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from shoal.sync.config import LocalConfig
from shoal.sync.event_order import EventFiles, Rounds
from shoal.sync.period import LinkPace, Period, by_link


def agreements(period: Period, loss: list[float], lr: float = 0.1) -> list[int]:
    """After which of `len(loss)` steps replicas agree."""
    found = []
    for step, value in enumerate(loss, 1):
        if period.due(step):
            found.append(step)
            period.agreed(step, loss=value, lr=lr)
    return found


def test_a_fixed_period_is_counted_from_the_first_step() -> None:
    """Whenever it agreed out of turn, as in a warm-up."""
    period = Period(4)
    period.agreed(2, loss=1.0, lr=0.1)
    assert [step for step in range(1, 13) if period.due(step)] == [4, 8, 12]
    assert period.to_state() == {}


def test_the_period_goes_with_the_root_of_the_loss() -> None:
    """Equation 17: a loss of a quarter halves it; it takes effect once an interval is over."""
    period = Period(16, adapt_every=32)
    period.agreed(16, loss=4.0, lr=0.1)
    assert period.period == 16
    period.agreed(32, loss=2.0, lr=0.1)
    assert period.period == math.ceil(16 / math.sqrt(2))
    assert not period.due(32 + 11)
    assert period.due(32 + 12)


def test_a_loss_that_stays_halves_the_period() -> None:
    """Equation 18: down to 1, and no further."""
    found = agreements(Period(8, adapt_every=8), [3.0] * 40)
    assert found[:4] == [8, 12, 16, 18]
    assert found[-3:] == [38, 39, 40]


def test_a_smaller_learning_rate_allows_a_longer_period() -> None:
    """lr_0 / lr under the root; but the period never grows."""
    period = Period(16, adapt_every=16)
    period.agreed(16, loss=4.0, lr=0.1)
    before = period.period
    period.agreed(32, loss=0.125, lr=0.025)
    assert before == 8
    assert period.period == 6, "sqrt(4 / 32) x 16 = 5.7"
    period.agreed(48, loss=0.25, lr=0.025)
    assert period.period == 3, "sqrt(4 / 16) x 16 = 8 is not below 6"


REPLICAS, SIZE, LR, AGREEING_STEPS, EARLY, LATE = 4, 40, 0.05, 4.0, 100.0, 700.0
LONGEST, SHARE = 32, 0.2


Cost = Callable[[float], float]
"""Of an agreement at a time, in steps."""


def constant(now: float) -> float:
    return AGREEING_STEPS


def distances(
    period: Period, seed: int, *, times: Sequence[float] = (EARLY, LATE), cost: Cost = constant, share: float = 0.0
) -> dict[float, float]:
    """How far the agreed model's loss is above the least one, at `times`, where a step takes 1 and an agreement `cost`:
    noisy quadratics, another one on each replica. `share`: that of the time which the link may take.
    """
    draw = torch.Generator().manual_seed(seed)
    curve = torch.linspace(0.2, 1.0, SIZE) * torch.exp(0.5 * torch.randn(REPLICAS, SIZE, generator=draw))
    centre = torch.randn(REPLICAS, SIZE, generator=draw)

    def losses(x: torch.Tensor) -> torch.Tensor:
        return 0.5 * (curve * (x - centre) ** 2).sum(dim=1)

    least = losses((curve * centre).sum(dim=0) / curve.sum(dim=0)).mean()
    x, now, step, since = torch.full((REPLICAS, SIZE), 3.0), 0.0, 0, []
    found, link = dict.fromkeys(times, math.inf), LocalConfig(period=1, longest_period=LONGEST, wait_share=share)
    while now < times[-1]:
        step, now = step + 1, now + 1
        since.append(float(losses(x).mean()))
        x = x - LR * (curve * (x - centre) + 0.6 * torch.randn(REPLICAS, SIZE, generator=draw))
        if period.due(step):
            now, x = now + cost(now), x.mean(dim=0).expand(REPLICAS, SIZE)
            period.agreed(step, loss=sum(since) / len(since), lr=LR)
            since.clear()
            if share:
                period.follow(by_link(link, cost(now), 1.0))
            found.update({when: float(losses(x).mean() - least) for when in found if now <= when})
    return found


@pytest.mark.parametrize("seed", range(3))
def test_a_period_that_follows_the_loss_is_early_and_comes_nearest(seed: int) -> None:
    """As AdaComm is meant: early on as near as with long periods where short ones have hardly begun, and
    in the end nearer than with any of them, which stop where replicas drift apart.
    """
    fixed = {period: distances(Period(period), seed) for period in (1, 4, 16, 64)}
    adapted = distances(Period(64, adapt_every=64), seed)
    assert adapted[EARLY] <= fixed[64][EARLY] < 0.5 * fixed[1][EARLY]
    assert adapted[LATE] < min(found[LATE] for found in fixed.values())


@pytest.mark.slow
@pytest.mark.parametrize("phase", [100.0, 200.0, 400.0])
def test_a_period_that_follows_loss_and_link_is_no_worse_than_the_longest(phase: float) -> None:
    """On a link on which an agreement takes 0.3 steps, then 6, then 0.3: at the end of each phase as near as with the
    longest period, and in the end as near as with the best fixed one; of one that follows the link alone it is
    ahead where the model is young. Means of six draws.
    """

    def cost(now: float) -> float:
        return 6.0 if phase <= now < 2 * phase else 0.3

    def reached(new: Callable[[], Period], share: float = 0.0) -> list[float]:
        ends = (phase, 2 * phase, 3 * phase)
        runs = [distances(new(), seed, times=ends, cost=cost, share=share) for seed in range(6)]
        return [sum(run[end] for run in runs) / len(runs) for end in ends]

    fixed = {period: reached(lambda period=period: Period(period)) for period in (1, 4, 16, LONGEST)}
    both = reached(lambda: Period(LONGEST, adapt_every=LONGEST, moves=True), SHARE)
    by_link_alone = reached(lambda: Period(1, moves=True), SHARE)
    assert all(own <= longest for own, longest in zip(both, fixed[LONGEST], strict=True))
    assert both[-1] <= 1.1 * min(found[-1] for found in fixed.values())
    assert both[0] <= 1.05 * by_link_alone[0]


def test_the_longer_one_of_what_loss_and_link_ask_for_counts() -> None:
    """The loss halves the period, the link keeps it from falling, and the loss's own goes on below."""
    period = Period(16, adapt_every=16)
    for step in (16, 32, 48):
        period.agreed(step, loss=1.0, lr=0.1)
        period.follow(6)
    assert period.period == 6
    assert period.to_state()["period"] == 2
    period.follow(1)
    assert period.period == 2


def test_it_goes_on_from_its_state() -> None:
    """By way of JSON; the same agreements follow."""
    loss = [4.0 / (1 + step / 20) for step in range(100)]
    whole, first = Period(10, adapt_every=20), Period(10, adapt_every=20)
    wanted = agreements(whole, loss)
    begun = agreements(first, loss[: wanted[3]])
    second = Period(10, adapt_every=20)
    second.load(json.loads(json.dumps(first.to_state())))
    for step in range(wanted[3] + 1, 101):
        if second.due(step):
            begun.append(step)
            second.agreed(step, loss=loss[step - 1], lr=0.1)
    assert begun == wanted


class Replicas:
    """Two replicas of one process: the other is later by `late_s` at each agreement, and its steps are as long."""

    size = 2

    def __init__(self, late_s: float = 0.0) -> None:
        self.late_s = late_s

    def all_reduce(self, told: torch.Tensor, op: str) -> Replicas:
        assert op == "max"
        told[0] = torch.maximum(told[0], told[0] + self.late_s)
        return self

    def wait(self) -> None: ...


def by_clock(phases: list[tuple[int, float]], *, rounds: Rounds | None = None, late_s: float = 0.0) -> list[list[int]]:
    """The periods of each phase: (agreements, seconds of each). A step takes 10 ms, and the share is a fifth."""
    now_s, step = 0.0, 0
    config = LocalConfig(period=2, longest_period=64, wait_share=0.2)
    pace = LinkPace(config, Replicas(late_s), torch.device("cpu"), rounds=rounds, clock=lambda: now_s)  # pyright: ignore[reportArgumentType]
    period, found = config.period, []
    for agreements_, agreement_s in phases:
        found.append([])
        for _ in range(agreements_):
            step += period
            now_s += period * 0.010
            pace.begin()
            now_s += agreement_s + late_s
            found[-1].append(period)
            period = pace.end(step, period)
    return found


PHASES = [(20, 0.003), (20, 0.059), (20, 0.003)]
"""Agreements at 1 Gbit/s, at 50 Mbit/s, and at 1 Gbit/s again."""


def test_the_period_follows_the_link() -> None:
    """59 ms and a fifth of the time: 24 steps of 10 ms. Two agreements after a change are by the old period."""
    fast, slow, again = by_clock(PHASES)
    assert set(fast) == {2}
    assert slow == [2, 2] + [24] * 18
    assert again == [24, 24] + [2] * 18
    waited = 20 * 0.059 / (20 * 0.059 + sum(slow) * 0.010)
    assert waited < 1.1 * 0.2


def test_a_late_replica_is_no_slow_link() -> None:
    """The replica that came last waited for nobody: its seconds are the agreement's."""
    assert by_clock(PHASES, late_s=0.5) == by_clock(PHASES)


def test_a_recorded_period_is_repeated(tmp_path: Path) -> None:
    """Whatever the clock says the second time."""
    file = tmp_path / "order.jsonl"
    first = by_clock(PHASES, rounds=Rounds(EventFiles(record=file)))
    assert by_clock([(20, 0.001)] * 3, rounds=Rounds(EventFiles(replay=file))) == first


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"adapt_every": 50}, "adapt_every = 50 with longest_period = 500"),
        ({"period": 600}, "longest_period = 500 with period = 600"),
    ],
)
def test_what_does_not_go_together_is_refused(keys: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LocalConfig(wait_share=0.1, **keys)  # pyright: ignore[reportArgumentType]
