"""What a program codes on the wire, as data: the tables of a run file that say so, and what was measured of them."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.codec.config import BlockwiseConfig, CastConfig, CodecConfig, NoCodec, ShardCodecConfig
from shoal.topology.calibration import CodecTime

UNCODED, WHOLE_PIECES = NoCodec(), ShardCodecConfig()


@dataclass(frozen=True, kw_only=True)
class Codecs:
    """`gradients` codes sums over replicas, in buckets of `bucket_bytes`; `pieces` what ZeRO's ranks send each other;
    `stages` activations and their gradients between pipeline stages. `times` were measured on such a device.
    """

    gradients: CodecConfig = UNCODED
    pieces: ShardCodecConfig = WHOLE_PIECES
    stages: CastConfig | BlockwiseConfig | None = None
    bucket_bytes: float = 25 * 2**20
    times: tuple[CodecTime, ...] = ()


NOTHING_CODED = Codecs()
