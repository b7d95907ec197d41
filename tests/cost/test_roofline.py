"""Operators on a device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cost.matmul import Matmul, Rates, matmul_s, pass_s

RATES = Rates(matmul_flops_s=250e12, peak_flops_s=312e12, memory_bytes_s=1.6e12, units=108, kernel_s=4e-6)
SIZES = st.integers(1, 1 << 14)


@given(rows=SIZES, columns=SIZES, inner=SIZES)
def test_nothing_is_faster_than_its_arithmetic_and_its_traffic(rows: int, columns: int, inner: int) -> None:
    """The roofline is a lower bound."""
    product = Matmul(rows, columns, inner)
    seconds = matmul_s(product, RATES, element_bytes=2)
    assert seconds >= product.flops / RATES.matmul_flops_s
    assert seconds >= product.numbers * 2 / RATES.memory_bytes_s


def test_a_large_product_nears_the_best_rate() -> None:
    """Waves and prologue cost a few per cent at 16384."""
    product = Matmul(16384, 16384, 16384)
    assert matmul_s(product, RATES, element_bytes=2) < 1.05 * product.flops / RATES.matmul_flops_s


def test_a_last_wave_that_is_half_empty_costs_as_much_as_a_full_one() -> None:
    """109 large tiles on 108 units take two waves; smaller tiles, which then win, run at a lower share of the rate."""
    full = matmul_s(Matmul(256 * 108, 128, 4096), RATES, element_bytes=2)
    one_more = matmul_s(Matmul(256 * 108 + 256, 128, 4096), RATES, element_bytes=2)
    assert one_more > 1.3 * full


def test_gradients_do_the_work_of_the_product() -> None:
    """Each of the two has as many operations as the forward."""
    product = Matmul(512, 1024, 256, 3)
    assert product.input_gradient().flops == product.weight_gradient().flops == product.flops


def test_a_pass_takes_its_bytes_and_a_launch() -> None:
    """1.6 GB at 1.6 TB/s."""
    assert pass_s(1.6e9, RATES) == pytest.approx(1e-3 + 4e-6)
