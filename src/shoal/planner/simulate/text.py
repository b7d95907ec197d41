"""A simulated step and simulated weeks as lines of text: what `shoal simulate` prints."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.planner.explain.text import GIB, seconds, table
from shoal.planner.simulate.goodput import WEEK_S, Goodput
from shoal.planner.simulate.outcome import Outcome

MOST_RANKS = 32
"""Lines of the table of ranks; longer pipelines show their idlest ranks."""


def step(one: Outcome, *, predicted_s: float) -> str:
    """The step and its parts beside the prediction of the closed forms."""
    rows = [
        ("step", seconds(one.step_s), f"{seconds(predicted_s)} by closed forms"),
        (
            "bubble",
            seconds(one.bubble * one.phase_s),
            f"{100 * one.bubble:.1f} % of the pipeline's {seconds(one.phase_s)}",
        ),
        ("communication outside stages", seconds(one.exposed_s), "step minus the step on a perfect network"),
        ("communication inside stages", seconds(one.inside_s), "tensor, context, expert, ZeRO: what nothing hides"),
        ("without a barrier between steps", seconds(one.period_s), "longest time from a rank's first to last action"),
    ]
    return table(("simulated", "seconds", ""), rows)


def ranks(one: Outcome, memory_bytes: Sequence[float], *, limit_bytes: float) -> str:
    """Every simulated pipeline rank of the first replica: computing, waiting, its port, its memory."""
    shown = [share for share in one.ranks if share.replica == 0]
    if len(shown) > MOST_RANKS:
        kept = sorted(sorted(shown, key=lambda share: -share.idle_share)[:MOST_RANKS], key=lambda share: share.rank)
        shown = kept
    rows = [
        (
            f"{share.rank}",
            seconds(share.computing_s),
            f"{100 * share.idle_share:.1f}",
            f"{100 * share.port_share:.1f}",
            f"{memory_bytes[share.rank] / GIB:.1f}",
        )
        for share in shown
    ]
    return table(("pipeline rank", "computes", "idle %", "port in use %", f"peak GiB of {limit_bytes / GIB:.0f}"), rows)


def weeks(one: Goodput, *, every_s: float, steps: float) -> str:
    """Where the time of the weeks went."""
    parts = (
        ("training that lasted", one.trained_s),
        ("saving", one.saving_s),
        ("lost and done again", one.lost_s),
        ("recovering", one.recovering_s),
    )
    rows = [(name, seconds(value), f"{100 * value / one.wall_s:.2f}") for name, value in parts]
    title = (
        f"{one.wall_s / WEEK_S:g} weeks: {one.failures} failures, a save every {seconds(every_s)}, {steps:,.0f} steps"
    )
    return title + "\n" + table(("time", "", "%"), rows)
