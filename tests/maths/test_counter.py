"""Counter-based random numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.maths.counter import bits, indices, key_of, normal, uniform

DRAWS = 200_000
# The Kolmogorov-Smirnov distance of n draws exceeds 1.95/sqrt(n) once in a thousand tries; the seeds are fixed.
KS_BOUND = 1.95 / math.sqrt(DRAWS)
# A mean or correlation of n draws has standard deviation 1/sqrt(n) or less: five of them.
FIVE_SIGMA = 5 / math.sqrt(DRAWS)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """A shape and a box inside it, of 0 to 4 dimensions, empty boxes included."""
    shape = draw(st.lists(st.integers(1, 9), max_size=4))
    offsets = [draw(st.integers(0, size)) for size in shape]
    lengths = [draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True)]
    return shape, offsets, lengths


def cut(whole: torch.Tensor, offsets: list[int], lengths: list[int]) -> torch.Tensor:
    return whole[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]


def unsigned(words: torch.Tensor) -> list[int]:
    return [word % 2**64 for word in words.tolist()]


def ks_distance(draws: torch.Tensor, cdf: torch.Tensor) -> float:
    steps = torch.arange(1, draws.numel() + 1, dtype=torch.float64) / draws.numel()
    return (cdf.sort().values - steps).abs().max().item()


def test_bits_are_the_published_splitmix64_stream() -> None:
    """Counters 0, 1, 2, ... under the key 1234567 give the generator's known first outputs."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert unsigned(bits(1234567, torch.arange(5))) == known


@given(key=st.integers(0, 2**64 - 1), counter=st.integers(0, 2**62))
def test_bits_agree_with_unbounded_integer_arithmetic(key: int, counter: int) -> None:
    """Wrapping int64 computes what the paper's recurrence gives in exact arithmetic modulo 2^64."""
    z = (key + (counter + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    assert unsigned(bits(key, torch.tensor([counter]))) == [z ^ (z >> 31)]


@given(box=boxes())
def test_indices_of_a_box_are_the_slice_of_a_count(box: tuple[list[int], list[int], list[int]]) -> None:
    """`indices` of a box equals the same slice of 0, 1, 2, ... laid out in the whole shape."""
    shape, offsets, lengths = box
    whole = torch.arange(math.prod(shape)).reshape(shape)
    assert torch.equal(indices(shape, offsets, lengths), cut(whole, offsets, lengths))


@settings(max_examples=60)
@given(box=boxes(), dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), seed=st.integers(0, 2**63))
def test_a_box_drawn_alone_is_bitwise_the_slice_of_the_whole(
    box: tuple[list[int], list[int], list[int]], dtype: torch.dtype, seed: int
) -> None:
    """Uniform and normal draws of a box equal the slice of the whole tensor's draws, bit by bit, in every dtype."""
    shape, offsets, lengths = box
    for draw in (uniform, normal):
        whole = draw(seed, indices(shape, [0] * len(shape), shape), dtype=dtype)
        alone = draw(seed, indices(shape, offsets, lengths), dtype=dtype)
        assert torch.equal(alone, cut(whole, offsets, lengths))


def test_long_draws_do_not_depend_on_where_they_start() -> None:
    """Vectorised loops and their remainders round alike: float64 normals from any start equal the long draw's."""
    whole = normal(7, torch.arange(20_000), dtype=torch.float64)
    for start, length in ((1, 19_999), (17, 4_097), (16_383, 3), (5, 8_191)):
        alone = normal(7, torch.arange(start, start + length), dtype=torch.float64)
        assert torch.equal(alone, whole[start : start + length])


def test_lower_precision_is_the_rounded_higher_one() -> None:
    """A float32 or bfloat16 normal is the float64 normal of the same counter, rounded: a dtype changes no seed."""
    exact = normal(3, torch.arange(10_000), dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(normal(3, torch.arange(10_000), dtype=dtype), exact.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_uniform_is_strictly_between_0_and_1(dtype: torch.dtype) -> None:
    """Neither end is ever drawn, not by rounding either, in coarse types in which the outermost cells are hit."""
    draws = uniform(5, torch.arange(DRAWS), dtype=dtype)
    eps = torch.finfo(dtype).eps
    assert draws.min().item() >= eps / 2
    assert draws.max().item() <= 1 - eps / 2


def test_uniform_and_normal_follow_their_laws() -> None:
    """Mean, variance and the Kolmogorov-Smirnov distance to the law are those of as many independent draws."""
    flat = uniform(key_of(1, "flat"), torch.arange(DRAWS), dtype=torch.float64)
    bell = normal(key_of(1, "bell"), torch.arange(DRAWS), dtype=torch.float64)
    assert ks_distance(flat, flat) < KS_BOUND
    assert ks_distance(bell, torch.special.ndtr(bell)) < KS_BOUND
    assert ks_distance(bell * 1.02, torch.special.ndtr(bell * 1.02)) > KS_BOUND  # the check sees two per cent
    assert abs(bell.mean().item()) < FIVE_SIGMA
    assert abs(bell.var().item() - 1) < FIVE_SIGMA * math.sqrt(2)
    assert abs((bell**4).mean().item() - 3) < FIVE_SIGMA * math.sqrt(96)


@pytest.mark.parametrize("other", [(1, "b"), (2, "a"), (1, "a", 0), (1, "a", "")])
def test_other_names_and_seeds_give_uncorrelated_streams(other: tuple) -> None:
    """Streams under different paths share no draw and no correlation, also one step apart."""
    seed, *names = other
    first = normal(key_of(1, "a"), torch.arange(DRAWS), dtype=torch.float64)
    second = normal(key_of(seed, *names), torch.arange(DRAWS), dtype=torch.float64)
    assert not torch.equal(first, second)
    for shift in (0, 1):
        assert abs((first * second.roll(shift)).mean().item()) < FIVE_SIGMA


def test_neighbouring_counters_and_keys_are_uncorrelated() -> None:
    """Counters one apart, and keys one apart (keys of samples are mere integers), give unrelated numbers."""
    draws = normal(1, torch.arange(DRAWS), dtype=torch.float64)
    assert abs((draws[1:] * draws[:-1]).mean().item()) < FIVE_SIGMA
    across_keys = normal(torch.arange(DRAWS), torch.tensor(0), dtype=torch.float64)
    assert abs((across_keys[1:] * across_keys[:-1]).mean().item()) < FIVE_SIGMA


@given(parts=st.lists(st.one_of(st.text(max_size=4), st.integers(-9, 99)), max_size=3))
def test_a_key_tells_every_path_apart(parts: list[str | int]) -> None:
    """Joining, splitting or retyping the parts of a path gives another key; the key fits int64."""
    key = key_of(0, *parts)
    assert -(2**63) <= key < 2**63
    assert key == key_of(0, *parts)
    assert key not in {key_of(1, *parts), key_of(0, *parts, ""), key_of(0, *parts, 0)}
    joined = "".join(map(str, parts))
    assert parts == [joined] or key != key_of(0, joined)


def test_a_tensor_of_keys_gives_each_row_its_own_stream() -> None:
    """Keys `[batch, 1]` against counters `[n]` give the rows that each key gives alone."""
    keys = torch.tensor([5, -3, 2**62])
    rows = uniform(keys[:, None], torch.arange(11))
    for row, key in zip(rows, keys.tolist(), strict=True):
        assert torch.equal(row, uniform(key, torch.arange(11)))


def test_a_box_outside_its_tensor_is_refused() -> None:
    """A box that leaves the tensor, or has other dimensions, raises a sentence."""
    for box in (([4], [3], [2]), ([4], [-1], [2]), ([4, 4], [0], [4])):
        with pytest.raises(ValueError, match="not inside a tensor of shape"):
            indices(*box)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make gpu")
def test_a_gpu_draws_the_same_numbers() -> None:
    """Bits and uniforms are equal on CPU and GPU; normals up to the last bits of the two machines' log and cos."""
    counters = torch.arange(DRAWS)
    assert torch.equal(bits(9, counters), bits(9, counters.cuda()).cpu())
    assert torch.equal(uniform(9, counters), uniform(9, counters.cuda()).cpu())
    torch.testing.assert_close(normal(9, counters), normal(9, counters.cuda()).cpu())
