"""PowerSGD: every matrix as a product of two thin ones, found by one step of power iteration a round.

    P = sum over ranks of M_r Q              [rows, rank]      the first sum
    P = orthonormal basis of the columns of P
    Q = sum over ranks of M_r^T P            [columns, rank]   the second sum
    sum over ranks of M_r is about P Q^T,    of which rank r has sent P (M_r^T P)^T

(Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression", arXiv:1905.13727, algorithm 1.) Q is
kept, as the start of the next round: so the basis follows the gradient over many steps. Both sums are of float32
numbers, on the way. Biased: it needs error feedback.

A tensor of more than two dimensions is a matrix of shape [first, all others]. Vectors, and matrices that two thin ones
would not make smaller, are sent as they are, with the first sum. ZeRO gives each rank whole matrices, as for Muon.

Note: orthonormal columns
-------------------------
All matrices of a buffer at once: with the Cholesky factor L of P^T P, P L^-T is orthonormal. Computed in float64, with
a little added to the diagonal: columns without a direction of their own become short instead of undefined, and the
columns are then those of a contraction.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.codec.codec import Codec, Field, Payload, TensorPlace
from shoal.codec.config import ACPSGDConfig, PowerSGDConfig
from shoal.maths.counter import key_of, normal

RIDGE = 1e-12
"""Added to the diagonal of P^T P, of its mean. Float64 keeps 1e-16."""


@dataclass
class Matrix:
    """A matrix in a buffer, from `start` on, and what the power iteration begins with: `q` `[columns, rank]`."""

    name: str
    start: int
    rows: int
    q: Tensor

    @property
    def slice(self) -> slice:
        """Where it lies."""
        return slice(self.start, self.start + self.rows * len(self.q))


class Shape(NamedTuple):
    """A matrix of `rows` and `columns` in a buffer, from `start` on."""

    name: str
    start: int
    rows: int
    columns: int


def matrices_of(places: Sequence[TensorPlace], *, rank: int) -> list[Shape]:
    """The tensors, in the order of the buffer, that two thin matrices of `rank` columns make smaller."""
    found = []
    for name, start, shape in sorted(places, key=lambda place: place.start):
        rows, columns = (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))
        if rank * (rows + columns) < rows * columns:
            found.append(Shape(name, start, rows, columns))
    return found


class PowerSGD(Codec):
    """`PowerSGDConfig`, on the wire. Until it is `bound` to a buffer it knows no matrices, and sends all as it is."""

    linear = True

    def __init__(self, config: PowerSGDConfig, matrices: Sequence[Matrix] = ()) -> None:
        self._config, self._rank, self._matrices = config, config.rank, matrices

    def bound(self, places: Sequence[TensorPlace], *, key: int, rank: int, ranks: int) -> PowerSGD:
        """The same for a buffer in which tensors lie at `places`. `key` gives the first bases, on all ranks alike."""
        found = []
        for name, start, rows, columns in matrices_of(places, rank=self._rank):
            counters = torch.arange(columns * self._rank)
            q = normal(key_of(key, "power_sgd", name), counters).view(columns, self._rank)
            found.append(Matrix(name, start, rows, q))
        return PowerSGD(self._config, found)

    @property
    def state(self) -> Mapping[str, Tensor]:
        """Where the next power iteration begins, the same on all ranks that sum."""
        return {f"power_sgd/{self._rank}/{matrix.name}": matrix.q for matrix in self._matrices}

    def fields(self, numel: int) -> tuple[Field, ...]:
        thin = sum(self._rank * (matrix.rows + len(matrix.q)) for matrix in self._matrices)
        dense = sum(matrix.rows * len(matrix.q) for matrix in self._matrices)
        return (Field(torch.float32, thin), Field(torch.float32, numel - dense))

    def summing(self, x: Tensor, *, key: int) -> Generator[Payload, None, tuple[Tensor, Tensor]]:
        left, total = x.clone(), torch.empty_like(x)
        yield from self.summing_into(left, total, key=key, residual=True)
        return x - left, total

    def summing_into(self, x: Tensor, total: Tensor, *, key: int, residual: bool) -> Generator[Payload, None, None]:
        own_rest = self._rest(x)
        first = torch.cat([self._products(x), own_rest])
        yield (first,)
        p, rest = first.split([len(first) - len(own_rest), len(own_rest)])
        basis = self._basis(p, x.dtype)
        q = self._coefficients(x, basis)
        own = q.clone()
        yield (q,)
        self._keep(q)
        if residual:
            self._subtract(basis, own, own_rest, x)
        self._join(basis, q, rest, total)

    def _encode(self, x: Tensor, key: int) -> Payload:
        """What a rank alone would come to."""
        basis = self._basis(self._products(x), x.dtype)
        thin = torch.cat([part.reshape(-1).float() for part in basis] + [self._coefficients(x, basis)])
        return thin, self._rest(x)

    def _decode(self, payload: Payload, numel: int, key: int, dtype: torch.dtype) -> Tensor:
        thin, rest = payload
        lengths = [matrix.rows * self._rank for matrix in self._matrices]
        *parts, q = thin.split([*lengths, thin.numel() - sum(lengths)])
        basis = [part.view(-1, self._rank).to(dtype) for part in parts]
        result = torch.empty(numel, dtype=dtype, device=thin.device)
        self._join(basis, q, rest, result)
        return result

    def _rest(self, x: Tensor) -> Tensor:
        """The numbers of `x` that are in no matrix, float32."""
        return torch.cat([x[run] for run in self._outside(x.numel())]).float()

    def _outside(self, numel: int) -> list[slice]:
        """Where they lie, in a vector of `numel`; runs, because a mask costs more than both products."""
        matrices = sorted((matrix.slice for matrix in self._matrices), key=lambda run: run.start)
        starts, stops = [0, *(run.stop for run in matrices)], [*(run.start for run in matrices), numel]
        return [slice(start, stop) for start, stop in zip(starts, stops, strict=True)]

    def _products(self, x: Tensor) -> Tensor:
        """M Q of all matrices, flat, float32."""
        found = [_rows(x, matrix) @ by_columns(matrix.q.to(x)) for matrix in self._matrices]
        return _flat(found, x)

    def _basis(self, p: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Orthonormal columns `[rows, rank]` of every matrix, from the products of all."""
        parts = [part.view(-1, self._rank) for part in p.split([m.rows * self._rank for m in self._matrices])]
        return orthonormal(parts, dtype=dtype)

    def _coefficients(self, x: Tensor, basis: Sequence[Tensor]) -> Tensor:
        """M^T P of all matrices, flat, float32."""
        found = [(part.T @ _rows(x, matrix)).T for matrix, part in zip(self._matrices, basis, strict=True)]
        return _flat(found, x)

    def _join(self, basis: Sequence[Tensor], q: Tensor, rest: Tensor, result: Tensor) -> None:
        """`result` becomes the vector of P Q^T and of what is in no matrix."""
        for run, numbers in self._runs(rest, result):
            run.copy_(numbers)
        for matrix, left, right in self._factors(basis, q, result):
            torch.mm(left, right.T, out=_rows(result, matrix))

    def _subtract(self, basis: Sequence[Tensor], q: Tensor, rest: Tensor, x: Tensor) -> None:
        """The same vector, taken from `x`."""
        for run, numbers in self._runs(rest, x):
            run.sub_(numbers)
        for matrix, left, right in self._factors(basis, q, x):
            _rows(x, matrix).addmm_(left, right.T, alpha=-1)

    def _runs(self, rest: Tensor, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The runs of `x` that are in no matrix, and the numbers of `rest` that belong there."""
        runs = [x[run] for run in self._outside(x.numel())]
        return zip(runs, rest.split([run.numel() for run in runs]), strict=True)

    def _factors(self, basis: Sequence[Tensor], q: Tensor, like: Tensor) -> Iterator[tuple[Matrix, Tensor, Tensor]]:
        """Every matrix with its P and its Q."""
        parts = q.split([len(matrix.q) * self._rank for matrix in self._matrices])
        for matrix, left, right in zip(self._matrices, basis, parts, strict=False):
            yield matrix, left, right.view(-1, self._rank).to(like)

    def _keep(self, q: Tensor) -> None:
        """Begins there the next time, unless that leads nowhere: zero, or not finite."""
        for matrix, part in zip(self._matrices, q.split([len(m.q) * self._rank for m in self._matrices]), strict=False):
            largest = torch.linalg.vector_norm(part, ord=torch.inf)
            usable = torch.isfinite(largest) & (largest > 0)
            matrix.q = torch.where(usable, part.view(-1, self._rank) / largest, matrix.q.to(part))


def orthonormal(parts: Sequence[Tensor], *, dtype: torch.dtype) -> list[Tensor]:
    """Orthonormal bases of the columns of every part `[rows, rank]`, in `dtype`: all parts at once."""
    if not parts:
        return []
    wide = [part.double() for part in parts]
    gram = torch.stack([part.T @ part for part in wide])
    mean = gram.diagonal(dim1=1, dim2=2).mean(1)
    ridge = torch.where(mean == 0, 1.0, RIDGE * mean)
    ones = torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
    factor, _ = torch.linalg.cholesky_ex(gram + ridge[:, None, None] * ones)
    return [
        torch.linalg.solve_triangular(lower, part.T, upper=False).T.to(dtype)
        for lower, part in zip(factor, wide, strict=True)
    ]


def by_columns(thin: Tensor) -> Tensor:
    """The same matrix with its columns in a row each in memory: a CPU multiplies by it five times as fast."""
    return thin.T.contiguous().T


def _rows(x: Tensor, matrix: Matrix) -> Tensor:
    return x[matrix.slice].view(matrix.rows, -1)


def _flat(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([part.reshape(-1).float() for part in parts]) if parts else like.new_zeros(0, dtype=torch.float32)


# ACP-SGD: PowerSGD's thin matrices in turn, so that a step takes one sum instead of two that wait for each other.
#
#     odd sums     P = sum over ranks of M_r Q',    Q' = orthonormal basis of the columns of the last Q
#     even sums    Q = sum over ranks of M_r^T P',  P' = orthonormal basis of the columns of the last P
#     the sum over ranks of M_r is about P Q'^T, or P' Q^T, of which rank r has sent its own term
#
# (Zhang et al., "Evaluation and Optimization of Gradient Compression for Distributed Deep Learning", arXiv:2306.08881,
# algorithm 1.) Half the bytes and half the products of PowerSGD; the basis lags a step behind. Biased: it needs error
# feedback. Which tensors are matrices, and what becomes of the others, is as in `power_sgd`.


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

    def keep(self, summed: Tensor) -> None:
        """The sum has made this one. It stays where it was made: on a GPU, which a copy would wait for."""
        if self.sums_q:
            self.q = summed
        else:
            self.p = summed
        self.turn.add_(1)


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
            one.keep(torch.where(usable, part.view_as(one.sent) / largest, one.sent.to(part)))
