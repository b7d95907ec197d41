"""Parameter counts against those that are published."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from shoal.cost.transformer import Latent, Transformer, gpt, llama, total_parameters

PUBLISHED = Path(__file__).parent.parent / "planner" / "published"
ROUNDED = 0.006
"""Papers give three digits."""
LAST_DIGIT = 0.05e9
"""The table gives tenths of a billion."""


def test_the_ten_models_of_sc21_have_their_published_sizes() -> None:
    """Table 1 of arXiv:2104.04473, 1.7 to 1,008 billion."""
    with open(PUBLISHED / "narayanan_sc21_table1.csv", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            model = gpt(int(row["layers"]), int(row["hidden"]), int(row["heads"]))
            assert total_parameters(model) == pytest.approx(float(row["params_B"]) * 1e9, abs=LAST_DIGIT)


@pytest.mark.parametrize(
    ("model", "published"),
    [
        (llama(32, 4096, 32, kv_heads=32, feed_forward=11008, vocabulary=32000), 6_738_415_616),
        (llama(32, 4096, 32, kv_heads=8, feed_forward=14336, vocabulary=128256), 8_030_261_248),
        (llama(80, 8192, 64, kv_heads=8, feed_forward=28672, vocabulary=128256), 70_553_706_496),
        (llama(126, 16384, 128, kv_heads=8, feed_forward=53248, vocabulary=128256), 405_853_388_800),
    ],
)
def test_llamas_are_exact(model: Transformer, published: int) -> None:
    """Llama 2 7B, Llama 3 8B, 70B and 405B: counts of their published weights, to the last parameter."""
    assert total_parameters(model) == published


def test_a_mixture_counts_all_experts() -> None:
    """Mixtral 8x7B (arXiv:2401.04088): 46.7 billion."""
    model = Transformer(
        layers=32, hidden=4096, heads=32, kv_heads=8, head_size=128, feed_forward=14336, vocabulary=32000,
        gated=True, tied=False, experts=8, experts_per_token=2,
    )  # fmt: skip
    assert total_parameters(model) == 46_702_792_704


def test_dense_layers_between_mixtures_are_counted() -> None:
    """DeepSeekMoE 16B (arXiv:2401.06066), whose first layer is dense: 16.4 billion."""
    model = Transformer(
        layers=28, hidden=2048, heads=16, kv_heads=16, head_size=128, feed_forward=1408, vocabulary=102400,
        gated=True, tied=False, experts=64, experts_per_token=6, shared_feed_forward=2 * 1408,
        dense_layers=1, dense_feed_forward=10944,
    )  # fmt: skip
    assert total_parameters(model) == pytest.approx(16.4e9, rel=ROUNDED)


def test_latent_attention_is_counted() -> None:
    """DeepSeek-V3 (arXiv:2412.19437): 671 billion."""
    model = Transformer(
        layers=61, hidden=7168, heads=128, kv_heads=128, head_size=128, feed_forward=2048, vocabulary=129280,
        gated=True, tied=False, experts=256, experts_per_token=8, shared_feed_forward=2048,
        dense_layers=3, dense_feed_forward=18432, latent=Latent(query=1536, keys=512, rotary=64),
    )  # fmt: skip
    assert total_parameters(model) == pytest.approx(671e9, rel=ROUNDED)
