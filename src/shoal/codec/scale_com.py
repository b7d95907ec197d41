"""ScaleCom: top-k at places that one rank chooses for all, so that numbers are summed on the way.

    leader           draws its k largest, and tells their places
    every rank       sends its numbers at these places;  sums of k numbers, however many ranks there are

(Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient Distributed Training",
arXiv:2104.11125, algorithm 1, with beta = 1.) Residuals of different ranks come to look alike, which is why the places
of one serve all. Biased: it needs error feedback. In the paper ranks lead in turn; here the key of the sum draws the
leader, so that no turn has to be saved.

The places travel by the first sum, of bytes to which all but the leader add zeros: 2 bytes a place (`pack_indices`),
and 4 a number by the second sum. A rank that is not finite sends NaN.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from shoal.codec.codec import Codec, Field, Payload, TensorPlace, all_or_nothing
from shoal.codec.config import ScaleComConfig
from shoal.codec.stated import kept
from shoal.codec.top_k import index_fields, largest, pack_indices, unpack_indices
from shoal.maths.counter import key_of


class ScaleCom(Codec):
    """`ScaleComConfig`, on the wire, for rank `rank` of `ranks`."""

    linear = True

    def __init__(self, config: ScaleComConfig, *, rank: int = 0, ranks: int = 1) -> None:
        self._config, self._rank, self._ranks = config, rank, ranks

    def bound(self, places: Sequence[TensorPlace], *, key: int, rank: int, ranks: int) -> ScaleCom:
        return ScaleCom(self._config, rank=rank, ranks=ranks)

    def fields(self, numel: int) -> tuple[Field, ...]:
        count = kept(self._config.fraction, numel)
        return Field(torch.float32, count), *index_fields(numel, count)

    def summing(self, x: Tensor, *, key: int) -> Generator[Payload, None, tuple[Tensor, Tensor]]:
        x = all_or_nothing(x)
        if self.leader(key) == self._rank:
            packed = torch.cat([part.view(torch.uint8) for part in self._chosen(x)])
        else:
            nbytes = sum(field.nbytes for field in self.fields(x.numel())[1:])
            packed = torch.zeros(nbytes, dtype=torch.uint8, device=x.device)
        yield (packed,)
        runs, low = (field.nbytes for field in self.fields(x.numel())[1:])
        places = unpack_indices(packed[:runs].view(torch.int32), packed[runs : runs + low].view(torch.int16))
        values = x[places].float()
        own = values.clone()
        yield (values,)
        return _at(places, own, x), _at(places, values, x)

    def leader(self, key: int) -> int:
        """The rank that chooses the places of the sum that has this key."""
        return key_of(key, "leader") % self._ranks

    def _chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return pack_indices(largest(x, kept(self._config.fraction, x.numel())), x.numel())

    def _encode(self, x: Tensor, key: int) -> Payload:
        """What a rank alone would come to."""
        runs, low = self._chosen(x)
        return x[unpack_indices(runs, low)].float(), runs, low

    def _decode(self, payload: Payload, numel: int, key: int, dtype: torch.dtype) -> Tensor:
        values, runs, low = payload
        return _at(unpack_indices(runs, low), values, torch.empty(numel, dtype=dtype, device=values.device))


def _at(places: Tensor, values: Tensor, like: Tensor) -> Tensor:
    """A vector as long as `like` with `values` at `places`, and zeros elsewhere."""
    result = torch.zeros_like(like)
    result[places] = values.to(like)
    return result
