"""The search against pricing everything, and what it says where nothing fits."""

from __future__ import annotations

import cProfile
import pstats
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.plan import llama_405b_predictor
from shoal.errors import LayoutError, UsageError
from shoal.planner.explain.explain import condition, helps, why_not
from shoal.planner.explain.text import Change, help_sentence
from shoal.planner.search.candidates import Allowed, candidates, layouts
from shoal.planner.search.search import search
from shoal.topology.cluster import Cluster
from shoal.topology.cluster_file import known_cluster
from tests.planner.jobs import CLUSTER, LARGE, MIXTURE, MODEL, predictor

NODE = known_cluster("dgx-h100", 1)
KEEP = 10
CALLS_A_PLAN = 1000
"""Of functions: the same on every machine. `benchmarks.plan` has the seconds."""


def _memory(cluster: Cluster, gib: float) -> Cluster:
    device = msgspec.structs.replace(cluster.device, memory_gib=gib)
    return msgspec.structs.replace(cluster, machine=msgspec.structs.replace(cluster.machine, device=device))


def test_the_order_is_that_of_pricing_every_plan() -> None:
    """The same fastest plans, by the naive way, on a device that has just the memory of the middle plan."""
    allowed = Allowed(recompute=("none", "full"))
    roomy = predictor(cluster=NODE, samples=16)
    sizes = sorted(roomy.predict(plan).memory_bytes for plan in candidates(roomy.workload, NODE, allowed))
    middle = sizes[len(sizes) // 2]
    maker = predictor(cluster=_memory(NODE, middle / 2**30), samples=16)
    everything = [maker.predict(plan) for plan in candidates(maker.workload, NODE, allowed)]
    fitting = sorted(one.step_s for one in everything if one.memory_bytes <= middle)
    found = search(maker, allowed, keep=KEEP)
    assert [one.step_s for one in found.best] == fitting[:KEEP]
    assert found.considered == len(everything)
    assert found.fitting == len(fitting)


def test_nothing_on_the_front_is_beaten_in_both() -> None:
    """And everything that is off it is."""
    found = search(predictor(cluster=NODE, samples=16), keep=10_000)
    front = [(one.step_s, one.memory_bytes) for one in found.front]
    assert front == sorted(front)
    assert [memory for _, memory in front] == sorted((memory for _, memory in front), reverse=True)
    for one in found.best:
        assert any(s <= one.step_s and m <= one.memory_bytes for s, m in front)


@settings(max_examples=5)
@given(gib=st.floats(4, 40), more=st.floats(0, 40))
def test_more_memory_never_removes_a_plan(gib: float, more: float) -> None:
    """And never makes the best one slower."""
    maker = [predictor(cluster=_memory(NODE, size), samples=16) for size in (gib, gib + more)]
    allowed = Allowed(schedules=("1F1B",), context=1)
    small, large = (search(one, allowed, keep=1) for one in maker)
    assert large.fitting >= small.fitting
    assert large.best[0].step_s <= small.best[0].step_s


def test_every_candidate_uses_every_device_and_every_sample() -> None:
    """Legal plans only, each once."""
    maker = predictor(MIXTURE)
    found = list(candidates(maker.workload, CLUSTER, Allowed()))
    assert len(found) == len(set(found))
    for plan in found:
        assert plan.layout.world_size == CLUSTER.devices
        assert plan.global_samples == 64
        assert MIXTURE.experts % plan.layout.expert == 0


def test_a_size_that_is_asked_for_is_kept() -> None:
    """`Allowed` fixes axes."""
    found = list(layouts(predictor().workload, CLUSTER, Allowed(tensor=4, pipeline=2)))
    assert found
    assert all(layout.tensor == 4 and layout.pipeline == 2 for layout in found)


@pytest.mark.stress
def test_a_plan_for_405b_on_16384_devices_takes_little_work() -> None:
    """With two schedules: what is common to plans is computed once. The best plan is one that the field would
    recognise."""
    profile, allowed = cProfile.Profile(), Allowed(schedules=("1F1B", "Interleaved1F1B"))
    found = profile.runcall(search, llama_405b_predictor(), allowed)
    calls = pstats.Stats(profile).total_calls  # pyright: ignore[reportAttributeAccessIssue]
    assert calls < CALLS_A_PLAN * found.considered, f"{calls / found.considered:.0f} calls a plan"
    assert found.best[0].mfu > 0.4
    assert found.best[0].plan.layout.tensor > 1


def test_a_model_that_is_too_large_names_what_binds_and_what_would_do() -> None:
    """One sentence: the smallest plan, its largest item, the smallest cluster."""
    maker = predictor(LARGE, known_cluster("dgx-h100", 1), samples=16, sequence=8192)
    with pytest.raises(LayoutError) as caught:
        search(maker)
    message = str(caught.value)
    assert "\n" not in message
    assert "nothing fits on dgx-h100" in message
    assert "a device has 80.0" in message
    assert "nodes of it would do" in message


def test_a_batch_that_no_layout_divides_is_said() -> None:
    """Seven samples on 32 devices with data parallelism alone."""
    with pytest.raises(LayoutError, match="global batch of 7"):
        search(predictor(samples=7), Allowed(tensor=1, pipeline=1, context=1))


def test_why_not_prices_the_other_plan() -> None:
    """The best plan with tensor=8, item by item against the best."""
    maker = predictor(cluster=NODE, samples=16)
    best = search(maker, keep=1).best[0]
    said = why_not(maker, "tensor=8", best, allowed=Allowed())
    assert "tensor=8" in said
    assert "%" in said
    assert "tensor:" in said


@pytest.mark.parametrize(
    ("text", "word"), [("tensor=3", "16 heads"), ("pipeline=3", "layers"), ("microbatch=7", "samples")]
)
def test_why_not_names_the_rule_that_is_broken(text: str, word: str) -> None:
    """A plan that is not legal has no price."""
    maker = predictor(cluster=NODE, samples=16)
    best = search(maker, keep=1).best[0]
    assert word in why_not(maker, text, best, allowed=Allowed())


@pytest.mark.parametrize("text", ["tensr=2", "tensor", "tensor=two"])
def test_a_condition_that_is_none_is_refused(text: str) -> None:
    """With the names that there are."""
    with pytest.raises(UsageError):
        condition(text, Allowed())


def test_what_would_help_is_ranked() -> None:
    """Fastest first; full recomputation frees memory and costs time."""
    maker = predictor(cluster=NODE, samples=16)
    best = search(maker, keep=1).best[0]
    changes = helps(maker, best)
    assert [change.step_s for change in changes] == sorted(change.step_s for change in changes)
    full = next(change for change in changes if "full" in change.what)
    assert full.step_s > best.step_s
    assert full.memory_bytes < best.memory_bytes


def test_a_change_is_a_sentence_where_it_helps() -> None:
    """What is freed, and for how much; what only costs, or does not fit, has none."""
    best = search(predictor(cluster=NODE, samples=16), keep=1).best[0]
    freed, slower = best.memory_bytes - 5.2 * 2**30, 1.18 * best.step_s
    frees = Change(what="memory.recompute = full", step_s=slower, memory_bytes=freed, fits=True)
    assert help_sentence(frees, best) == "memory.recompute = full frees 5.20 GiB for +18.0 % step time"
    faster = Change(what="links", step_s=0.9 * best.step_s, memory_bytes=best.memory_bytes, fits=True)
    assert help_sentence(faster, best) == "links takes 10.0 % off the step"
    assert help_sentence(replace(faster, fits=False), best) is None
    assert help_sentence(replace(faster, step_s=slower), best) is None


def test_the_model_of_the_tests_fits_where_it_should() -> None:
    """A small model on one node has a plan without any sharding."""
    found = search(predictor(MODEL, NODE, samples=8), Allowed(tensor=1, pipeline=1), keep=1000)
    assert any(one.plan.layout.replicate == 8 and one.plan.zero == 0 for one in found.best)
