"""ACP-SGD: PowerSGD's thin matrices in turn, so that a step takes one sum instead of two that wait for each other.

    odd sums     P = sum over ranks of M_r Q',    Q' = orthonormal basis of the columns of the last Q
    even sums    Q = sum over ranks of M_r^T P',  P' = orthonormal basis of the columns of the last P
    the sum over ranks of M_r is about P Q'^T, or P' Q^T, of which rank r has sent its own term

(Zhang et al., "Evaluation and Optimization of Gradient Compression for Distributed Deep Learning", arXiv:2306.08881,
algorithm 1.) Half the bytes and half the products of PowerSGD; the basis lags a step behind. Biased: it needs error
feedback. Which tensors are matrices, and what becomes of the others, is as in `power_sgd`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.codec.codec import Codec, Field, Payload, TensorPlace
from shoal.codec.config import ACPSGDConfig
from shoal.codec.power_sgd import matrices_of, orthonormal
from shoal.maths.counter import key_of, normal


@dataclass
class Factors:
    """A matrix in a buffer, from `start` on, and the last sums: `p` `[rows, rank]` and `q` `[columns, rank]`, float32.

    `turn` `[1]`: sums made so far; after an even number of them the next one is P.
    """

    name: str
    start: int
    p: Tensor
    q: Tensor
    turn: Tensor

    def of(self, x: Tensor) -> Tensor:
        """The matrix `[rows, columns]` in the buffer `x`, for a sum of Q transposed."""
        matrix = x[self.start : self.start + len(self.p) * len(self.q)].view(len(self.p), len(self.q))
        return matrix.T if self.sums_q else matrix

    @property
    def sums_q(self) -> bool:
        """Whether the next sum is Q."""
        return bool(int(self.turn) % 2)

    @property
    def kept(self) -> Tensor:
        """The factor whose basis the next sum uses."""
        return self.p if self.sums_q else self.q

    @property
    def sent(self) -> Tensor:
        """The factor that the next sum makes."""
        return self.q if self.sums_q else self.p


class ACPSGD(Codec):
    """`ACPSGDConfig`, on the wire. Until it is `bound` to a buffer it knows no matrices, and sends all as it is."""

    linear = True

    def __init__(self, config: ACPSGDConfig, factors: Sequence[Factors] = (), outside: Sequence[slice] = ()) -> None:
        self._config, self._rank, self._factors = config, config.rank, factors
        self._outside = outside or (slice(None),)

    def bound(self, places: Sequence[TensorPlace], *, key: int, rank: int, ranks: int) -> ACPSGD:
        """The same for a buffer in which tensors lie at `places`. `key` gives the first bases, on all ranks alike."""
        found, outside, at = [], [], 0
        for name, start, rows, columns in matrices_of(places, rank=self._rank):
            p, q = (
                normal(key_of(key, "acp_sgd", side, name), torch.arange(length * self._rank)).view(length, -1)
                for side, length in (("p", rows), ("q", columns))
            )
            found.append(Factors(name, start, p, q, torch.zeros(1)))
            outside.append(slice(at, start))
            at = start + rows * columns
        return ACPSGD(self._config, found, [*outside, slice(at, None)])

    @property
    def state(self) -> Mapping[str, Tensor]:
        """The last sums, the same on all ranks that sum."""
        return {
            f"acp_sgd/{self._rank}/{side}/{one.name}": tensor
            for one in self._factors
            for side, tensor in (("p", one.p), ("q", one.q), ("turn", one.turn))
        }

    def fields(self, numel: int) -> tuple[Field, ...]:
        """Those of the next sum: P and Q may differ in length."""
        thin = sum(one.sent.numel() for one in self._factors)
        dense = sum(len(one.p) * len(one.q) for one in self._factors)
        return (Field(torch.float32, thin + numel - dense),)

    def summing(self, x: Tensor, *, key: int) -> Generator[Payload, None, tuple[Tensor, Tensor]]:
        bases = self._bases(x)
        payload = self._products(x, bases)
        own = payload.clone()
        yield (payload,)
        sent, total = (self._joined(part, bases, torch.empty_like(x)) for part in (own, payload))
        self._keep(payload)
        return sent, total

    def _encode(self, x: Tensor, key: int) -> Payload:
        return (self._products(x, self._bases(x)),)

    def _decode(self, payload: Payload, numel: int, key: int, dtype: torch.dtype) -> Tensor:
        result = torch.empty(numel, dtype=dtype, device=payload[0].device)
        return self._joined(payload[0], self._bases(result), result)

    def _bases(self, like: Tensor) -> list[Tensor]:
        """Those of the next sum, in the dtype and on the device of `like`."""
        return orthonormal([one.kept.to(like.device) for one in self._factors], dtype=like.dtype)

    def _products(self, x: Tensor, bases: Sequence[Tensor]) -> Tensor:
        """What is sent: every matrix times its basis, and what is in no matrix; float32."""
        thin = [(one.of(x) @ basis).view(-1).float() for one, basis in zip(self._factors, bases, strict=True)]
        return torch.cat([*thin, *(x[run].float() for run in self._outside)])

    def _joined(self, payload: Tensor, bases: Sequence[Tensor], result: Tensor) -> Tensor:
        """`result`, which becomes the vector that `payload` stands for."""
        runs = [result[run] for run in self._outside]
        parts = payload.to(result).split([*(one.sent.numel() for one in self._factors), *map(len, runs)])
        for one, part, basis in zip(self._factors, parts, bases, strict=False):
            one.of(result).copy_(part.view_as(one.sent) @ basis.T)
        for run, part in zip(runs, parts[len(self._factors) :], strict=True):
            run.copy_(part)
        return result

    def _keep(self, payload: Tensor) -> None:
        """Goes on from what was summed, unless that leads nowhere: zero, or not finite."""
        thin = [one.sent.numel() for one in self._factors]
        for one, part in zip(self._factors, payload.split([*thin, len(payload) - sum(thin)]), strict=False):
            largest = torch.linalg.vector_norm(part, ord=torch.inf)
            usable = torch.isfinite(largest) & (largest > 0)
            one.sent.copy_(torch.where(usable, part.view_as(one.sent) / largest, one.sent.to(part.device)))
            one.turn.add_(1)
