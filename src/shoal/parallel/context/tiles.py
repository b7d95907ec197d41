"""Attention tile by tile: which tiles a context rank computes, and how they are merged.

Causal attention is a list of tiles, each a run of queries against a run of keys. With the order of `core.positions`
every tile is either full or a square under the diagonal: rank i's queries see, of the two chunks of rank j's keys,

    j = i   both, under the diagonal of the two together
    j < i   the early chunk, all of it, from all queries
    j > i   both chunks, all of them, from the queries of the late chunk

so fused kernels without masks can do it. Documents need masks; such tiles are cut into rows.

Tiles t of the same rows are merged by their log-sum-exp (arXiv:2310.01889, arXiv:2307.08691):

    lse = log sum_t exp(lse_t),   out = sum_t exp(lse_t - lse) out_t

The backward needs `out` and `lse` alone, so nothing of a tile is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.parallel.context.kernels import Kernel, kernel_for

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


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which terms are added up: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


class Rows:
    """The forward. `query` `[batch, heads, rows, head_size]`; `out` like it and `lse` `[batch, heads, rows]`, wide."""

    def __init__(self, query: Tensor) -> None:
        wide = wide_dtype(query.dtype)
        self.query = query
        # Heads lie beside each other, so that the projection after attention takes `out` as it is and not a copy.
        batch, heads, length, head_size = query.shape
        self.out = torch.zeros((batch, length, heads, head_size), dtype=wide, device=query.device).transpose(1, 2)
        self.lse = torch.full(query.shape[:-1], -torch.inf, dtype=wide, device=query.device)

    def add(self, tile: Tile, key: Tensor, value: Tensor, *, documents: Documents | None) -> None:
        """Takes in a tile; `key` and `value` are `[batch, kv_heads, keys, head_size]`, `kv_heads` a divisor."""
        kernel = kernel_for(self.query, masked=documents is not None)
        heads = self.query.shape[1]
        for piece in pieces(tile, self.query, documents, kernel=kernel):
            keys, values = (_spread(x[:, :, piece.keys], heads) for x in (key, value))
            query = self.query[:, :, piece.rows]
            out, lse = kernel.forward(query, keys, values, causal=piece.causal, seen=piece.seen)
            self._merge(piece.rows, out, lse)

    def _merge(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        before = self.lse[:, :, rows]
        after = torch.logaddexp(before, lse)
        base = after.masked_fill(after == -torch.inf, 0.0)  # rows that have seen nothing yet
        kept = self.out[:, :, rows] * (before - base).exp()[..., None]
        self.out[:, :, rows] = kept + out * (lse - base).exp()[..., None]
        self.lse[:, :, rows] = after


class RowsBackward:
    """The backward of `Rows`, from `out`, `lse` and the gradient of `out`. `grad_query` is wide."""

    def __init__(self, grad: Tensor, query: Tensor, *, out: Tensor, lse: Tensor) -> None:
        self.grad, self.query, self.out, self.lse = grad, query, out, lse
        self.grad_query = torch.zeros(query.shape, dtype=wide_dtype(query.dtype), device=query.device)

    def add(
        self,
        tile: Tile,
        key: Tensor,
        value: Tensor,
        *,
        documents: Documents | None,
        grad_key: Tensor,
        grad_value: Tensor,
    ) -> None:
        """Adds the tile's terms to `grad_query`, and in place to `grad_key` and `grad_value`, like `key` and wide."""
        kernel = kernel_for(self.query, masked=documents is not None)
        heads, kv_heads = self.query.shape[1], key.shape[1]
        for piece in pieces(tile, self.query, documents, kernel=kernel):
            grad, query, out, lse = (x[:, :, piece.rows] for x in (self.grad, self.query, self.out, self.lse))
            keys, values = (_spread(x[:, :, piece.keys], heads) for x in (key, value))
            of_query, of_key, of_value = kernel.backward(
                grad, query, keys, values, out=out, lse=lse, causal=piece.causal, seen=piece.seen
            )
            self.grad_query[:, :, piece.rows] += of_query
            grad_key[:, :, piece.keys] += _gathered(of_key, kv_heads)
            grad_value[:, :, piece.keys] += _gathered(of_value, kv_heads)


def _spread(x: Tensor, heads: int) -> Tensor:
    """`[batch, kv_heads, ...]` with each head as often as query heads share it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _gathered(x: Tensor, kv_heads: int) -> Tensor:
    """The adjoint of `_spread`: summed over the query heads that share a head, in a wide type."""
    if x.shape[1] == kv_heads:
        return x
    return x.unflatten(1, (kv_heads, -1)).sum(2, dtype=wide_dtype(x.dtype))
