"""`--why-not`: one thing is asked to be otherwise, and the rest of the best plan stays where it can."""

from __future__ import annotations

import pytest

from shoal.planner.explain.explain import why_not
from shoal.planner.search.candidates import Allowed
from shoal.planner.search.search import search
from tests.planner.jobs import LARGE, predictor

ALLOWED = Allowed(pipeline=4, schedules=("Interleaved1F1B", "1F1B"))


@pytest.mark.parametrize("asked", ["schedule=1F1B", "recompute=full"])
def test_the_rest_of_the_plan_is_kept(asked: str) -> None:
    """The layout and the microbatches of the answer are those of the best plan."""
    maker = predictor(LARGE, samples=512)
    best = search(maker, ALLOWED, keep=1).best[0]
    assert best.plan.schedule == "Interleaved1F1B"
    words = best.plan.describe().split()
    layout = " ".join(words[: next(i for i, word in enumerate(words) if word.startswith("micro=")) + 1])
    assert f"all else kept, is {layout}" in why_not(maker, asked, best, allowed=ALLOWED)


def test_what_cannot_be_kept_is_searched_for() -> None:
    """Without ZeRO there are no shards: the layout has to change with it, and the answer says so."""
    maker = predictor(samples=64)
    best = search(maker, Allowed(zero=(1,), tensor=1), keep=1).best[0]
    assert "nothing else can be kept" in why_not(maker, "zero=0", best, allowed=Allowed())


def test_a_schedule_asks_for_a_pipeline() -> None:
    """Where the best plan has none: the answer says what to ask for, and that can be asked."""
    maker, allowed = predictor(samples=64), Allowed(tensor=1)
    best = search(maker, Allowed(zero=(1,), tensor=1, pipeline=1), keep=1).best[0]
    said = why_not(maker, "schedule=1F1B", best, allowed=allowed)
    assert said.endswith("ask for pipeline=2,schedule=1F1B")
    assert "pipeline=2" in why_not(maker, "pipeline=2,schedule=1F1B", best, allowed=allowed)
