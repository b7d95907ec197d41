"""What a codec states of itself before anything is encoded, without torch: bytes on the wire, passes over memory.

    payload      bytes of what one rank hands to a collective, exactly those of `Codec.wire_bytes`; for a linear codec,
                 those of each all-reduce of a sum
    passes       how often coding reads or writes as many bytes as the float32 vector has

Passes are those of kernels that touch every number as seldom as the codec allows: divided by the rate of memory they
are a lower bound of the seconds. `shoal bench codec` measures the seconds themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from shoal.codec.config import (
    ACPSGDConfig,
    BlockTopKConfig,
    BlockwiseConfig,
    CastConfig,
    CodecConfig,
    DCTTopKConfig,
    DGCConfig,
    PowerSGDConfig,
    QSGDConfig,
    RandomKConfig,
    ScaleComConfig,
    SignConfig,
    TernGradConfig,
    TopKConfig,
)

ALIGNMENT_BYTES = 8
"""Packed payloads are multiples of it, so that every tensor in a row of payloads begins where its dtype may."""
RUN = 1 << 16
"""Numbers whose places share the high bits (`top_k.pack_indices`)."""
FLOAT, PLACE = 4, 2


class Matrices(NamedTuple):
    """`copies` matrices of one shape in a vector; a mean over ranks that hold different ones may be no whole number."""

    rows: int
    columns: int
    copies: float = 1


class Stated(NamedTuple):
    """Of one vector. `payloads` has one entry for each all-reduce of a linear codec, else that of the one payload.

    What a linear codec does when a sum has come (its second product, its residual) counts as decoding.
    """

    payloads: tuple[float, ...]
    linear: bool
    encode_passes: float
    decode_passes: float


def stated(config: CodecConfig, numel: int, matrices: Sequence[Matrices] = ()) -> Stated:
    """Of a vector of `numel` in which `matrices` lie. Raises `KeyError` for a table that is no codec of its own."""
    return _STATEMENTS[type(config)](config, numel, matrices)


def is_stated(config: CodecConfig) -> bool:
    """Whether the table is a codec of its own, and not none or a choice between several."""
    return type(config) in _STATEMENTS


NO_MATTER = frozenset(("feedback", "block", "warmup_steps", "momentum", "clip_norm"))
"""Keys that do not change the seconds of coding by much."""


def label(config: CodecConfig) -> str:
    """The kind, and the keys on which the seconds of coding depend: what a measured rate is kept under."""
    keys = msgspec.to_builtins(config)
    return " ".join([keys.pop("kind"), *(f"{key}={value}" for key, value in keys.items() if key not in NO_MATTER)])


def _packed(*parts: float) -> tuple[float, ...]:
    """One payload, filled up as `pack` does."""
    return (-(-sum(parts) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES,)


def _scales(numel: int, block: int) -> int:
    return FLOAT * -(-numel // block)


def kept(fraction: float, numel: int) -> int:
    """`fraction` of `numel` numbers: one at least, if there is any."""
    return min(numel, max(1, round(fraction * numel)))


def _cast(config: CastConfig, numel: int, matrices: Sequence[Matrices]) -> Stated:
    size = 1 if config.dtype.startswith("float8") else 2
    scales = 0 if config.dtype == "bfloat16" else _scales(numel, config.block)
    return Stated(_packed(size * numel, scales), False, 1 + size / FLOAT, 1 + size / FLOAT)


def _digits(bits: int, numel: int, block: int) -> Stated:
    each = 8 // bits
    return Stated(_packed(_scales(numel, block), -(-numel // each)), False, 1 + bits / 32, 1 + bits / 32)


def _blockwise(config: BlockwiseConfig | QSGDConfig, numel: int, matrices: Sequence[Matrices]) -> Stated:
    return _digits(config.bits, numel, config.block)


def _sign(config: SignConfig, numel: int, matrices: Sequence[Matrices]) -> Stated:
    return _digits(1, numel, config.block)


def _terngrad(config: TernGradConfig, numel: int, matrices: Sequence[Matrices]) -> Stated:
    return Stated(_packed(_scales(numel, config.block), -(-numel // 5)), False, 1.05, 1.05)


def _indices(numel: int, count: int) -> int:
    return FLOAT * -(-numel // RUN) + PLACE * count


def _top_k(config: TopKConfig | DGCConfig, numel: int, matrices: Sequence[Matrices]) -> Stated:
    """One pass looks for what is not finite, one selects."""
    count = kept(config.fraction, numel)
    return Stated(_packed(FLOAT * count, _indices(numel, count)), False, 2.0, 1.0)


def _block_top_k(config: BlockTopKConfig, numel: int, matrices: Sequence[Matrices]) -> Stated:
    count = kept(config.fraction, -(-numel // config.block))
    return Stated(_packed(FLOAT * count * config.block, FLOAT * count), False, 2.0, 1.0)


def _dct_top_k(config: DCTTopKConfig, numel: int, matrices: Sequence[Matrices]) -> Stated:
    """Both directions write all frequencies; decoded numbers are rounded to a grid."""
    count = -(-numel // config.chunk) * config.kept
    return Stated(_packed(FLOAT * count, count), False, 6.0, 9.0)


def _random_k(config: RandomKConfig, numel: int, matrices: Sequence[Matrices]) -> Stated:
    return Stated((FLOAT * -(-numel // max(1, round(1 / config.fraction))),), True, 1.0, 7.0)


def _scale_com(config: ScaleComConfig, numel: int, matrices: Sequence[Matrices]) -> Stated:
    count = kept(config.fraction, numel)
    return Stated((_indices(numel, count), FLOAT * count), True, 2.0, 7.0)


def _thin(rank: int, matrices: Sequence[Matrices]) -> tuple[float, float, float]:
    """(rows, columns, numbers) in all of the matrices that two thin ones make smaller."""
    used = [m for m in matrices if rank * (m.rows + m.columns) < m.rows * m.columns]
    return (
        sum(m.copies * m.rows for m in used),
        sum(m.copies * m.columns for m in used),
        sum(m.copies * m.rows * m.columns for m in used),
    )


def _power_sgd(config: PowerSGDConfig, numel: int, matrices: Sequence[Matrices]) -> Stated:
    """P and what is in no matrix, then Q. One product encodes; the other, residual and result follow."""
    rows, columns, inside = _thin(config.rank, matrices)
    payloads = (FLOAT * (config.rank * rows + numel - inside), FLOAT * config.rank * columns)
    return Stated(payloads, True, 1.0, 4.0)


def _acp_sgd(config: ACPSGDConfig, numel: int, matrices: Sequence[Matrices]) -> Stated:
    """P and Q in turn: the mean of two sums."""
    rows, columns, inside = _thin(config.rank, matrices)
    return Stated((FLOAT * (config.rank * (rows + columns) / 2 + numel - inside),), True, 1.0, 11.0)


_STATEMENTS: Mapping[type[CodecConfig], Callable[[Any, int, Sequence[Matrices]], Stated]] = {
    CastConfig: _cast,
    BlockwiseConfig: _blockwise,
    QSGDConfig: _blockwise,
    SignConfig: _sign,
    TernGradConfig: _terngrad,
    TopKConfig: _top_k,
    DGCConfig: _top_k,
    BlockTopKConfig: _block_top_k,
    DCTTopKConfig: _dct_top_k,
    RandomKConfig: _random_k,
    ScaleComConfig: _scale_com,
    PowerSGDConfig: _power_sgd,
    ACPSGDConfig: _acp_sgd,
}
