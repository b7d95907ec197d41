"""A box of numbers in fewer bytes: planes of bytes, of which only those are coded that become shorter.

Of trained numbers the exponents are regular and the mantissas noise (Hershcovitch et al., "ZipNN: Lossless compression
for AI models", arXiv:2411.05239). So the bits of each number are rotated by one, which brings the sign to the end and
the exponent of float32 and bfloat16 into a byte of its own, and the bytes are gathered by their place. Such a plane is
coded by Huffman's code or by runs (both in the format of deflate, RFC 1951) if a sample of it says that it pays, and
left as it is otherwise. Where numbers of an earlier checkpoint are given, the bits by which a plane differs from theirs
are coded instead if these have less entropy: a difference, of which a reader needs the earlier one first.

`CHUNK` numbers are coded by themselves, so that a reader decodes those it needs. The stream of a box, little-endian:

    4 bytes   magic
    1 byte    form: 0 the numbers themselves; 1, 2 float32 numbers with and without sign in 8 bits (`codec.moments`)
    3 bytes   zeros
    32 bytes  blake3 hash of the object that differences begin with; zeros: there are none
    table     4 bytes for each plane of each chunk: 30 bits of length, whether it is a difference, whether it is coded
    planes    of chunk 0, of chunk 1, ...

In 8 bits a chunk has the planes of its codes, one, and then those of its scales, four.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch

from shoal.codec.config import MOMENT_BLOCK
from shoal.codec.moments import Quantised, quantised

CHUNK = 1 << 16
"""Numbers that are coded by themselves; a multiple of `MOMENT_BLOCK`."""
Form = Literal[0, 1, 2]
EXACT: Form = 0
SIGNED: Form = 1
UNSIGNED: Form = 2

Array = np.ndarray
"""One-dimensional, of unsigned integers: numbers as their bits."""

_MAGIC = b"SHP1"
_HEAD_BYTES = 40
_CODED, _DIFFERENCE, _LENGTH = 1 << 31, 1 << 30, (1 << 30) - 1
_SAMPLE = 4096
_PAYS_BITS = 7.7
"""Bits of a byte up to which it is coded: of what is beyond, the table and the code's own words cost half."""
_GAIN_BITS = 0.1
"""What a difference must have less than the plane: a sample's entropy is as uncertain."""
_RUNS_BITS = 1.0
"""Below, most bytes are equal, and runs of them cost less than the one bit each that Huffman's code takes."""


class Damaged(Exception):
    """A stream that is not one of these; the message ends a sentence."""


class Encoded(NamedTuple):
    """The stream of a box, and whether it has differences."""

    stream: bytes
    differs: bool


def encode(numbers: Array, *, form: Form = EXACT, base: Array | None = None, base_digest: str = "") -> Encoded:
    """The stream of `numbers`; `base` are those of the same box in the object `base_digest`.

    Numbers in 8 bits are float32, and coded without a base.
    """
    table: list[int] = []
    planes: list[bytes] = []
    for start in range(0, len(numbers), CHUNK):
        chunk = slice(start, start + CHUNK)
        before = None if base is None or form != EXACT else base[chunk]
        for words in _words(numbers[chunk], form):
            for plane, flags in _coded(words, before):
                table.append(flags | len(plane))
                planes.append(plane)
    differs = any(entry & _DIFFERENCE for entry in table)
    digest = bytes.fromhex(base_digest) if differs else bytes(32)
    head = _MAGIC + bytes([form, 0, 0, 0]) + digest
    return Encoded(b"".join([head, np.array(table, "<u4").tobytes(), *planes]), differs)


class Stream:
    """A stream that is read; `numel` numbers of `itemsize` bytes. Raises `Damaged` where it is none."""

    def __init__(self, content: Array, *, numel: int, itemsize: int) -> None:
        self._content, self._numel, self._itemsize = content, numel, itemsize
        head = content[:_HEAD_BYTES].tobytes()
        if len(head) < _HEAD_BYTES or head[:4] != _MAGIC or head[5:8] != bytes(3) or head[4] > UNSIGNED:
            raise Damaged("does not begin as encoded numbers do")
        self._form: Form = head[4]  # pyright: ignore[reportAttributeAccessIssue] compared above
        if self._form != EXACT and itemsize != 4:
            raise Damaged(f"holds numbers of {itemsize} bytes in 8 bits")
        self.base = head[8:].hex() if any(head[8:]) else ""
        self.chunks = -(-numel // CHUNK)
        columns = self._planes_of(0)
        end = _HEAD_BYTES + 4 * self.chunks * len(columns)
        if end > len(content):
            raise Damaged(f"has {len(content)} bytes, and the table of {numel} numbers needs {end}")
        self._table = content[_HEAD_BYTES:end].copy().view("<u4").reshape(self.chunks, len(columns))
        ends = end + np.cumsum((self._table & _LENGTH).astype(np.int64))
        if (ends[-1] if self.chunks else end) != len(content):
            raise Damaged("is not as long as its table says")
        self._begins = np.concatenate([[end], ends[:-1]]).reshape(self._table.shape) if self.chunks else self._table

    def chunk(self, number: int, base: Callable[[], Array]) -> Array:
        """The numbers of one chunk. `base()` gives those of the same chunk in the object that differences begin with,
        and is called only if there are some. Raises `Damaged`.
        """
        counts = self._planes_of(number)
        planes: list[Array] = []
        before: list[Array] | None = None
        for column, count in enumerate(counts):
            plane = self._plane(number, column, count)
            if self._table[number, column] & _DIFFERENCE:
                if not self.base or self._form != EXACT:
                    raise Damaged("has differences from nothing")
                before = _split(base()) if before is None else before
                plane = plane ^ before[column]
            planes.append(plane)
        if self._form == EXACT:
            return _joined(planes)
        return _decoded(_joined(planes[:1]), _joined(planes[1:]), self._form)

    def _plane(self, number: int, column: int, count: int) -> Array:
        entry, begin = int(self._table[number, column]), int(self._begins[number, column])
        content = self._content[begin : begin + (entry & _LENGTH)]
        if entry & _CODED:
            content = _inflated(content, count)
        if len(content) != count:
            raise Damaged(f"has a plane of {len(content)} bytes, and it should be {count}")
        return content

    def _planes_of(self, number: int) -> list[int]:
        """Bytes of each plane of a chunk."""
        count = min(CHUNK, self._numel - number * CHUNK)
        if self._form == EXACT:
            return [count] * self._itemsize
        return [count] + [-(-count // MOMENT_BLOCK)] * 4


def _words(numbers: Array, form: Form) -> list[Array]:
    if form == EXACT:
        return [numbers]
    found = quantised(torch.from_numpy(numbers.view(np.float32)), signed=form == SIGNED)
    return [found.codes.numpy().view(np.uint8), found.scales.numpy().view(np.uint32)]


def _decoded(codes: Array, scales: Array, form: Form) -> Array:
    kind = torch.int8 if form == SIGNED else torch.uint8
    moments = Quantised(torch.from_numpy(codes).view(kind), torch.from_numpy(scales.view(np.float32)))
    return moments.decoded().numpy().view(np.uint32)


def _coded(words: Array, before: Array | None) -> list[tuple[bytes, int]]:
    """The planes of `words`, each with what the table says beside its length."""
    bases: Sequence[Array | None] = [None] * words.itemsize if before is None else _split(before)
    return [_shortest(plane, base) for plane, base in zip(_split(words), bases, strict=True)]


def _shortest(plane: Array, base: Array | None) -> tuple[bytes, int]:
    best, bits, flags = plane, _entropy_bits(plane), _CODED
    if base is not None:
        changed = plane ^ base
        changed_bits = _entropy_bits(changed)
        if changed_bits < bits - _GAIN_BITS:
            best, bits, flags = changed, changed_bits, _CODED | _DIFFERENCE
    if bits < _PAYS_BITS:
        coded = _deflated(best, zlib.Z_RLE if bits < _RUNS_BITS else zlib.Z_HUFFMAN_ONLY)
        if len(coded) < len(plane):
            return coded, flags
    return plane.tobytes(), 0


def _entropy_bits(plane: Array) -> float:
    """Bits of a byte of `plane`, from a sample of it."""
    sample = plane[:: max(1, len(plane) // _SAMPLE)]
    counts = np.bincount(sample, minlength=256)
    shares = counts[counts > 0] / len(sample)
    return float(-(shares * np.log2(shares)).sum())


def _deflated(plane: Array, strategy: int) -> bytes:
    coder = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, strategy)
    return coder.compress(plane.data) + coder.flush()


def _inflated(content: Array, count: int) -> Array:
    decoder = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        found = decoder.decompress(content.data, count + 1)  # one more: the end of the code is read, too
    except zlib.error as error:
        raise Damaged(f"has a plane that cannot be decoded ({error})") from error
    if not decoder.eof or decoder.unused_data:
        raise Damaged("has a plane that does not end where it should")
    return np.frombuffer(found, np.uint8)


def _split(words: Array) -> list[Array]:
    """The planes of `words`, of low bytes first; those of one number's bytes are one row."""
    width = words.dtype.type(8 * words.itemsize - 1)
    rotated = words << words.dtype.type(1) | words >> width
    return list(np.ascontiguousarray(rotated.view(np.uint8).reshape(-1, words.itemsize).T))


def _joined(planes: Sequence[Array]) -> Array:
    """The inverse."""
    rotated = np.empty(len(planes[0]), f"<u{len(planes)}")
    columns = rotated.view(np.uint8).reshape(-1, len(planes))
    for place, plane in enumerate(planes):
        columns[:, place] = plane
    width = rotated.dtype.type(8 * len(planes) - 1)
    return rotated >> rotated.dtype.type(1) | rotated << width
