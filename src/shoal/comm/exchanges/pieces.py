"""What ranks that divide a model send each other, with fewer bits: pieces of gradients and of parameters under ZeRO.

    gradients    rank r gets part r of every other rank's buffer, encoded, and adds it to its own:
                 piece_r = g_r[r] + sum over s != r of decode(encode(g_s[r]))
    parameters   every rank gets decode(encode(piece_r)) of every rank r, its own too, so that all compute with the
                 same bits; what the optimizer updates keeps its full precision

(Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", arXiv:2306.10209,
sections 3.1 and 3.3: quantised weights, and quantised gradients by one all-to-all.) Each number is rounded once, not
once a hop as on a ring. There is no error feedback: a residual would be as large as the whole gradient, which ZeRO
divides to save memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal.codec.codec import Codec, pack, unpack
from shoal.comm.collective import Collective, Handle
from shoal.comm.exchanges.exchange import Exchange, ReduceScatter


class PieceHome(Protocol):
    """Where a rank's pieces of parameters and gradients live under ZeRO-3, if not on the device."""

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros, one-dimensional."""
        ...

    def fetched(self, size_bytes: int) -> None:
        """A piece of parameters came to the device."""
        ...

    def kept(self, size_bytes: int) -> None:
        """A piece of gradients left it."""
        ...


@dataclass(frozen=True)
class PieceCodecs:
    """The codecs of pieces of `weights` and of `gradients`, not linear; None: as they are. `home`: where pieces live
    under ZeRO-3; None: on the device.
    """

    weights: Codec | None = None
    gradients: Codec | None = None
    home: PieceHome | None = None

    def exact(self) -> PieceCodecs:
        """The same without codecs."""
        return PieceCodecs(home=self.home)

    def zeros(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A piece."""
        if self.home is None:
            return torch.zeros(numel, dtype=dtype, device=device)
        return self.home.allocate(numel, dtype)

    def scatter(self, shard: Collective, piece: Tensor, follow: Exchange) -> Exchange:
        """The exchange that ends with this rank's part of a sum over `shard` in `piece`; see `ReduceScatter`."""
        if self.gradients is None or shard.size == 1:
            return ReduceScatter(shard, piece, follow)
        return CodedReduceScatter(self.gradients, shard, piece, follow)

    def gather(self, shard: Collective, whole: Tensor, piece: Tensor) -> Handle:
        """Begins to write every rank's `piece` `[numel]`, as all ranks of `shard` decode it, into `whole`
        `[size * numel]`.
        """
        if self.home is not None:
            self.home.fetched(piece.nbytes)
        if self.weights is None or shard.size == 1:
            return shard.all_gather(whole, piece)
        packed = pack(self.weights, self.weights.encode(piece))
        rows = packed.new_empty(shard.size, packed.numel())
        return _Decoding(self.weights, shard.all_gather(rows.view(-1), packed), rows, whole, piece.numel())


class CodedReduceScatter(ReduceScatter):
    """`ReduceScatter` of terms that `codec` has encoded; the term of the rank that keeps the sum is exact."""

    def __init__(self, codec: Codec, shard: Collective, piece: Tensor, follow: Exchange) -> None:
        super().__init__(shard, piece, follow)
        self._codec, self._adds = codec, False

    def send(self, buffer: Tensor) -> None:
        size, rank, numel = self.shard.size, self.shard.rank, self.result.numel()
        self._adds, self._sent = self._sent, True
        parts = buffer.view(size, numel)
        width = self._codec.wire_bytes(numel)
        packed = torch.zeros(size, width, dtype=torch.uint8, device=buffer.device)
        for to in _others(size, rank):
            packed[to] = pack(self._codec, self._codec.encode(parts[to]))
        self._rows = torch.empty_like(packed)
        self._own = parts[rank].clone()
        self._handle = self.shard.all_to_all(self._rows.view(-1), packed.view(-1))

    def land(self) -> None:
        if self._handle is None:
            return
        self._handle.wait()
        self._handle = None
        numel, total = self.result.numel(), self._own
        for source in _others(self.shard.size, self.shard.rank):
            total.add_(_decoded(self._codec, self._rows[source], numel).to(total.dtype))
        if self._adds:
            self.result.add_(total)
        else:
            self.result.copy_(total)
        del self._rows, self._own


class _Decoding:
    """A gather under way, whose `rows` `[ranks, bytes]` are decoded into `whole` when they have come."""

    def __init__(self, codec: Codec, handle: Handle, rows: Tensor, whole: Tensor, numel: int) -> None:
        self._codec, self._handle, self._rows, self._whole, self._numel = codec, handle, rows, whole, numel

    def wait(self) -> None:
        """Returns when `whole` is written."""
        self._handle.wait()
        for row, part in zip(self._rows, self._whole.view(-1, self._numel), strict=True):
            part.copy_(_decoded(self._codec, row, self._numel))


def _others(size: int, rank: int) -> Iterable[int]:
    return (other for other in range(size) if other != rank)


def _decoded(codec: Codec, packed: Tensor, numel: int) -> Tensor:
    return codec.decode(unpack(codec, packed, numel), numel)
