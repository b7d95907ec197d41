"""When replicas agree: every H steps, or with an H that follows the loss."""

from __future__ import annotations

import json
import math

from shoal.sync.local import Period


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
    period.agreed(32, loss=0.25, lr=0.025)
    assert before == 8
    assert period.period == 4, "sqrt(4 / 16) x 16 = 8 is not below 8"


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
