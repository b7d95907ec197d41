"""What single codecs promise beyond what holds for all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.codec.config import BlockwiseConfig, SignConfig, TopKConfig
from shoal.codec.quantise import Blockwise, Sign, pack_digits, packed_bytes, per_byte, unpack_digits
from shoal.codec.top_k import SAMPLE, TopK, largest
from tests.codec.every import codec_of

ROUNDING = 1e-6
"""Of a float32 scale, relative."""


@settings(deadline=None)
@given(numel=st.integers(0, 200), base=st.sampled_from([2, 3, 4, 16, 128]), seed=st.integers(0, 100))
def test_digits_come_out_as_they_went_in(numel: int, base: int, seed: int) -> None:
    """In as few bytes as digits of a base allow."""
    digits = torch.randint(0, base, (numel,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = pack_digits(digits, base)
    assert packed.numel() == packed_bytes(numel, base)
    assert base ** per_byte(base) <= 256 < base ** (per_byte(base) + 1)
    assert torch.equal(unpack_digits(packed, numel, base), digits)


@pytest.mark.parametrize("bits", [8, 4])
def test_integers_are_off_by_half_a_step_at_most(bits: int) -> None:
    """|x - y| <= max |x| / (2 L), in each block by its own largest number."""
    codec, levels = Blockwise(BlockwiseConfig(bits=bits, block=32)), (1 << (bits - 1)) - 1
    x = torch.randn(320, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 320)
    error = (x - codec.decode(codec.encode(x), 320)).view(-1, 32).abs().amax(1)
    step = x.view(-1, 32).abs().amax(1) / levels
    assert bool((error <= step * (0.5 + levels * ROUNDING)).all())


def test_one_bit_keeps_signs_and_the_mean_magnitude() -> None:
    """In every block, the last one included."""
    codec, x = Sign(SignConfig(block=16)), torch.randn(40, generator=torch.Generator().manual_seed(1))
    y = codec.decode(codec.encode(x), 40)
    assert torch.equal(y.sign(), x.sign())
    for ours, theirs in zip(y.split(16), x.split(16), strict=True):
        assert ours.abs() == pytest.approx(theirs.abs().mean().expand_as(theirs), rel=ROUNDING)


@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.3])
@pytest.mark.parametrize("zeros", [0.0, 0.9995])
def test_an_estimated_threshold_changes_nothing(fraction: float, zeros: float) -> None:
    """The numbers sent are the k largest of all, also where most are zero and the estimate says nothing."""
    numel, generator = 9 * SAMPLE + 11, torch.Generator().manual_seed(2)
    x = torch.randn(numel, generator=generator) * (torch.rand(numel, generator=generator) >= zeros)
    codec = TopK(TopKConfig(fraction=fraction))
    kept = codec.kept(numel)
    sent = codec.decode(codec.encode(x), numel)
    assert torch.equal(sent.abs().sort(descending=True).values[:kept], x.abs().sort(descending=True).values[:kept])
    assert torch.equal(sent[sent != 0], x[sent != 0])


def test_a_threshold_that_is_too_high_is_not_trusted() -> None:
    """The sample sees only large numbers: too few exceed the threshold, and all are looked at."""
    magnitudes = torch.rand(16 * SAMPLE, generator=torch.Generator().manual_seed(3))
    magnitudes[::16] += 10  # the sample's places
    count = SAMPLE + 100
    found = largest(magnitudes, count)
    assert torch.equal(found, magnitudes.topk(count).indices.sort().values)


def test_random_places_cover_everything() -> None:
    """Every place is drawn under some key, and each key draws one place in every run."""
    codec, seen = codec_of("random_k"), torch.zeros(30, dtype=torch.bool)
    for key in range(200):
        drawn = codec.decode(codec.encode(torch.ones(30), key=key), 30, key=key) != 0
        assert [int(run.sum()) for run in drawn.split(4)] == [1] * 8
        seen |= drawn
    assert seen.all()


def test_feedback_that_would_grow_is_refused() -> None:
    """The sentence names the largest block that works."""
    with pytest.raises(ValueError, match="set block to 195 or less"):
        BlockwiseConfig(bits=4, rounding="stochastic")
    BlockwiseConfig(bits=4, rounding="stochastic", block=195)
    BlockwiseConfig(bits=4, rounding="stochastic", feedback=False)
