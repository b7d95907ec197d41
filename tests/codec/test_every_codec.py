"""What holds for every codec."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.codec.codec import ALIGNMENT_BYTES, TensorPlace, pack, unpack
from shoal.codec.config import ACPSGDConfig, CodecConfig, PowerSGDConfig
from shoal.config.check import implementation_of
from tests.codec.every import CONFIGS, codec_of

LENGTHS = st.sampled_from([0, 1, 2, 7, 8, 15, 16, 17, 33, 100, 257])
DRAWS = 1500
SIX_SIGMA = 6.0
"""A mean of `DRAWS` is further than this many standard errors from its expectation once in 5e8 numbers."""

every_codec = pytest.mark.parametrize("name", list(CONFIGS))


def vector(numel: int, seed: int) -> Tensor:
    """float64 `[numel]` that holds float32 numbers of a few magnitudes, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(numel, generator=generator) * torch.randint(0, 3, (numel,), generator=generator)
    return numbers.double()


def through(name: str, x: Tensor, key: int = 5) -> Tensor:
    """`x` as the others get it."""
    codec = codec_of(name)
    return codec.decode(codec.encode(x, key=key), x.numel(), key=key, dtype=torch.float64)


def test_every_table_is_tested() -> None:
    """A new codec is in the list, or this fails."""
    tables = {table for table in get_args(CodecConfig) if table.implemented_by}
    assert tables == {type(config) for config in CONFIGS.values()}


@every_codec
@settings(deadline=None, max_examples=30)
@given(numel=LENGTHS, seed=st.integers(0, 1000))
def test_what_is_sent_and_what_is_left_make_the_vector(name: str, numel: int, seed: int) -> None:
    """sent + residual == x, in float64 exactly, whatever the length."""
    x = vector(numel, seed)
    sent = through(name, x)
    residual = x - sent
    assert sent.shape == x.shape
    assert torch.equal(sent + residual, x)


@pytest.mark.parametrize("name", ["power_sgd", "acp_sgd"])
@pytest.mark.parametrize("round_number", [1, 2])
def test_so_do_those_of_low_rank_on_matrices(name: str, round_number: int) -> None:
    """Alone, sent + residual == x up to two roundings in float64, although both sums travel in float32."""
    places = [TensorPlace("a", 0, (12, 9)), TensorPlace("b", 108, (5,)), TensorPlace("c", 113, (4, 3, 5))]
    codec, x = codec_of(name).bound(places, key=1, rank=0, ranks=1), vector(173, 3)
    for number in range(round_number):
        codec.begin(number)
        left, total = x.clone(), torch.empty_like(x)
        for _ in codec.summing_into(left, total, key=5, residual=True):
            pass
    assert float((total + left - x).abs().max()) <= 4 * torch.finfo(torch.float64).eps * float(x.abs().max())
    assert float(left[:108].norm()) > 0.1 * float(x[:108].norm())


@every_codec
@settings(deadline=None, max_examples=30)
@given(numel=LENGTHS, seed=st.integers(0, 1000))
def test_bytes_are_those_that_were_announced(name: str, numel: int, seed: int) -> None:
    """A payload has the announced tensors, packs into `wire_bytes`, and comes out of the bytes as it went in."""
    codec, x = codec_of(name), vector(numel, seed).float()
    payload = codec.encode(x, key=seed)
    assert [(part.dtype, part.numel()) for part in payload] == [*codec.fields(numel)]
    packed = pack(codec, payload)
    assert packed.dtype == torch.uint8
    assert packed.numel() == codec.wire_bytes(numel)
    assert packed.numel() % ALIGNMENT_BYTES == 0
    row = torch.stack([packed, packed]).view(-1)  # the second of a row lies where it may
    for part, found in zip(payload, unpack(codec, row[packed.numel() :], numel), strict=True):
        assert torch.equal(part.view(torch.uint8), found.view(torch.uint8))


LOW_RANK = (PowerSGDConfig, ACPSGDConfig)
BY_VECTOR = [table for table in get_args(CodecConfig) if table.implemented_by and table not in LOW_RANK]
"""Those of low rank send vectors as they are."""


@pytest.mark.parametrize("table", BY_VECTOR)
def test_fewer_bytes_than_float32(table: Any) -> None:
    """By default at most half of them, and the scales."""
    assert implementation_of(table())(table()).wire_bytes(100_000) <= 201_000


@every_codec
def test_an_error_is_smaller_than_the_vector(name: str) -> None:
    """|x - y| < |x| for biased codecs, so that error feedback converges; the mean of many y is x for unbiased ones."""
    codec, x = codec_of(name), vector(257, 1)
    if codec.unbiased:
        draws = torch.stack([through(name, x, key) for key in range(DRAWS)])
        error = (draws.mean(0) - x).abs()
        spread = draws.std(0) / math.sqrt(DRAWS)
        # where all draws agree, they agree with x up to the rounding of the scale to float32
        assert bool((error <= SIX_SIGMA * spread + 1e-6 * x.abs().max()).all())
    else:
        assert float((x - through(name, x)).norm()) < float(x.norm())


@every_codec
def test_zero_is_sent_as_zero(name: str) -> None:
    """Nothing is made of nothing, not even by noise."""
    assert not through(name, torch.zeros(100, dtype=torch.float64)).any()


@every_codec
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows(name: str, bad: float) -> None:
    """One number that is not finite, wherever it stands, makes the decoded vector not finite."""
    for place in (0, 50, 99):
        x = torch.ones(100)
        x[place] = bad
        assert not through(name, x).isfinite().all()


@every_codec
def test_a_stride_changes_nothing(name: str) -> None:
    """A tensor that is not contiguous is encoded as its copy that is; a matrix row by row."""
    codec, x = codec_of(name), vector(90, 2).float().view(9, 10)
    for view in (x.T, x[:, ::2], x):
        straight = codec.encode(view.contiguous().view(-1), key=3)
        assert all(torch.equal(a, b) for a, b in zip(codec.encode(view, key=3), straight, strict=True))


@every_codec
def test_the_input_stays(name: str) -> None:
    """Encoding writes nothing into the vector."""
    x = vector(100, 3).float()
    before = x.clone()
    codec_of(name).encode(x)
    assert torch.equal(x, before)


@every_codec
def test_same_key_same_bits(name: str) -> None:
    """Encoding is a function of vector and key: a run can be resumed bit by bit."""
    codec, x = codec_of(name), vector(100, 4).float()
    assert all(torch.equal(a, b) for a, b in zip(codec.encode(x, key=9), codec.encode(x, key=9), strict=True))


@pytest.mark.parametrize("name", ["random_k", "random_k unbiased"])
def test_sums_of_linear_payloads_decode_to_sums(name: str) -> None:
    """On integers, whose float32 sums are exact."""
    codec, key = codec_of(name), 7
    vectors = [torch.randint(-50, 50, (100,), generator=torch.Generator().manual_seed(s)).float() for s in range(3)]
    payloads = [codec.encode(x, key=key) for x in vectors]
    summed = tuple(torch.stack(parts).sum(0) for parts in zip(*payloads, strict=True))
    assert torch.equal(codec.decode(summed, 100, key=key), sum(codec.decode(p, 100, key=key) for p in payloads))


@every_codec
def test_sixteen_bits_go_in(name: str) -> None:
    """A bfloat16 vector is encoded as the float32 vector of its numbers."""
    x = vector(100, 5).bfloat16()
    assert torch.equal(through(name, x), through(name, x.float()))


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    """In a sentence that names the dtype."""
    with pytest.raises(ValueError, match=str(dtype)):
        codec_of("int8").encode(torch.zeros(3, dtype=dtype))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sampled_threshold_hides_nothing_that_is_not_finite(dtype: torch.dtype, bad: float) -> None:
    """In vectors that are long enough for one, with and without the kernels in C; also where the threshold lets through
    twice as many numbers as are sent, of which every second one is left out."""
    from shoal.codec.config import TopKConfig
    from shoal.codec.top_k import TopK

    numel = 1 << 20
    codec, more = TopK(TopKConfig(fraction=0.01, selection="sampled")), torch.arange(numel) % 50 == 1
    sampled = torch.arange(numel) % 16 == 0
    for x in (torch.randn(numel, dtype=dtype), torch.where(more & ~sampled, 9.0, torch.randn(numel, dtype=dtype))):
        for place in (7, 51, 101, numel - 1):
            broken = x.clone()
            broken[place] = bad
            assert not codec.decode(codec.encode(broken), numel, dtype=dtype).isfinite().all()
