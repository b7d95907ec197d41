"""Which codecs `shoal bench codec` measures; seconds of coding one bucket, as predictions use them; their place in this
machine's calibration.

A codec that is not linear is timed encoding and decoding one payload. A linear one is timed through a sum of one rank:
until its first payload can leave, and from there to the residual and the result.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.codec.codec import Codec
    from shoal.topology.calibration import Calibration


WARM_UP = 2
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
"""What `shoal bench codec` measures, by the names that its tables print."""


def coding_times(one: Codec, gradient: Tensor, calls: int) -> tuple[float, float]:
    """(encode, decode) seconds of `gradient` `[numel]`, the medians of `calls`."""
    if one.linear:
        found = [_of_a_sum(one, gradient) for _ in range(WARM_UP + calls)][WARM_UP:]
        encode, decode = (statistics.median(column) for column in zip(*found, strict=True))
        return encode, decode
    payload = one.encode(gradient, key=1)
    return (
        median_s(lambda: one.encode(gradient, key=1), calls),
        median_s(lambda: one.decode(payload, gradient.numel(), key=1), calls),
    )


def _of_a_sum(one: Codec, gradient: Tensor) -> tuple[float, float]:
    import torch

    x, total = gradient.clone(), torch.empty_like(gradient)
    begin_s = time.perf_counter()
    rounds = one.summing_into(x, total, key=1, residual=True)
    next(rounds)
    sent_s = time.perf_counter()
    for _ in rounds:
        """Alone, a rank's payload is the sum."""
    return sent_s - begin_s, time.perf_counter() - sent_s


def median_s(call: Callable[[], object], calls: int, *, warm_up: int = WARM_UP) -> float:
    """Of `calls` calls, after some that do not count."""
    for _ in range(warm_up):
        call()
    return statistics.median(seconds_of(call) for _ in range(calls))


def seconds_of(call: Callable[[], object]) -> float:
    """Of one call."""
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


def keep_times(times: Mapping[str, Mapping[str, float]], configs: Mapping[str, CodecConfig], path: Path) -> Calibration:
    """Adds the seconds of each codec of `configs` to the calibration file at `path`."""
    from shoal.bench.report import machine_facts
    from shoal.codec.costs import label
    from shoal.planning.calibration import add_calibration
    from shoal.topology.calibration import Calibration, CodecTime

    facts = machine_facts()
    codecs: Sequence[CodecTime] = [
        CodecTime(
            codec=label(configs[name]), numbers=int(one["numbers"]), encode_s=one["encode_s"], decode_s=one["decode_s"]
        )
        for name, one in times.items()
    ]
    machine = f"{facts['processor']}, {facts['cores']} cores"
    return add_calibration(path, Calibration(machine=machine, torch=facts["torch"], codecs=tuple(codecs)))
