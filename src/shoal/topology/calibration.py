"""`Calibration`: what was measured on a machine, for the parts that predict: collectives and matrix products.

A collective of S bytes takes alpha + beta S seconds (Hockney's model, fitted by `shoal bench comm`); S is the size that
nccl-tests prints: the whole vector for all-reduce and broadcast, the gathered one for all-gather, the one before it is
scattered for reduce-scatter, what one rank holds for all-to-all and send.
"""

from __future__ import annotations

from typing import Annotated

from shoal.config.table import Positive, PositiveFloat, Table, says


class CollectiveFit(Table, frozen=True):
    """alpha and beta of one collective over one backend and number of ranks."""

    backend: Annotated[str, says("shm, gloo, nccl, mpi, ...")]
    operation: Annotated[str, says("all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, ...")]
    ranks: Positive
    alpha_s: Annotated[float, says("Seconds of the shortest message.", ge=0)]
    beta_s: Annotated[float, says("Seconds of each further byte.", ge=0)]
    hosts: Positive = 1
    worst_off: Annotated[float, says("Largest relative distance of a measurement from the fit.", ge=0)] = 0.0


class MatrixProduct(Table, frozen=True):
    """The rate of one size, with `ranks` processes of one thread each (or one device each) at work at once."""

    dtype: str
    m: Positive
    n: Positive
    k: Positive
    ranks: Positive
    flops_s: Annotated[PositiveFloat, says("FLOP per second of one rank, 2 m n k over the median time.")]


class Calibration(Table, frozen=True):
    """All that is known of one machine."""

    machine: Annotated[str, says("Processor or GPU, and how many of them.")]
    torch: str
    collectives: tuple[CollectiveFit, ...] = ()
    products: tuple[MatrixProduct, ...] = ()
    memory_bytes_s: Annotated[
        PositiveFloat | None, says("Bytes per second that one rank copies, read and written.")
    ] = None

    def fit(self, backend: str, operation: str, ranks: int) -> CollectiveFit | None:
        """The fit of these, or None where it was not measured."""
        wanted = (backend, operation, ranks)
        return next((one for one in self.collectives if (one.backend, one.operation, one.ranks) == wanted), None)

    def joined(self, newer: Calibration) -> Calibration:
        """Everything of both; what both have is taken from `newer`."""
        fits = {(c.backend, c.operation, c.ranks, c.hosts): c for c in (*self.collectives, *newer.collectives)}
        products = {(p.dtype, p.m, p.n, p.k, p.ranks): p for p in (*self.products, *newer.products)}
        return Calibration(
            machine=newer.machine,
            torch=newer.torch,
            collectives=tuple(fits.values()),
            products=tuple(products.values()),
            memory_bytes_s=newer.memory_bytes_s or self.memory_bytes_s,
        )
