"""The codecs that `shoal bench codec` compares, by the names that its tables print. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

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

CODECS: Mapping[str, CodecConfig] = {
    "bfloat16": CastConfig(),
    "float16": CastConfig(dtype="float16"),
    "float8_e4m3": CastConfig(dtype="float8_e4m3"),
    "float8_e5m2": CastConfig(dtype="float8_e5m2"),
    "int8": BlockwiseConfig(),
    "int4": BlockwiseConfig(bits=4, block=64),
    "qsgd": QSGDConfig(),
    "terngrad": TernGradConfig(),
    "sign": SignConfig(block=64),
    "top_k": TopKConfig(),
    "top_k_sampled": TopKConfig(selection="sampled"),
    "dgc": DGCConfig(fraction=0.01, warmup_steps=40),
    "dgc_0.1%": DGCConfig(fraction=0.001, warmup_steps=40),
    "block_top_k": BlockTopKConfig(),
    "dct_top_k": DCTTopKConfig(),
    "random_k": RandomKConfig(fraction=0.01),
    "scale_com": ScaleComConfig(),
    "power_sgd": PowerSGDConfig(),
    "power_sgd_2": PowerSGDConfig(rank=2),
    "acp_sgd": ACPSGDConfig(),
}
