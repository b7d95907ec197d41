"""Table `[codec]`: what gradients become on the wire between ranks that sum them. Imports no torch.

A new codec is its class, its table here, and its bytes in `costs.py` (docs/architecture.md, "How to add").
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from shoal.config.check import PositiveFloat, Table, says

MOMENT_BLOCK = 256
"""Numbers of a moment in 8 bits that share a scale (`moments.py`)."""

_FEEDBACK = (
    "Error feedback: what was not sent is added to the next gradient, and kept in checkpoints. Costs twice the "
    "gradient's memory."
)
_BLOCK = "Numbers that share a scale."
_FRACTION = "The part of each bucket's numbers that is sent."


class _Codec(Table, frozen=True):
    """What every codec says of itself.

    of_all_ranks: ranks choose or compute together what they send, so that one which pushes alone cannot use it.
    """

    of_all_ranks: ClassVar[bool] = False

    @property
    def codes_matrices(self) -> bool:
        """Whether it codes whole matrices, so that ZeRO may not cut them in the middle."""
        return False


class NoCodec(_Codec, frozen=True, tag_field="kind", tag="none"):
    """Gradients are sent as they are."""

    feedback: ClassVar[bool] = False


class CastConfig(_Codec, frozen=True, tag_field="kind", tag="cast"):
    """Numbers of fewer bits, rounded to nearest."""

    implemented_by: ClassVar[str] = "shoal.codec.quantise:Cast"

    dtype: Annotated[
        Literal["bfloat16", "float16", "float8_e4m3", "float8_e5m2"],
        says("The format on the wire; all but bfloat16 with a scale for each block."),
    ] = "bfloat16"
    block: Annotated[int, says(_BLOCK, ge=8, le=1 << 20)] = 1024
    feedback: Annotated[bool, says(_FEEDBACK)] = True


class BlockwiseConfig(_Codec, frozen=True, tag_field="kind", tag="blockwise"):
    """Integers of 8 or 4 bits, with a scale for each block."""

    implemented_by: ClassVar[str] = "shoal.codec.quantise:Blockwise"

    bits: Annotated[Literal[8, 4], says("Bits of a number.")] = 8
    rounding: Annotated[
        Literal["nearest", "stochastic"], says("nearest: the smaller error. stochastic: right on average.")
    ] = "nearest"
    block: Annotated[int, says(_BLOCK, ge=8, le=1 << 20)] = 1024
    feedback: Annotated[bool, says(_FEEDBACK)] = True

    def __post_init__(self) -> None:
        # E|x - y|^2 <= block s^2 / 4 and |x|^2 >= (levels s)^2: residuals shrink where the first is below the second.
        most = 4 * self.levels**2 - 1
        if self.rounding == "stochastic" and self.feedback and self.block > most:
            raise ValueError(
                f'block = {self.block} with bits = {self.bits}, rounding = "stochastic" and feedback = true: what was '
                f'not sent could grow without end; set block to {most} or less, or rounding = "nearest"'
            )

    @property
    def levels(self) -> int:
        """The largest integer on the wire."""
        return (1 << (self.bits - 1)) - 1


class SignConfig(_Codec, frozen=True, tag_field="kind", tag="sign"):
    """One bit for each number: its sign, with a scale for each block."""

    implemented_by: ClassVar[str] = "shoal.codec.quantise:Sign"

    block: Annotated[int, says(_BLOCK, ge=8, le=1 << 20)] = 1024
    feedback: Annotated[bool, says(_FEEDBACK)] = True


class TopKConfig(_Codec, frozen=True, tag_field="kind", tag="top_k"):
    """The numbers of largest magnitude, 6 bytes each."""

    implemented_by: ClassVar[str] = "shoal.codec.top_k:TopK"

    fraction: Annotated[float, says(_FRACTION, gt=0, le=1)] = 0.01
    selection: Annotated[
        Literal["exact", "sampled"],
        says(
            "exact: the largest of all. sampled: those above a threshold that a sample tells, so many at most; two "
            "passes over memory."
        ),
    ] = "exact"
    feedback: Annotated[bool, says(_FEEDBACK)] = True


class DGCConfig(_Codec, frozen=True, tag_field="kind", tag="dgc"):
    """The largest numbers of velocities (Deep Gradient Compression), for `optimizer.kind = "sgd"` without momentum.

    With momentum correction, factor masking, local clipping and a warm-up.
    """

    implemented_by: ClassVar[str] = "shoal.codec.top_k:DGC"
    of_all_ranks: ClassVar[bool] = True
    feedback: ClassVar[bool] = True

    fraction: Annotated[float, says(_FRACTION, gt=0, le=1)] = 0.001
    selection: Annotated[Literal["exact", "sampled"], says("As for top_k.")] = "sampled"
    momentum: Annotated[float, says("Momentum of each rank's velocity, in the optimizer's place.", ge=0, lt=1)] = 0.9
    clip_norm: Annotated[
        PositiveFloat | None,
        says("Each rank's part of a bucket is clipped to this norm over the root of the number of ranks that encode."),
    ] = None
    warmup_steps: Annotated[
        int, says("First steps, in which 25 %, 6.25 %, ... of the numbers are sent, down to `fraction`.", ge=0)
    ] = 0


class BlockTopKConfig(_Codec, frozen=True, tag_field="kind", tag="block_top_k"):
    """The blocks of largest norm, whole: 4 bytes a number, and 4 a block."""

    implemented_by: ClassVar[str] = "shoal.codec.top_k:BlockTopK"

    fraction: Annotated[float, says("The part of each bucket's blocks that is sent.", gt=0, le=1)] = 0.01
    block: Annotated[int, says("Numbers in a block.", ge=2, le=1 << 16)] = 64
    feedback: Annotated[bool, says(_FEEDBACK)] = True


class ScaleComConfig(_Codec, frozen=True, tag_field="kind", tag="scale_com"):
    """Numbers at the places where one rank's are largest (ScaleCom), which are summed on the way.

    It is another rank in each step.
    """

    implemented_by: ClassVar[str] = "shoal.codec.top_k:ScaleCom"
    of_all_ranks: ClassVar[bool] = True

    fraction: Annotated[float, says(_FRACTION, gt=0, le=1)] = 0.01
    feedback: Annotated[bool, says(_FEEDBACK)] = True


class DCTTopKConfig(_Codec, frozen=True, tag_field="kind", tag="dct_top_k"):
    """The largest frequencies of every chunk (DeMo), 5 bytes each."""

    implemented_by: ClassVar[str] = "shoal.codec.top_k:DCTTopK"

    chunk: Annotated[int, says("Numbers that are transformed together.", ge=2, le=256)] = 64
    kept: Annotated[int, says("Frequencies of a chunk that are sent.", ge=1, le=256)] = 4
    feedback: Annotated[bool, says(_FEEDBACK)] = True

    def __post_init__(self) -> None:
        if self.kept > self.chunk:
            raise ValueError(
                f"kept = {self.kept} with chunk = {self.chunk}: a chunk has as many frequencies as numbers; set kept "
                f"to {self.chunk} or less"
            )


class RandomKConfig(_Codec, frozen=True, tag_field="kind", tag="random_k"):
    """Numbers at random places, the same on all ranks, which are summed on the way."""

    implemented_by: ClassVar[str] = "shoal.codec.top_k:RandomK"

    fraction: Annotated[
        float, says("The part of each bucket's numbers that is sent; 1 / fraction is rounded.", gt=0, le=1)
    ] = 0.1
    feedback: Annotated[bool, says(_FEEDBACK + " Without it what is sent is scaled up, so that it is unbiased.")] = True


class QSGDConfig(_Codec, frozen=True, tag_field="kind", tag="qsgd"):
    """Random levels between zero and a block's 2-norm (QSGD); unbiased, and so without error feedback."""

    implemented_by: ClassVar[str] = "shoal.codec.quantise:QSGD"
    feedback: ClassVar[bool] = False

    bits: Annotated[Literal[8, 4], says("Bits of a level and its sign.")] = 8
    block: Annotated[int, says(_BLOCK, ge=8, le=1 << 20)] = 512


class TernGradConfig(_Codec, frozen=True, tag_field="kind", tag="terngrad"):
    """-1, 0 or 1 at random for each number, with a scale for each block (TernGrad).

    Unbiased, and so without error feedback.
    """

    implemented_by: ClassVar[str] = "shoal.codec.quantise:TernGrad"
    feedback: ClassVar[bool] = False

    block: Annotated[int, says(_BLOCK, ge=8, le=1 << 20)] = 256


class PowerSGDConfig(_Codec, frozen=True, tag_field="kind", tag="power_sgd"):
    """Every matrix as a product of two thin ones (PowerSGD), which are summed on the way."""

    implemented_by: ClassVar[str] = "shoal.codec.power_sgd:PowerSGD"
    of_all_ranks: ClassVar[bool] = True

    rank: Annotated[int, says("Columns of a thin matrix.", ge=1, le=256)] = 4
    feedback: Annotated[bool, says(_FEEDBACK)] = True

    @property
    def codes_matrices(self) -> bool:
        return True


class ACPSGDConfig(_Codec, frozen=True, tag_field="kind", tag="acp_sgd"):
    """PowerSGD's thin matrices in turn, one in each step (ACP-SGD): one sum, half the bytes."""

    implemented_by: ClassVar[str] = "shoal.codec.power_sgd:ACPSGD"
    of_all_ranks: ClassVar[bool] = True

    rank: Annotated[int, says("Columns of a thin matrix.", ge=1, le=256)] = 4
    feedback: Annotated[bool, says(_FEEDBACK)] = True

    @property
    def codes_matrices(self) -> bool:
        return True


class AutoConfig(_Codec, frozen=True, tag_field="kind", tag="auto"):
    """A codec or none, whichever costs least on the measured links; it follows links that change."""

    feedback: ClassVar[bool] = True
    of_all_ranks: ClassVar[bool] = True

    candidates: Annotated[
        tuple[Literal["bfloat16", "float8", "int8", "int4", "sign", "top_k", "power_sgd", "acp_sgd"], ...],
        says("What it chooses from, beside none; each with its defaults."),
    ] = ("bfloat16", "int8", "power_sgd")
    measure_every: Annotated[
        int, says("Steps from a measurement of the links to the next; later ones are rarer.", ge=1, le=100_000)
    ] = 5
    most_growth: Annotated[
        float,
        says(
            "A codec is set aside when what it has not sent, over the gradient, has grown by so many times since it "
            "settled.",
            gt=1,
        ),
    ] = 4.0

    def __post_init__(self) -> None:
        if not self.candidates or len({*self.candidates}) < len(self.candidates):
            raise ValueError(
                f"candidates = {[*self.candidates]}: there must be one at least, and each once; leave the key out for "
                "the usual ones"
            )

    @property
    def codecs(self) -> dict[str, _Codec]:
        """The candidates by name."""
        return {name: _CANDIDATES[name] for name in self.candidates}

    @property
    def codes_matrices(self) -> bool:
        return any(codec.codes_matrices for codec in self.codecs.values())


_CANDIDATES: dict[str, _Codec] = {
    "bfloat16": CastConfig(),
    "float8": CastConfig(dtype="float8_e4m3"),
    "int8": BlockwiseConfig(),
    "int4": BlockwiseConfig(bits=4),
    "sign": SignConfig(),
    "top_k": TopKConfig(selection="sampled"),
    "power_sgd": PowerSGDConfig(),
    "acp_sgd": ACPSGDConfig(),
}


class ShardCodecConfig(Table, frozen=True):
    """What the ranks of `layout.shard` send each other under ZeRO (ZeRO++), rounded to nearest in blocks."""

    weights: Annotated[
        Literal["none", "bfloat16", "int8"],
        says(
            "Parameters that ZeRO-3 gathers, on the wire. Ranks compute with the rounded numbers, and the optimizer "
            "updates the exact ones."
        ),
    ] = "none"
    gradients: Annotated[
        Literal["none", "bfloat16", "int8", "int4"],
        says("Terms of a gradient on their way to the rank that adds them up; without error feedback."),
    ] = "none"
    block: Annotated[int, says("Integers that share a scale.", ge=8, le=1 << 20)] = 256

    def codec(self, what: Literal["weights", "gradients"]) -> CastConfig | BlockwiseConfig | None:
        """The codec of pieces of `what`; None: they are sent as they are."""
        choice = self.weights if what == "weights" else self.gradients
        if choice == "none":
            return None
        if choice == "bfloat16":
            return CastConfig(dtype="bfloat16", feedback=False)
        return BlockwiseConfig(bits=8 if choice == "int8" else 4, block=self.block, feedback=False)


CodecConfig = (
    NoCodec
    | AutoConfig
    | CastConfig
    | BlockwiseConfig
    | SignConfig
    | TopKConfig
    | DGCConfig
    | BlockTopKConfig
    | ScaleComConfig
    | DCTTopKConfig
    | RandomKConfig
    | QSGDConfig
    | TernGradConfig
    | PowerSGDConfig
    | ACPSGDConfig
)
