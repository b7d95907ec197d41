"""Planes of bytes: every number comes back bit by bit, what does not pay is left as it is, and damage is noticed."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shoal.checkpoint import planes
from shoal.checkpoint.planes import CHUNK, SIGNED, UNSIGNED, Damaged, Stream, encode
from tests.checkpoint.states import light

DIGEST = "5a" * 32
ITEMSIZES = (1, 2, 4, 8)
FIRST_MOMENTS, SECOND_MOMENTS = 0.011, 0.006
"""What the documentation says of moments in 8 bits, of the largest number in a block of 256."""


def decoded(stream: bytes, like: np.ndarray, base: np.ndarray | None = None) -> np.ndarray:
    """All chunks of a stream of numbers like these."""
    read = Stream(np.frombuffer(stream, np.uint8), numel=len(like), itemsize=like.itemsize)
    chunks = [read.chunk(number, lambda number=number: before(base, number)) for number in range(read.chunks)]
    return np.concatenate(chunks) if chunks else like[:0]


def before(base: np.ndarray | None, number: int) -> np.ndarray:
    assert base is not None, "differences from nothing"
    return base[number * CHUNK : (number + 1) * CHUNK]


def normal(numel: int, dtype: str = "f4", seed: int = 0) -> np.ndarray:
    """Numbers as trained weights are, as their bits."""
    numbers = (np.random.default_rng(seed).standard_normal(numel) * 0.02).astype(dtype)
    return numbers.view(f"u{numbers.itemsize}")


def bfloat16(numel: int) -> np.ndarray:
    return (normal(numel) >> np.uint32(16)).astype(np.uint16)


def naive_planes(words: np.ndarray) -> list[list[int]]:
    """Number by number: the sign goes to the end, the low byte comes first."""
    bits = 8 * words.itemsize
    turned = [(int(word) << 1 | int(word) >> (bits - 1)) % (1 << bits) for word in words]
    return [[word >> 8 * place & 255 for word in turned] for place in range(words.itemsize)]


@light
@given(st.sampled_from(ITEMSIZES).flatmap(lambda size: arrays.arrays(f"u{size}", st.integers(0, 300))), st.booleans())
def test_any_numbers_come_back(words, with_base):
    """Any bits of any width, with and without an earlier version of them."""
    base = np.roll(words, 1) if with_base else None
    found = encode(words, base=base, base_digest=DIGEST)
    assert decoded(found.stream, words, base if found.differs else None).tobytes() == words.tobytes()


@pytest.mark.parametrize("numel", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_chunks_of_all_lengths_come_back(numel):
    """Around the length of a chunk; the last one is shorter."""
    words = normal(numel)
    assert decoded(encode(words).stream, words).tobytes() == words.tobytes()


def test_planes_are_those_of_a_loop_over_numbers():
    """An exponent is a byte of its own: the planes that are stored are the naive ones, deflated or not."""
    words = normal(5000)
    stream = encode(words).stream
    table = np.frombuffer(stream, "<u4", 4, 40)
    at = 40 + table.nbytes
    for entry, plane in zip(table.tolist(), naive_planes(words), strict=True):
        content = stream[at : at + (entry & planes._LENGTH)]
        at += len(content)
        assert list(zlib.decompress(content, -15) if entry & planes._CODED else content) == plane
    assert [bool(entry & planes._CODED) for entry in table.tolist()] == [False, False, False, True]


def test_trained_numbers_take_as_much_less_as_is_said():
    """A sixth of float32 and a third of bfloat16; noise takes no more than its table."""
    numel = 4 * CHUNK
    assert len(encode(normal(numel)).stream) < 0.84 * 4 * numel
    assert len(encode(bfloat16(numel)).stream) < 0.68 * 2 * numel
    noise = np.random.default_rng(1).integers(0, 1 << 32, numel, dtype=np.uint32)
    assert len(encode(noise).stream) <= 4 * numel + 40 + 4 * 4 * 4


def test_what_changed_little_takes_little():
    """Weights after a step of a thousandth; numbers that are others are coded without the earlier ones."""
    numel = 2 * CHUNK
    base = normal(numel)
    step = np.random.default_rng(2).standard_normal(numel) * 1e-3
    moved = (base.view("f4") * (1 + step)).astype("f4").view("u4")
    found = encode(moved, base=base, base_digest=DIGEST)
    assert found.differs
    assert len(found.stream) < 0.8 * len(encode(moved).stream)
    assert decoded(found.stream, moved, base).tobytes() == moved.tobytes()
    others = encode(normal(numel, seed=3), base=base, base_digest=DIGEST)
    assert others == encode(normal(numel, seed=3))


def test_a_chunk_is_read_without_the_others():
    """Bytes of another chunk may be anything."""
    words = normal(3 * CHUNK)
    stream = bytearray(encode(words).stream)
    stream[-100:] = b"\xff" * 100
    read = Stream(np.frombuffer(stream, np.uint8), numel=len(words), itemsize=4)
    assert read.chunk(1, lambda: words).tobytes() == words[CHUNK : 2 * CHUNK].tobytes()
    with pytest.raises(Damaged):
        read.chunk(2, lambda: words)


@pytest.mark.parametrize(("form", "stated"), [(SIGNED, FIRST_MOMENTS), (UNSIGNED, SECOND_MOMENTS)])
def test_moments_in_8_bits_are_as_near_as_is_said(form, stated):
    """The largest number of each block is exact, and what was decoded is encoded as it was."""
    numbers = np.random.default_rng(4).standard_normal(CHUNK + 1000).astype("f4")
    numbers = numbers if form == SIGNED else numbers * numbers
    stream = encode(numbers.view("u4"), form=form).stream
    found = decoded(stream, numbers.view("u4")).view("f4")
    assert len(stream) < 0.27 * numbers.nbytes
    for start in range(0, len(numbers), 256):
        x, y = numbers[start : start + 256], found[start : start + 256]
        assert np.abs(x - y).max() < stated * np.abs(x).max()
        assert np.abs(y).max() == np.abs(x).max()
    assert encode(found.view("u4"), form=form).stream == stream


def broken(stream: bytes) -> dict[str, bytes]:
    table = np.frombuffer(stream, "<u4", 4, 40)
    without = table.copy()
    without[3] |= planes._DIFFERENCE
    short = table - np.uint32(1)
    return {
        "empty": b"",
        "magic": b"X" + stream[1:],
        "form": stream[:4] + b"\x03" + stream[5:],
        "padding": stream[:5] + b"\x01" + stream[6:],
        "table": stream[:50],
        "longer": stream + b"x",
        "shorter": stream[:-1],
        "difference": stream[:40] + without.tobytes() + stream[56:],
        "lengths": stream[:40] + short.tobytes() + stream[56:-4],
        "code": stream[:-400] + b"\xff" * 400,
    }


@pytest.mark.parametrize("what", broken(encode(normal(5000)).stream))
def test_what_is_no_stream_is_refused(what):
    """Streams of strangers: never more memory than the box has, and `Damaged`."""
    words = normal(5000)
    with pytest.raises(Damaged):
        decoded(broken(encode(words).stream)[what], words)


def test_a_plane_that_would_fill_the_memory_is_not_decoded():
    """A gigabyte of zeros in a plane of 5,000 numbers."""
    coder = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = b"".join(coder.compress(bytes(1 << 20)) for _ in range(64)) + coder.flush()
    table = np.array([len(bomb) | planes._CODED], "<u4")
    stream = encode(np.zeros(0, np.uint8)).stream[:40] + table.tobytes() + bomb
    with pytest.raises(Damaged, match="does not end where it should"):
        decoded(stream, np.zeros(5000, np.uint8))
