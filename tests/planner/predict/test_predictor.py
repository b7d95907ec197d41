"""Physics of a prediction: what may never happen, and what it is where the network is perfect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cost.operators import head_seconds, layer_seconds
from shoal.cost.plan import Plan
from shoal.cost.transformer import gpt
from shoal.planner.predict.layer import share_of
from shoal.planner.predict.predictor import Predictor
from shoal.planner.predict.stack import MODERN
from shoal.planner.predict.workload import ITEMS, Constants
from shoal.planner.simulate.work import StepWork, work_of
from shoal.topology.cluster import Cluster
from shoal.topology.layout import Layout
from tests.planner.jobs import CLUSTER, LARGE, MIXTURE, MODEL, plans, predictor

ROUNDING = 1e-9
EXAMPLES = 40


def _with_link(cluster: Cluster, name: str, **keys: Any) -> Cluster:
    link = msgspec.structs.replace(getattr(cluster.machine, name), **keys)
    return msgspec.structs.replace(cluster, machine=msgspec.structs.replace(cluster.machine, **{name: link}))


@settings(max_examples=EXAMPLES)
@given(plan=plans(), link=st.sampled_from(["scale_up", "scale_out"]))
def test_half_the_bandwidth_is_never_faster(plan: Plan, link: str) -> None:
    """Nor is twice the latency."""
    base = predictor().bill(plan).total
    rate = getattr(CLUSTER.machine, link).gb_s
    slow = predictor(cluster=_with_link(CLUSTER, link, gb_s=rate / 2)).bill(plan).total
    late = predictor(cluster=_with_link(CLUSTER, link, latency_us=100)).bill(plan).total
    assert slow >= base * (1 - ROUNDING)
    assert late >= base * (1 - ROUNDING)


@settings(max_examples=EXAMPLES)
@given(plan=plans(), key=st.sampled_from(["memory_gb_s", "matmul_efficiency"]))
def test_a_slower_device_is_never_faster(plan: Plan, key: str) -> None:
    """Half the memory's rate, or half the arithmetic."""
    device = msgspec.structs.replace(CLUSTER.device, **{key: getattr(CLUSTER.device, key) / 2})
    machine = msgspec.structs.replace(CLUSTER.machine, device=device)
    slow = predictor(cluster=msgspec.structs.replace(CLUSTER, machine=machine)).bill(plan).total
    assert slow >= predictor().bill(plan).total * (1 - ROUNDING)


@settings(max_examples=EXAMPLES)
@given(plan=plans())
def test_the_bill_is_all_of_the_step(plan: Plan) -> None:
    """Known items, none negative, and they add up."""
    found = predictor().predict(plan)
    assert set(found.bill.seconds) <= set(ITEMS)
    assert all(value >= 0 for value in found.bill.seconds.values())
    assert found.step_s == pytest.approx(sum(found.bill.seconds.values()))
    assert 0 < found.mfu < 1


@settings(max_examples=EXAMPLES)
@given(plan=plans())
def test_memory_is_itemised_and_shrinks_under_zero(plan: Plan) -> None:
    """A higher ZeRO stage never holds more weights, gradients and optimizer state."""
    sums = []
    for zero in (0, 1, 2, 3):
        one = predictor().footprint(replace(plan, zero=zero), 0)
        sums.append(one.weights + one.gradients + one.optimizer)
        assert one.total == pytest.approx(sum(one.items().values()))
    assert sums == sorted(sums, reverse=True)


@settings(max_examples=EXAMPLES)
@given(plan=plans())
def test_recomputation_buys_memory_with_time(plan: Plan) -> None:
    """Never faster, and never more activations held."""
    none, full = (replace(plan, recompute=kind) for kind in ("none", "full"))
    assert predictor().bill(full).total >= predictor().bill(none).total
    assert predictor().footprint(full, 0).activations <= predictor().footprint(none, 0).activations


def test_a_perfect_network_and_no_bubble_give_the_roofline() -> None:
    """No latency, no start, no end of bandwidth, a host that takes no time: operators and the optimizer are left."""
    up = _with_link(CLUSTER, "scale_up", gb_s=20_000, efficiency=1, latency_us=0)
    cluster = _with_link(up, "scale_out", gb_s=20_000, efficiency=1, latency_us=0)
    cluster = msgspec.structs.replace(cluster, machine=msgspec.structs.replace(cluster.machine, start_us=0))
    constants = Constants(dispatch_s=0, overlap_slowdown=0, optimizer_start_s=0)
    plan = Plan(layout=Layout(replicate=32), microbatch=2, microbatches=1)
    perfect = predictor(cluster=cluster, constants=constants)
    share = share_of(2048, plan, perfect.stack)
    layer = layer_seconds(MODEL, share, perfect.machine.rates)
    roofline = MODEL.layers * (layer.forward + layer.backward) + sum(head_seconds(MODEL, share, perfect.machine.rates))
    bill = perfect.bill(plan)
    assert bill.total - bill.seconds["optimizer"] == pytest.approx(roofline, rel=ROUNDING)


def test_the_optimizer_reads_its_share_of_the_state() -> None:
    """ZeRO-1 over 32 ranks updates a 32nd of the parameters."""
    constants = Constants(optimizer_start_s=0)
    whole = Plan(layout=Layout(replicate=32), microbatch=2, microbatches=1)
    shared = Plan(layout=Layout(shard=32), microbatch=2, microbatches=1, zero=1)
    one, many = (predictor(constants=constants).bill(plan).seconds["optimizer"] for plan in (whole, shared))
    assert one == pytest.approx(32 * many)


def test_experts_that_are_spread_out_cost_exchanges_and_save_memory() -> None:
    """One rank with all experts exchanges nothing; eight ranks hold an eighth each."""
    near = Plan(layout=Layout(shard=32), microbatch=2, microbatches=1, zero=1)
    spread = Plan(layout=Layout(shard=32, expert=8), microbatch=2, microbatches=1, zero=1)
    maker = predictor(MIXTURE)
    assert maker.bill(near).seconds["expert"] == 0
    assert maker.bill(spread).seconds["expert"] > 0
    assert maker.footprint(spread, 0).weights < maker.footprint(near, 0).weights / 4


def test_a_pipeline_that_is_twice_as_fine_idles_half_as_long() -> None:
    """Interleaving divides the bubble by v, transfers aside."""
    plain = Plan(layout=Layout(pipeline=4, tensor=8), microbatch=1, microbatches=64, sequence_parallel=True)
    finer = replace(plain, schedule="Interleaved1F1B", virtual_stages=2)
    maker = predictor()
    ratio = maker.bill(finer).seconds["bubble"] / maker.bill(plain).seconds["bubble"]
    assert 0.5 <= ratio < 0.75


def test_405b_on_llamas_own_layout_is_near_the_published_rate() -> None:
    """TP8 PP16 on 8,192 devices, 2,048 samples of 8,192 tokens: 43 % MFU (arXiv:2407.21783, table 4)."""
    cluster = msgspec.structs.replace(CLUSTER, nodes=1024)
    model = replace(LARGE, layers=126, hidden=16384, heads=128, feed_forward=53248)
    plan = Plan(
        layout=Layout(shard=64, pipeline=16, tensor=8),
        microbatch=1,
        microbatches=32,
        schedule="Interleaved1F1B",
        virtual_stages=4,
        zero=1,
        sequence_parallel=True,
    )
    found = predictor(model, cluster, samples=2048, sequence=8192).predict(plan)
    assert 0.40 < found.mfu < 0.52


def test_gpt_is_not_llama() -> None:
    """Sizes matter: a model with twice the layers takes longer than one without."""
    plan = Plan(layout=Layout(replicate=32), microbatch=2, microbatches=1)
    small, large = (Predictor.bill(predictor(gpt(n, 1024, 16)), plan).total for n in (8, 16))
    assert large > 1.5 * small


BALANCED = replace(MODERN, name="balanced", balances_stages=True)


def test_a_balanced_cut_makes_room_for_the_head() -> None:
    """A vocabulary worth several layers: the last of four stages gives layers away, and the step gets shorter."""
    model = replace(LARGE, vocabulary=512_000, layers=16)
    plan = Plan(layout=Layout(pipeline=4, tensor=8), microbatch=1, microbatches=64)
    even, balanced = (predictor(model, stack=stack) for stack in (MODERN, BALANCED))
    assert balanced.bill(plan).total < even.bill(plan).total
    assert balanced.footprint(plan, 0).weights > even.footprint(plan, 0).weights


def rank_seconds(work: StepWork, stages: Sequence[int], microbatches: int) -> float:
    """Seconds that a rank with these stages computes in a step, the optimizer left out."""
    each = (work.stages[stage] for stage in stages)
    return microbatches * sum(stage.forward_s + stage.input_s + stage.weight_s for stage in each)


@settings(max_examples=EXAMPLES)
@given(vocabulary=st.sampled_from([1000, 32_000, 256_000]), layers=st.integers(6, 24), virtual=st.sampled_from([1, 2]))
def test_the_fullest_rank_is_the_one_that_the_simulator_sees(vocabulary: int, layers: int, virtual: int) -> None:
    """Seconds of layers, head and loss: those of the slowest simulated pipeline rank."""
    model = replace(MODEL, vocabulary=vocabulary, layers=layers)
    schedule = "Interleaved1F1B" if virtual > 1 else "1F1B"
    layout = Layout(pipeline=2, tensor=8, shard=2)
    plan = Plan(layout=layout, microbatch=1, microbatches=32, schedule=schedule, virtual_stages=virtual, zero=1)
    maker = predictor(model, stack=BALANCED)
    stage, layer = maker.stage(plan), maker.layer(plan)
    closed = stage.layers * sum(layer.items.values()) + stage.head * sum(layer.head.values())
    work = work_of(plan, maker)
    ranks = [rank_seconds(work, range(rank, 2 * virtual, 2), 1) for rank in range(2)]
    assert closed == pytest.approx(max(ranks), rel=ROUNDING)


def test_tensor_ranks_divide_the_tokens_of_a_mixture() -> None:
    """Routing, experts and exchanges: eight tensor ranks with experts over all of them do an eighth each of what one
    rank does with the same tokens."""
    wide = replace(MIXTURE, hidden=4096, heads=32, kv_heads=8, head_size=128, feed_forward=4096)
    maker = predictor(wide)
    split, whole = (
        Plan(layout=Layout(shard=32 // tensor, tensor=tensor, expert=8), microbatch=4, microbatches=1, zero=1)
        for tensor in (8, 1)
    )
    ratio = maker.layer(split).items["expert"] / maker.layer(whole).items["expert"]
    assert 1 / 8 <= ratio < 0.3  # an eighth of the bytes, and as many starts of collectives
    assert share_of(2048, split, maker.stack).routed_tokens == 4 * 2048 // 8


def test_sorting_tokens_by_expert_costs_memory_passes() -> None:
    """More experts for each token, more copies to sort; experts on other ranks, twice as many."""
    plan = Plan(layout=Layout(shard=32), microbatch=2, microbatches=1, zero=1)
    times = [
        predictor(replace(MIXTURE, experts_per_token=count)).layer(plan).items["memory passes"] for count in (1, 2, 4)
    ]
    assert times == sorted(times)
    spread = replace(plan, layout=Layout(shard=32, expert=8))
    maker = predictor(MIXTURE)
    assert maker.layer(spread).items["memory passes"] > maker.layer(plan).items["memory passes"]
