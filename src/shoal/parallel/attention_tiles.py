"""Attention over tiles of queries and keys, which context parallelism puts together: the kernels, and the tiles a
rank computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# Attention over one tile of queries and keys, with the log-sum-exp that puts tiles together.
#
#     scores = q k^T / sqrt(head_size),   lse = log sum_j exp(scores_j),   out = exp(scores - lse) v
#
# The backward takes the `out` and `lse` of the *whole* row, over all tiles, and gives this tile's terms of the
# gradients (FlashAttention-2, arXiv:2307.08691, section 3.1):
#
#     p = exp(scores - lse),  dv = p^T do,  ds = p (do v^T - sum(do out)),  dq = ds k / sqrt(.),  dk = ds^T q / sqrt(.)
#
# A row that sees no key of its tile has `out` 0 and `lse` -inf. All tensors are `[batch, heads, rows, head_size]` with
# as many key as query heads; `lse` is `[batch, heads, rows]`, float32 at least; `seen` is a boolean mask `[batch, 1,
# rows, keys]`, and excludes `causal`, for which there are as many keys as rows.


_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_CUDA = torch.ops.aten._scaled_dot_product_flash_attention
_CUDA_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
LARGEST_CUDA_HEAD = 256

Gradients = tuple[Tensor, Tensor, Tensor]


class Kernel(Protocol):
    """One way to compute a tile."""

    needs_mask: bool
    """Whether scores are written to memory, so that tiles must be small, and `causal` is said as a mask."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, seen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        ...

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        seen: Tensor | None,
    ) -> Gradients:
        """The tile's terms of the gradients of query, key and value, from the gradient of the whole row's `out`."""
        ...


class Plain:
    """The equations as they stand: any device and type, and the oracle of the others. Not for `causal`."""

    needs_mask = True

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, seen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        scores = _scores(query, key, seen)
        lse = scores.logsumexp(-1)
        out = (scores - _finite(lse)[..., None]).exp() @ _wide(value)
        return out.to(query.dtype), lse

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        seen: Tensor | None,
    ) -> Gradients:
        wide_grad = _wide(grad)
        weights = (_scores(query, key, seen) - lse[..., None]).exp()
        own = (wide_grad * out).sum(-1, keepdim=True)
        grad_scores = weights * (wide_grad @ _wide(value).mT - own) / math.sqrt(query.shape[-1])
        return grad_scores @ _wide(key), grad_scores.mT @ _wide(query), weights.mT @ wide_grad


class CpuFlash:
    """PyTorch's fused kernel for CPUs."""

    needs_mask = False

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, seen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = _CPU(query, key, value, 0.0, causal, attn_mask=_added(seen, query))
        # The kernel answers 0 for a row that sees nothing.
        return out, lse if seen is None else lse.masked_fill(~seen.any(-1), -torch.inf)

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        seen: Tensor | None,
    ) -> Gradients:
        return _CPU_BACKWARD(grad, query, key, value, out, lse, 0.0, causal, attn_mask=_added(seen, query))


class CudaFlash:
    """PyTorch's fused kernel for GPUs; no masks, half precision only."""

    needs_mask = False

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, seen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _CUDA(query, key, value, 0.0, causal)
        return out, lse

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        seen: Tensor | None,
    ) -> Gradients:
        no_random_state = torch.empty(2, dtype=torch.uint64, device=query.device)  # without dropout it is not read
        return _CUDA_BACKWARD(
            grad, query, key, value, out, lse, None, None, query.shape[2], key.shape[2], 0.0, causal,
            no_random_state, no_random_state,
        )  # fmt: skip


def kernel_for(query: Tensor, *, masked: bool) -> Kernel:
    """The fastest kernel that can do it."""
    if query.device.type == "cpu":
        return CpuFlash()
    half = query.dtype in (torch.float16, torch.bfloat16)
    fits = query.shape[-1] % 8 == 0 and query.shape[-1] <= LARGEST_CUDA_HEAD
    return CudaFlash() if query.device.type == "cuda" and half and fits and not masked else Plain()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scores(query: Tensor, key: Tensor, seen: Tensor | None) -> Tensor:
    scores = _wide(query) @ _wide(key).mT / math.sqrt(query.shape[-1])
    return scores if seen is None else scores.masked_fill(~seen, -torch.inf)


def _finite(lse: Tensor) -> Tensor:
    """-inf as 0: what is subtracted from scores that are all -inf."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _added(seen: Tensor | None, like: Tensor) -> Tensor | None:
    """The mask as numbers to add to the scores."""
    if seen is None:
        return None
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill(~seen, -torch.inf)


# Causal attention as a list of tiles, each a run of queries against a run of keys.
#
# With the balanced order of `shard` every tile is either full or a square under the diagonal: rank i's queries see, of
# the two chunks of rank j's keys,
#
#     j = i   both, under the diagonal of the two together
#     j < i   the early chunk, all of it, from all queries
#     j > i   both chunks, all of them, from the queries of the late chunk
#
# so fused kernels without masks can do it. Documents need masks; such tiles are cut into rows.


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


# Attention of a rank's queries, added up tile by tile, and its gradients.
#
# Tiles t of the same rows are merged by their log-sum-exp (arXiv:2310.01889, arXiv:2307.08691):
#
#     lse = log sum_t exp(lse_t),   out = sum_t exp(lse_t - lse) out_t
#
# The backward needs `out` and `lse` alone, so nothing of a tile is kept.


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
