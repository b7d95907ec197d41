"""What codecs cost and save in a predicted step: closed forms, and the step that was measured at 100 Mbit/s."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.codec.config import (
    AutoConfig,
    BlockwiseConfig,
    CodecConfig,
    NoCodec,
    PowerSGDConfig,
    QSGDConfig,
    ShardCodecConfig,
    TopKConfig,
)
from shoal.codec.costs import Matrices, label, stated
from shoal.cost.plan import Plan
from shoal.cost.transformer import Transformer
from shoal.planner.predict.coding import gradient_sum
from shoal.planner.predict.predictor import Predictor, Workload
from shoal.planner.predict.stack import MODERN, Codecs, Stack
from shoal.planner.predict.workload import Constants
from shoal.planner.simulate.step import simulate_step
from shoal.planner.simulate.work import work_of
from shoal.planning.simulating import table_of
from shoal.topology.calibration import CodecTime
from shoal.topology.cluster import Cluster
from shoal.topology.cluster_file import cluster_from
from shoal.topology.layout import Layout

NUMBERS = 1 << 20
MATRICES = (Matrices(1024, 512, 2),)
RATE, MEMORY = 1e8, 10e9
"""Bytes per second of the link and of memory."""
PASS_S = 4 * NUMBERS / (0.8 * MEMORY)
CPU = Stack(name="test", state=replace(MODERN.state, wire=4, stream=4), overlap_data=False, overlap_network=True)
PAIR = Plan(layout=Layout(replicate=2), microbatch=1, microbatches=1)
MODEL = Transformer(
    layers=8, hidden=512, heads=8, kv_heads=8, head_size=64, feed_forward=2048, vocabulary=256, gated=False, tied=False
)


def cluster(*, nodes: int = 2, devices: int = 1, rate: float = RATE) -> Cluster:
    """Nodes joined by a link without latency."""
    return cluster_from(
        {
            "cluster": {"name": "n", "nodes": nodes, "machine": "cpu-2", "devices_per_node": devices, "start_us": 0},
            "scale_out": {"kind": "ethernet", "gb_s": rate / 1e9, "efficiency": 1.0, "latency_us": 0},
            "device": {
                "name": "core",
                "memory_gib": 8,
                "memory_gb_s": MEMORY / 1e9,
                "peak_tflops": {"float32": 0.08, "bfloat16": 0.08},
            },
        },
        file="test",
    )


def predictor(codec: CodecConfig, where: Cluster, *, stack: Stack = CPU, codecs: Codecs | None = None) -> Predictor:
    made = replace(stack, codecs=codecs or Codecs(gradients=codec, bucket_bytes=4.0 * NUMBERS))
    workload = Workload(model=MODEL, global_samples=4, sequence=128)
    return Predictor(workload, where, stack=made, constants=Constants())


@pytest.mark.parametrize("feedback", [True, False])
def test_a_linear_codec_is_summed_on_the_way(feedback: bool) -> None:
    """Two ranks: each payload in an all-reduce, 2 (n - 1) / n of its bytes; 1 + 4 passes, and 3 for the residual."""
    config = PowerSGDConfig(rank=4, feedback=feedback)
    machine = predictor(config, cluster()).machine
    found = gradient_sum(PAIR, machine, config, numbers=NUMBERS, matrices=MATRICES)
    sent = 4 * 4 * 2 * (1024 + 512)
    assert found.sent_bytes == sent
    assert found.wire_s == pytest.approx(sent / RATE)
    assert found.coding_s == pytest.approx((5 + 3 * feedback) * PASS_S)
    assert found.residual_bytes == 8 * NUMBERS * feedback


def test_few_payloads_are_gathered() -> None:
    """Two ranks, top-k: every rank sends its own payload once; 2 + 1 passes, and what adds, subtracts and writes."""
    config = TopKConfig()
    found = gradient_sum(PAIR, predictor(config, cluster()).machine, config, numbers=NUMBERS)
    (payload,) = stated(config, NUMBERS).payloads
    assert found.sent_bytes == payload
    assert found.wire_s == pytest.approx(payload / RATE)
    assert found.coding_s == pytest.approx((2 + (3 + 1 + 3) + 2 * (1 + 3) + 3) * PASS_S)


def test_long_payloads_take_two_shots() -> None:
    """Four ranks, 8 bits: parts go to their rank, and sums to all: 2 (n - 1) / n of a payload instead of n - 1."""
    config, plan = QSGDConfig(), Plan(layout=Layout(replicate=4), microbatch=1, microbatches=1)
    found = gradient_sum(plan, predictor(config, cluster(nodes=4)).machine, config, numbers=NUMBERS)
    (part,) = stated(config, NUMBERS // 4).payloads
    assert found.sent_bytes == 2 * 3 * part
    assert found.wire_s == pytest.approx(2 * 3 * part / RATE)
    assert found.coding_s == pytest.approx((1.25 + (1.25 + 3) + 1.25 / 4 + 1.25 + 2) * PASS_S)


def test_measured_seconds_take_the_place_of_stated_passes() -> None:
    """Per number, whatever the length that was measured."""
    config = BlockwiseConfig(feedback=False)
    times = (CodecTime(codec=label(config), numbers=1000, encode_s=1e-3, decode_s=2e-3),)
    one = predictor(config, cluster(), codecs=Codecs(gradients=config, bucket_bytes=4.0 * NUMBERS, times=times))
    found = gradient_sum(PAIR, one.machine, config, numbers=NUMBERS)
    assert found.coding_s == pytest.approx(NUMBERS * (1e-6 + 2 * 2e-6) + 9 * PASS_S)


def test_ranks_of_a_node_send_what_one_rank_would() -> None:
    """Two nodes of two ranks: the bytes between nodes are those of two nodes of one, and each rank codes half."""
    config, four = BlockwiseConfig(), Plan(layout=Layout(replicate=4), microbatch=1, microbatches=1)
    alone = gradient_sum(PAIR, predictor(config, cluster()).machine, config, numbers=NUMBERS)
    both = gradient_sum(four, predictor(config, cluster(devices=2)).machine, config, numbers=NUMBERS)
    assert both.sent_bytes == alone.sent_bytes
    assert both.wire_s > alone.wire_s  # and the sum inside the node
    assert both.coding_s == pytest.approx(alone.coding_s / 2)
    assert both.residual_bytes == alone.residual_bytes / 2


@pytest.mark.parametrize(("rate", "kind"), [(1e10, NoCodec), (1e7, PowerSGDConfig)])
def test_auto_is_what_costs_least(rate: float, kind: type[CodecConfig]) -> None:
    """None between fast hosts, PowerSGD between slow ones, and none inside a host, however slow."""
    one = predictor(AutoConfig(), cluster(rate=rate))
    assert isinstance(one.gradient_sum(PAIR).codec, kind)
    inside = predictor(AutoConfig(), cluster(nodes=1, devices=2))
    assert isinstance(inside.gradient_sum(PAIR).codec, NoCodec)
    steps = [predictor(each, cluster(rate=rate)).bill(PAIR).total for each in AutoConfig().codecs.values()]
    assert one.bill(PAIR).total <= min(*steps, predictor(NoCodec(), cluster(rate=rate)).bill(PAIR).total)


def test_residuals_are_memory() -> None:
    """Eight bytes a number with error feedback, none without; they are in the peak."""
    plain = predictor(NoCodec(), cluster()).predict(PAIR)
    coded = predictor(BlockwiseConfig(), cluster()).predict(PAIR)
    without = predictor(BlockwiseConfig(feedback=False), cluster()).predict(PAIR)
    assert coded.peak.residuals == 2 * plain.peak.weights * (4 / CPU.state.weight)
    assert coded.memory_bytes > plain.memory_bytes == without.memory_bytes


def test_the_simulator_has_the_same_seconds() -> None:
    """Where nothing overlaps, a simulated step is the predicted one: coding is in both."""
    stack = replace(CPU, overlap_network=False)
    for codec in (NoCodec(), PowerSGDConfig(), BlockwiseConfig()):
        one = predictor(codec, cluster(), stack=stack)
        played = simulate_step(table_of(PAIR), work_of(PAIR, one)).played
        assert played.makespan_s == pytest.approx(one.bill(PAIR).total, rel=0.02)
        assert (one.bill(PAIR).seconds["coding"] > 0) == (codec != NoCodec())


def test_pieces_of_zero_are_priced_by_their_bytes() -> None:
    """ZeRO-3 gathers weights in 8 bits and scatters gradients in 4, and pays for coding them."""
    plan = Plan(layout=Layout(shard=2), microbatch=1, microbatches=1, zero=3)
    bills = [
        predictor(NoCodec(), cluster(), codecs=Codecs(pieces=pieces)).bill(plan).seconds
        for pieces in (ShardCodecConfig(), ShardCodecConfig(weights="int8", gradients="int4"))
    ]
    assert bills[1]["gathers"] < bills[0]["gathers"] / 2
    assert bills[1]["coding"] > bills[0]["coding"] == 0


MEASURED_S = {"alone": 0.4735, "none": 8.873, "power_sgd": 0.6429}
MEASURED_BYTES = {"none": 102_580_084, "power_sgd": 1_296_318}
"""docs/benchmarks/compression.md, 100 Mbit/s: bytes of the interface, headers included."""
HEADERS = 0.06
NONE_ERROR, POWER_SGD_ERROR_S = 0.03, 0.1


def test_the_recorded_step_at_100_mbit_is_predicted() -> None:
    """25 M parameters, two hosts: bytes within what headers add, the wait without a codec within 3 %, and what PowerSGD
    adds to a step without communication within 0.1 s of the 0.17 s that were measured."""
    where = cluster(rate=12.5e6 * 1448 / 1538)  # what Ethernet's frames leave of the rate
    bills = {}
    for name, codec in {"none": NoCodec(), "power_sgd": PowerSGDConfig()}.items():
        one = predictor(codec, where, codecs=Codecs(gradients=codec, bucket_bytes=8 << 20))
        total = one.gradient_sum(PAIR)
        assert total.sent_bytes <= MEASURED_BYTES[name] <= total.sent_bytes * (1 + HEADERS)
        seconds = one.bill(PAIR).seconds
        computed = sum(value for item, value in seconds.items() if item not in ("gradients", "overlap", "coding"))
        bills[name] = sum(seconds.values()) - computed
    assert bills["none"] == pytest.approx(MEASURED_S["none"] - MEASURED_S["alone"], rel=NONE_ERROR)
    assert bills["power_sgd"] == pytest.approx(MEASURED_S["power_sgd"] - MEASURED_S["alone"], abs=POWER_SGD_ERROR_S)


def test_coded_activations_are_shorter_and_take_the_device() -> None:
    """Between two stages: a quarter of the bytes in 8 bits, but for the scales; four codings a microbatch."""
    plan = Plan(layout=Layout(pipeline=2), microbatch=1, microbatches=2, schedule="1F1B")
    stages = BlockwiseConfig(block=256, feedback=False)
    plain, coded = (
        predictor(NoCodec(), cluster(), stack=replace(CPU, overlap_pipeline=False), codecs=Codecs(stages=one))
        for one in (None, stages)
    )
    ratio = (1 + 4 / 256) / 4
    assert work_of(plan, coded).transfer.busy_s == pytest.approx(ratio * work_of(plan, plain).transfer.busy_s)
    bills = [one.bill(plan).seconds for one in (plain, coded)]
    assert bills[1]["transfers"] == pytest.approx(ratio * bills[0]["transfers"], rel=1e-3)
    passes_s = 4 * 128 * MODEL.hidden / (0.8 * MEMORY)
    assert bills[1]["coding"] == pytest.approx(4 * 2 * 1.25 * passes_s)
    assert bills[0]["coding"] == 0
