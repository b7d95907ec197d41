"""Causal attention as a list of tiles, each a run of queries against a run of keys.

With the balanced order of `shard` every tile is either full or a square under the diagonal: rank i's queries see, of
the two chunks of rank j's keys,

    j = i   both, under the diagonal of the two together
    j < i   the early chunk, all of it, from all queries
    j > i   both chunks, all of them, from the queries of the late chunk

so fused kernels without masks can do it. Documents need masks; such tiles are cut into rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.parallel.context.kernels import Kernel

MOST_MASKED_NUMEL = 1 << 24
"""Numbers of a mask, or of scores where a kernel writes them out, that exist at a time."""


@dataclass(frozen=True)
class Tile:
    """Queries [rows.start, rows.stop) of a rank against keys; `causal`: row i sees the keys up to its i-th alone."""

    rows: slice
    keys: slice
    causal: bool


def tiles_of_source(rank: int, source: int, *, length: int) -> list[Tile]:
    """The tiles of `rank`'s queries against the `length` keys that `source` holds."""
    everything, half = slice(0, length), length // 2
    if source == rank:
        return [Tile(everything, everything, causal=True)]
    if source < rank:
        return [Tile(everything, slice(0, half), causal=False)]
    return [Tile(slice(half, length), everything, causal=False)]


def tiles_of_sequence(rank: int, *, size: int, length: int) -> list[Tile]:
    """The tiles of `rank`'s `length` queries against the keys of the whole sequence, in its order."""
    half = length // 2
    tiles = []
    for rows, chunk in ((slice(0, half), rank), (slice(half, length), 2 * size - 1 - rank)):
        tiles.append(Tile(rows, slice(chunk * half, (chunk + 1) * half), causal=True))
        if chunk:
            tiles.append(Tile(rows, slice(0, chunk * half), causal=False))
    return tiles


@dataclass(frozen=True)
class Documents:
    """Numbers of the documents that the queries `[batch, rows]` and the keys `[batch, keys]` belong to."""

    queries: Tensor
    keys: Tensor


@dataclass(frozen=True)
class Piece:
    """What a kernel gets at once: a tile, or some rows of it, and the mask `[1 or batch, 1, rows, keys]` if any."""

    rows: slice
    keys: slice
    causal: bool
    seen: Tensor | None


def pieces(tile: Tile, query: Tensor, documents: Documents | None, *, kernel: Kernel) -> Iterator[Piece]:
    """The tile as `kernel` can take it."""
    if documents is None and not kernel.needs_mask:
        yield Piece(tile.rows, tile.keys, tile.causal, None)
        return
    length = tile.keys.stop - tile.keys.start
    batch, heads = query.shape[:2]
    each = max(1, MOST_MASKED_NUMEL // (batch * (heads if kernel.needs_mask else 1) * length))
    for start in range(tile.rows.start, tile.rows.stop, each):
        rows = slice(start, min(start + each, tile.rows.stop))
        last_key = tile.keys.start + rows.stop - tile.rows.start if tile.causal else tile.keys.stop
        keys = slice(tile.keys.start, last_key)
        yield Piece(rows, keys, False, _seen(tile, rows, keys, documents, device=query.device))


def _seen(tile: Tile, rows: slice, keys: slice, documents: Documents | None, *, device: torch.device) -> Tensor | None:
    seen = None
    if tile.causal:
        row_places = torch.arange(rows.start - tile.rows.start, rows.stop - tile.rows.start, device=device)
        seen = (torch.arange(keys.stop - keys.start, device=device) <= row_places[:, None])[None, None]
    if documents is not None:
        same = documents.queries[:, None, rows, None] == documents.keys[:, None, None, keys]
        seen = same if seen is None else seen & same
    return seen
