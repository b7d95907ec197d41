"""Every codec, in the forms that the tests go through."""

from __future__ import annotations

from shoal.codec.codec import Codec
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
from shoal.config.check import implementation_of

BLOCK = 16
"""Short, so that vectors of a few dozen numbers have several blocks and a last one that is not full."""

CONFIGS: dict[str, CodecConfig] = {
    "bfloat16": CastConfig(dtype="bfloat16"),
    "float16": CastConfig(dtype="float16", block=BLOCK),
    "float8_e4m3": CastConfig(dtype="float8_e4m3", block=BLOCK),
    "float8_e5m2": CastConfig(dtype="float8_e5m2", block=BLOCK),
    "int8": BlockwiseConfig(bits=8, block=BLOCK),
    "int4": BlockwiseConfig(bits=4, block=BLOCK),
    "int8 stochastic": BlockwiseConfig(bits=8, rounding="stochastic", block=BLOCK),
    "int4 stochastic": BlockwiseConfig(bits=4, rounding="stochastic", block=BLOCK),
    "sign": SignConfig(block=BLOCK),
    "top_k": TopKConfig(fraction=0.1),
    "top_k sampled": TopKConfig(fraction=0.1, selection="sampled"),
    "dgc": DGCConfig(fraction=0.1),
    "block_top_k": BlockTopKConfig(fraction=0.2, block=4),
    "scale_com": ScaleComConfig(fraction=0.1),
    "dct_top_k": DCTTopKConfig(chunk=16, kept=3),
    "random_k": RandomKConfig(fraction=0.25),
    "random_k unbiased": RandomKConfig(fraction=0.25, feedback=False),
    "qsgd 8": QSGDConfig(bits=8, block=BLOCK),
    "qsgd 4": QSGDConfig(bits=4, block=BLOCK),
    "terngrad": TernGradConfig(block=BLOCK),
    "power_sgd": PowerSGDConfig(rank=1),
    "acp_sgd": ACPSGDConfig(rank=1),
}


def codec_of(name: str) -> Codec:
    """The codec of `CONFIGS[name]`."""
    return implementation_of(CONFIGS[name])(CONFIGS[name])
