"""Products in float8 on the roofline: faster where they are large, and paid for by casts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.cost.matmul import Matmul, Rates, float8_casts_s, float8_s, matmul_s
from shoal.cost.operators import Share, layer_seconds
from shoal.planner.predict.predictor import Predictor, Workload
from shoal.planner.predict.stack import MODERN
from shoal.topology.cluster_file import known_cluster
from tests.planner.jobs import MIXTURE, MODEL

RATES = Rates(
    matmul_flops_s=800e12, peak_flops_s=989e12, memory_bytes_s=2.7e12, units=132, kernel_s=4e-6, float8_flops_s=1600e12
)
LARGE = Matmul(16384, 16384, 16384)


def test_a_large_product_runs_at_the_float8_rate() -> None:
    """Twice as fast where arithmetic decides."""
    assert matmul_s(LARGE, RATES, element_bytes=2) == pytest.approx(2 * float8_s(LARGE, RATES), rel=1e-6)


def test_casts_move_what_they_read_and_write() -> None:
    """Of [2, 3] x [3, 5] in two bytes: 5 bytes for 6 + 15 numbers forward; those again backward, 5 for 10 of the
    gradient, and 2 each for 6 and 10 in the other order."""
    rates = replace(RATES, memory_bytes_s=1.0, kernel_s=0.0)
    forward, backward = float8_casts_s(Matmul(2, 5, 3), rates, element_bytes=2)
    assert forward == pytest.approx(5 * 21)
    assert backward == pytest.approx(5 * 31 + 2 * 16)


def test_attention_head_and_router_stay_as_they_are() -> None:
    """Only products of linear layers in blocks change; experts only where the stack says so."""
    for model in (MODEL, MIXTURE):
        plain = Share(samples=4, sequence=2048)
        kinds = {kind: layer_seconds(model, replace(plain, float8=kind), RATES) for kind in ("none", "dense", "all")}
        assert len({one.attention_forward + one.attention_backward for one in kinds.values()}) == 1
        assert kinds["dense"].matmul_forward < kinds["none"].matmul_forward
        assert (kinds["all"].matmul_forward < kinds["dense"].matmul_forward) == (model is MIXTURE)
        assert kinds["dense"].passes_backward > kinds["none"].passes_backward


def test_a_device_without_float8_has_no_price_for_it() -> None:
    """An A100: the sentence names what it states."""
    workload = Workload(model=MODEL, global_samples=64, sequence=2048)
    with pytest.raises(ValueError, match=r"no rate for float8.*bfloat16"):
        Predictor(workload, known_cluster("dgx-a100-80gb", 1), stack=replace(MODERN, float8="dense"))
