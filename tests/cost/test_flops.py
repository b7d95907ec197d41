"""Operation counts against published utilisations and formulas."""

from __future__ import annotations

import pytest

from shoal.cost.transformer import attention_flops, gpt, layer_flops, model_flops

SEQUENCE, VOCABULARY, PEAK = 2048, 51200, 312e12
POINTS = 0.25
"""Percentage points: the table's times have three digits."""


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "batch", "gpus", "seconds", "mfu"),
    [
        (48, 6144, 64, 4, 8, 1.10, 41.5),
        (96, 12288, 96, 64, 64, 13.75, 51.4),
        (105, 20480, 128, 280, 280, 37.83, 56.0),
        (128, 25600, 160, 512, 512, 71.49, 56.3),
    ],
)
def test_utilisations_of_korthikanti_follow_from_its_times(
    layers: int, hidden: int, heads: int, batch: int, gpus: int, seconds: float, mfu: float
) -> None:
    """Table 5 of arXiv:2205.05198, whose convention counts the whole attention square."""
    model = gpt(layers, hidden, heads, vocabulary=VOCABULARY)
    flops = model_flops(model, batch, SEQUENCE, convention="full")
    assert 100 * flops / (seconds * gpus * PEAK) == pytest.approx(mfu, abs=POINTS)


def test_the_closed_form_of_a_gpt() -> None:
    """72 B L s h^2 (1 + s/6h + V/12Lh), exactly."""
    layers, hidden, batch = 24, 2048, 8
    model = gpt(layers, hidden, 16, vocabulary=VOCABULARY)
    form = 72 * batch * layers * SEQUENCE * hidden**2
    form *= 1 + SEQUENCE / (6 * hidden) + VOCABULARY / (12 * layers * hidden)
    assert model_flops(model, batch, SEQUENCE, convention="full") == pytest.approx(form, rel=1e-12)


def test_causal_counts_half_of_the_square_and_nothing_else() -> None:
    """The conventions differ by half of attention."""
    model = gpt(2, 512, 8)
    full, causal = (layer_flops(model, 3, 256, convention=c) for c in ("full", "causal"))
    assert full - causal == attention_flops(model, 3, 256, convention="causal")
