"""`Calibration`: what was measured on a machine, for the parts that predict: collectives, matrix products, operators.

A collective of S bytes takes alpha + beta S seconds (Hockney's model, fitted by `shoal bench comm`); S is the size that
nccl-tests prints: the whole vector for all-reduce and broadcast, the gathered one for all-gather, the one before it is
scattered for reduce-scatter, what one rank holds for all-to-all and send, what the root holds for gather and scatter.
"""

from __future__ import annotations

from typing import Annotated

from shoal.config.check import Positive, PositiveFloat, Table, says


class CollectiveFit(Table, frozen=True):
    """alpha and beta of one collective over one backend, number of ranks and dtype."""

    backend: Annotated[str, says("shm, gloo, nccl, mpi, ...")]
    operation: Annotated[str, says("all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, ...")]
    ranks: Positive
    alpha_s: Annotated[float, says("Seconds of the shortest message.", ge=0)]
    beta_s: Annotated[float, says("Seconds of each further byte.", ge=0)]
    hosts: Positive = 1
    dtype: Annotated[str, says("float32, bfloat16, ...: what was moved.")] = "float32"
    worst_off: Annotated[float, says("Largest relative distance of a measurement from the fit.", ge=0)] = 0.0
    sizes: Annotated[int, says("Sizes that were measured.", ge=2)] = 2

    @property
    def key(self) -> tuple[str, str, int, int, str]:
        """What it is a fit of."""
        return self.backend, self.operation, self.ranks, self.hosts, self.dtype


class MatrixProduct(Table, frozen=True):
    """The rate of one size, with `ranks` processes of one thread each (or one device each) at work at once."""

    dtype: str
    m: Positive
    n: Positive
    k: Positive
    ranks: Positive
    flops_s: Annotated[PositiveFloat, says("FLOP per second of one rank, 2 m n k over the median time.")]


class OperatorTime(Table, frozen=True):
    """Seconds of one operator of an eager model at one size, autograd's own work and fresh memory included.

    What m, n and k count is told by the operator's name, in `shoal.cost.operators`.
    """

    operator: str
    dtype: str
    m: Positive
    n: Positive
    k: Positive
    ranks: Annotated[Positive, says("Processes of one thread each that were at work at once.")]
    forward_s: Annotated[PositiveFloat, says("Seconds of the forward.")]
    backward_s: Annotated[float, says("Seconds of the backward; 0 where it has none.", ge=0)]


class Wait(Table, frozen=True):
    """What it takes `ranks` ranks to agree on a few numbers behind a piece of computation, beyond the piece."""

    ranks: Positive
    piece_s: Annotated[PositiveFloat, says("Seconds of the piece, computed by all ranks without agreeing.")]
    wait_s: Annotated[float, says("Seconds more where they agree behind each.", ge=0)]
    byte_s: Annotated[float, says("Seconds of each byte more that they sum, between pieces of computation.", ge=0)] = (
        0.0
    )


class Crowd(Table, frozen=True):
    """What `ranks` ranks that compute at the same time, and say nothing to each other, take for the same step."""

    ranks: Positive
    step_s: Annotated[PositiveFloat, says("Seconds of the step on the slowest rank.")]


class CodecTime(Table, frozen=True):
    """What one rank takes to code a gradient of so many numbers, alone on its core."""

    codec: Annotated[str, says("Its kind and the keys that matter, as `shoal.codec.costs.label` writes them.")]
    numbers: Positive
    encode_s: Annotated[PositiveFloat, says("Seconds until the first payload can leave.")]
    decode_s: Annotated[
        PositiveFloat, says("Seconds of decoding one payload; of a linear codec, of all that follows its sums.")
    ]


class Calibration(Table, frozen=True):
    """All that is known of one machine."""

    machine: Annotated[str, says("Processor or GPU, and how many of them.")]
    torch: str
    collectives: tuple[CollectiveFit, ...] = ()
    products: tuple[MatrixProduct, ...] = ()
    operators: tuple[OperatorTime, ...] = ()
    waits: tuple[Wait, ...] = ()
    crowds: tuple[Crowd, ...] = ()
    codecs: tuple[CodecTime, ...] = ()
    memory_bytes_s: Annotated[
        PositiveFloat | None, says("Bytes per second that one rank copies, read and written.")
    ] = None

    step_factor: Annotated[
        PositiveFloat | None,
        says(
            "Measured over predicted seconds of the one step on which this machine was calibrated: the crowds', alone."
        ),
    ] = None

    def fit(self, backend: str, operation: str, ranks: int, *, dtype: str = "float32") -> CollectiveFit | None:
        """The fit of these on one host, or None where it was not measured."""
        wanted = (backend, operation, ranks, 1, dtype)
        return next((one for one in self.collectives if one.key == wanted), None)

    def joined(self, newer: Calibration) -> Calibration:
        """Everything of both; what both have is taken from `newer`, except where its fit is through fewer sizes."""
        fits = {one.key: one for one in self.collectives}
        fits |= {one.key: one for one in newer.collectives if one.sizes >= fits.get(one.key, one).sizes}
        products = {(p.dtype, p.m, p.n, p.k, p.ranks): p for p in (*self.products, *newer.products)}
        codecs = {c.codec: c for c in (*self.codecs, *newer.codecs)}
        times = {(o.operator, o.dtype, o.m, o.n, o.k, o.ranks): o for o in (*self.operators, *newer.operators)}
        return Calibration(
            machine=newer.machine,
            torch=newer.torch,
            collectives=tuple(fits.values()),
            products=tuple(products.values()),
            operators=tuple(times.values()),
            waits=newer.waits or self.waits,
            crowds=newer.crowds or self.crowds,
            codecs=tuple(codecs.values()),
            memory_bytes_s=newer.memory_bytes_s or self.memory_bytes_s,
            step_factor=newer.step_factor or self.step_factor,
        )
