"""Predictions from measured operators: ranks share cores, and who waits leaves his to others."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from shoal.cost.footprint import FLOAT32
from shoal.cost.matmul import Matmul
from shoal.cost.operators import Share
from shoal.cost.plan import Plan
from shoal.cost.prices import Heads
from shoal.cost.transformer import Transformer
from shoal.errors import ConfigError
from shoal.planner.predict.measured import (
    AT_THE_END,
    HEAD_SUMS,
    ContextKind,
    Measured,
    exchange,
    measured_of,
    meetings,
    waits_of,
)
from shoal.planner.predict.predictor import Predictor, Workload
from shoal.planner.predict.stack import Stack
from shoal.planner.predict.workload import Constants, calibrate_factor
from shoal.topology.calibration import Calibration, Crowd, Wait
from shoal.topology.cluster_file import cluster_from
from shoal.topology.layout import Layout
from tests.planner.calibrations import CORES, calibration

EXACT = 1e-9
MODEL = Transformer(
    layers=4, hidden=128, heads=4, kv_heads=4, head_size=32, feed_forward=384, vocabulary=256, gated=True
)
STACK = Stack(
    name="test", state=FLOAT32, dtype="float32", eager=True, overlap_tensor=False, overlap_data=False,
    overlap_pipeline=False, scatter_pipeline=False, fused_weight_gradient=False, context="ring",
)  # fmt: skip
NO_HOST = Constants(dispatch_s=0.0, kernel_s=0.0, optimizer_start_s=0.0)


def _predictor(ranks: int, measured: Measured | None = None) -> Predictor:
    table = {"nodes": 1, "machine": "cpu-2", "devices_per_node": ranks}
    return Predictor(
        Workload(model=MODEL, global_samples=16, sequence=128),
        cluster_from({"cluster": table}, file="test"),
        stack=STACK,
        constants=NO_HOST,
        measured=measured or measured_of(calibration(), cores=CORES, dtype="float32", backend="shm"),
    )


def _plan(microbatches: int = 1, **axes: int) -> Plan:
    layout = Layout(**axes)
    share = 16 // (layout.replicate * layout.shard)
    return Plan(layout=layout, microbatch=share // microbatches, microbatches=microbatches)


def test_more_ranks_than_cores_are_not_faster_than_as_many() -> None:
    """The work of a step is the same, and so are the cores; there is only more to say."""
    two = _predictor(2).bill(_plan(replicate=2)).total
    four = _predictor(4).bill(_plan(replicate=4)).total
    assert four >= two
    assert four < 2 * two


def test_a_rank_that_shares_its_core_takes_longer() -> None:
    """Twice as many ranks as cores: every operator takes twice as long."""
    measured = measured_of(calibration(), cores=CORES, dtype="float32", backend="shm")
    alone, crowded = (measured.prices(n).update(1e6, update_bytes=0) for n in (2, 4))
    assert crowded == pytest.approx(2 * alone, rel=EXACT)


def test_ranks_that_share_a_core_lose_what_was_measured_of_whole_steps() -> None:
    """15 % beyond the share of the cores, for more ranks than were measured too; a share is the least that is lost."""

    def crowded(*seconds: float) -> Measured:
        crowds = tuple(Crowd(ranks=ranks, step_s=step_s) for ranks, step_s in zip((2, 4), seconds, strict=False))
        known = msgspec.structs.replace(calibration(), crowds=crowds)
        return measured_of(known, cores=CORES, dtype="float32", backend="shm")

    base, lost, noisy = crowded(), crowded(1.0, 2.3), crowded(1.0, 1.7)
    assert [lost.crowding(ranks) for ranks in (1, 2, 4, 8)] == pytest.approx([1, 1, 2.3, 4.6], rel=EXACT)
    assert [noisy.crowding(ranks) for ranks in (2, 4)] == [1, 2]
    plain, slower = (_predictor(4, one).bill(_plan(replicate=4)).seconds for one in (base, lost))
    assert slower["matrix products"] == pytest.approx(1.15 * plain["matrix products"], rel=EXACT)
    assert slower["gradients"] == pytest.approx(plain["gradients"], rel=EXACT)  # measured with four ranks at work


def test_a_product_a_pass_and_attention_cost_what_their_operators_do() -> None:
    """At a size of the sweep each is the measured time; a batch is one launch, twice the arithmetic twice as long."""
    prices = measured_of(calibration(), cores=CORES, dtype="float32", backend="shm").prices(1)
    linear, attention = prices.sweeps["linear"].seconds(4096, 512, 32), prices.sweeps["attention"].seconds(64, 32, 32)
    assert prices.product(Matmul(4096, 512, 32), element_bytes=4) == pytest.approx(linear[0], rel=EXACT)
    assert prices.product(Matmul(1024, 512, 32, 4), element_bytes=4) == pytest.approx(linear[0], rel=EXACT)
    causal, shape = 2.0 * 64 * 32**2 * 32, Heads(64, 32, 32)
    assert prices.fused_attention(causal, shape, backward=False) == pytest.approx(attention[0], rel=EXACT)
    assert prices.fused_attention(2.5 * causal, shape, backward=True) == pytest.approx(attention[1], rel=EXACT)
    assert prices.fused_attention(2 * causal, shape, backward=False) == pytest.approx(2 * attention[0], rel=EXACT)
    assert prices.passed(2 * 4 * 4096 * 128) == pytest.approx(prices.copy(4096, 128, element_bytes=4), rel=EXACT)


def test_measured_crowds_go_before_computed_ones() -> None:
    """Where four at once were measured, nothing is scaled."""
    both = measured_of(calibration(ranks=(1, 2, 4)), cores=CORES, dtype="float32", backend="shm")
    scaled = measured_of(calibration(), cores=CORES, dtype="float32", backend="shm")
    assert both.prices(4).factor == 1
    assert scaled.prices(4).factor == 2
    first, second = (m.prices(4).update(1e6, update_bytes=0) for m in (both, scaled))
    assert first == pytest.approx(second, rel=0.2)  # the copies are the same, the launches differ


def test_a_bubble_costs_nothing_where_other_ranks_use_the_core() -> None:
    """A pipeline of four on two cores is bound by the work of all; one of two waits in its bubble."""
    crowded = _predictor(4).bill(_plan(8, pipeline=4)).seconds
    alone = _predictor(2).bill(_plan(8, pipeline=2)).seconds
    assert crowded["bubble"] == 0
    assert alone["bubble"] > 0


def test_one_microbatch_is_bound_by_its_path() -> None:
    """A single microbatch through four stages takes the stages one after the other, however few share a core."""
    measured = measured_of(calibration(), cores=CORES, dtype="float32", backend="shm")
    one = _predictor(4, measured).bill(_plan(1, pipeline=4)).seconds
    assert one["bubble"] > 0


def test_one_measured_step_gives_the_factor_that_predicts_it() -> None:
    """Bisection comes back to what it was made from."""
    base = measured_of(calibration(), cores=CORES, dtype="float32", backend="shm")
    plan = _plan(replicate=2)
    wanted = _predictor(2, base.calibrated(1.3)).bill(plan).total
    found = calibrate_factor(lambda x: _predictor(2, base.calibrated(x)).bill(plan).total, wanted)
    assert found == pytest.approx(1.3, rel=1e-6)


@pytest.mark.parametrize(
    "axes", [{"replicate": 4}, {"tensor": 4}, {"context": 4}, {"pipeline": 4}, {"pipeline": 2, "tensor": 2}]
)
def test_the_factor_is_on_every_second_that_was_measured(axes: dict[str, int]) -> None:
    """A machine that takes twice as long for everything takes twice as long for a step, waits and the host included."""
    known = msgspec.structs.replace(calibration(), waits=WAITS)
    base = measured_of(known, cores=CORES, dtype="float32", backend="shm")
    once, twice = (_predictor(4, one).bill(_plan(4, **axes)).total for one in (base, base.calibrated(2.0)))
    assert twice == pytest.approx(2 * once, rel=EXACT)


def test_a_ring_takes_attention_a_block_at_a_time() -> None:
    """Two context ranks: two calls of half the keys on the ring, half of one call with gathers."""
    prices = measured_of(calibration(), cores=CORES, dtype="float32", backend="shm").prices(1)
    share = Share(samples=16, sequence=512, context=2, element_bytes=4, stream_bytes=4, eager=True)
    whole, half = (prices.sweeps["attention"].seconds(64, tokens, MODEL.head_size)[0] for tokens in (512, 256))
    gathered, ring = (prices.layer(MODEL, one).attention_forward for one in (share, replace(share, ring=True)))
    assert gathered == pytest.approx(whole / 2, rel=EXACT)
    assert ring == pytest.approx(2 * half, rel=EXACT)


def test_a_calibration_without_operators_or_collectives_names_what_measures_them() -> None:
    """Each by its own command."""
    whole = calibration()
    for holes, command in (({"operators": ()}, "shoal bench products"), ({"collectives": ()}, "shoal bench comm")):
        parts = {"operators": whole.operators, "collectives": whole.collectives} | holes
        hollow = Calibration(machine="test", torch="2.13", memory_bytes_s=1e10, **parts)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=command):
            measured_of(hollow, cores=CORES, dtype="float32", backend="shm")


def test_collectives_of_another_dtype_or_of_several_hosts_price_nothing() -> None:
    """They may stand in the calibration, in any order."""
    whole = calibration()
    others = [msgspec.structs.replace(fit, beta_s=1.0, dtype="bfloat16") for fit in whole.collectives]
    others += [msgspec.structs.replace(fit, beta_s=1.0, hosts=2) for fit in whole.collectives]
    more = msgspec.structs.replace(whole, collectives=(*whole.collectives, *others))
    known, found = (measured_of(one, cores=CORES, dtype="float32", backend="shm") for one in (whole, more))
    assert found.fits == known.fits


def test_accumulation_costs_the_hosts_share_again() -> None:
    """For each microbatch what the host needs for one and its layers; more of the same work are never faster."""
    measured = measured_of(calibration(), cores=CORES, dtype="float32", backend="shm")
    each_s = measured.host.microbatch_s + MODEL.layers * measured.host.layer_s
    one, two, four = (_predictor(2, measured).bill(_plan(m, replicate=2)) for m in (1, 2, 4))
    assert each_s > 0
    assert two.seconds["launches"] - one.seconds["launches"] == pytest.approx(each_s)
    assert four.seconds["launches"] - two.seconds["launches"] == pytest.approx(2 * each_s)
    assert one.total < two.total < four.total


WAITS = (
    Wait(ranks=4, piece_s=1e-3, wait_s=2e-4),
    Wait(ranks=4, piece_s=1e-2, wait_s=4e-4),
    Wait(ranks=2, piece_s=1e-3, wait_s=1.1e-4),
)


def test_a_wait_is_the_measured_one_and_lies_between_those() -> None:
    """At the ends it stays; of the ranks that were measured, the next fewer count."""
    four = waits_of(WAITS, 6)
    assert [four.seconds(s) for s in (1e-4, 1e-3, 1e-2, 1.0)] == [2e-4, 2e-4, 4e-4, 4e-4]
    assert 2e-4 < four.seconds(3e-3) < 4e-4
    assert waits_of(WAITS, 3).seconds(1e-3) == 1.1e-4
    assert waits_of((), 4).seconds(1e-3) == 0


def test_ranks_that_share_layers_meet_in_each_of_them_and_replicas_at_the_end() -> None:
    """Sequence parallelism twice as often, recomputation once more forward; a single rank never."""
    layers = MODEL.layers
    assert meetings(_plan(), layers, None) == 0
    assert meetings(_plan(replicate=2), layers, None) == AT_THE_END
    split = meetings(_plan(tensor=2), layers, None) - HEAD_SUMS - AT_THE_END
    sliced = meetings(replace(_plan(tensor=2), sequence_parallel=True), layers, None) - HEAD_SUMS - AT_THE_END
    again = meetings(replace(_plan(tensor=2), recompute="full"), layers, None) - HEAD_SUMS - AT_THE_END
    assert (split, sliced, again) == (4 * layers, 8 * layers, 6 * layers)


def test_waiting_is_an_item_of_the_bill() -> None:
    """More where ranks meet more often; none where it was not measured."""
    known = msgspec.structs.replace(calibration(), waits=WAITS)
    measured = measured_of(known, cores=CORES, dtype="float32", backend="shm")
    replicas, tensor = (_predictor(4, measured).bill(plan).seconds for plan in (_plan(replicate=4), _plan(tensor=4)))
    assert 0 < replicas["waiting"] < tensor["waiting"]
    assert _predictor(4).bill(_plan(tensor=4)).seconds["waiting"] == 0


@pytest.mark.parametrize("kind", ["ring", "ulysses", "allgather"])
def test_context_ranks_pay_for_what_they_say(kind: ContextKind) -> None:
    """More bytes never cost less, and one rank says nothing."""
    measured = measured_of(calibration(), cores=CORES, dtype="float32", backend="shm")
    sizes = {"query_bytes": 1e6, "key_bytes": 2e6, "copy_bytes_s": 1e10}
    one = exchange(kind, measured.group(2, 2), **sizes)
    more = exchange(kind, measured.group(2, 2), **{**sizes, "key_bytes": 4e6})
    assert 0 < one.forward_s < more.forward_s
    assert 0 < one.backward_s < more.backward_s
    assert exchange(kind, measured.group(1, 2), **sizes).forward_s == 0
