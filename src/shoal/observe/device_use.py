"""How well a rank's device is used: MFU and HFU, the load, the power and the energy of a token.

    MFU = model FLOPs of a step / (peak x seconds of the step),   HFU with what is computed again (arXiv:2205.05198)

FLOPs are those that this rank was seen to compute in one step (`observe.profile.first_step`), in proportion to the
samples of each. The peak is that of the data sheet, dense, at the precision of the run, or what the run file says.
Load, memory, power and energy are NVML's of this rank's own GPU, read at most every `EVERY_S` seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shoal.observe.host_usage import GpuUsage
from shoal.observe.profile.first_step import StepOperations

EVERY_S = 5.0


@dataclass(frozen=True)
class Peak:
    """Operations a second of a device, and where the figure is from; None: nobody knows."""

    flops_s: float | None
    source: str


class OwnGpu:
    """The GPU of this `uuid` ("GPU-..."), by `usage`; `ranks` train together, each on one.

    Joules of a token are those of this GPU since the reading before, taken for each rank's.
    """

    def __init__(self, usage: GpuUsage, uuid: str, *, ranks: int) -> None:
        self._usage, self._uuid, self._ranks = usage, uuid, ranks
        self._read_s, self._first_j = -math.inf, None
        self._before: tuple[float, float] | None = None

    @property
    def missing(self) -> str | None:
        """A sentence where nothing can be read."""
        if self._usage.of_uuid(self._uuid):
            return None
        return "NVML, which comes with NVIDIA's driver, tells nothing of this GPU: its load and energy are not measured"

    def figures(self, tokens: float | None, *, now_s: float) -> dict[str, float]:
        """What is measured where it is time for it. `tokens`: those of the whole run so far; None: it counts none."""
        if now_s - self._read_s < EVERY_S:
            return {}
        self._read_s, found = now_s, self._usage.of_uuid(self._uuid)
        figures = {f"gpu/{name}": value for name, value in found.items()}
        energy_j = figures.pop("gpu/energy_joules", None)
        if energy_j is None:
            return figures
        self._first_j = energy_j if self._first_j is None else self._first_j
        figures["gpu/energy_joules"] = energy_j - self._first_j
        if tokens is not None and self._before is not None and tokens > self._before[0]:
            figures["gpu/joules_per_token"] = (energy_j - self._before[1]) * self._ranks / (tokens - self._before[0])
        self._before = None if tokens is None else (tokens, energy_j)
        return figures


class DeviceUse:
    """What a step adds to its measurements. `work` gives what one step of this rank was seen to do, None before;
    `told` is called with it once. `gpu`: None where the rank computes on no GPU of NVIDIA's.
    """

    def __init__(
        self,
        work: Callable[[], StepOperations | None],
        peak: Peak,
        *,
        told: Callable[[StepOperations], None],
        ranks: int,
        gpu: OwnGpu | None = None,
    ) -> None:
        self._work, self._peak, self._told, self._ranks, self._gpu = work, peak, told, ranks, gpu
        self._seen: StepOperations | None = None
        self._samples = 0.0

    def figures(self, values: Mapping[str, float], *, samples: float, now_s: float) -> dict[str, float]:
        """`values` are the step's measurements, `samples` those of all ranks in it."""
        found = {} if self._gpu is None else self._gpu.figures(values.get("tokens/consumed"), now_s=now_s)
        if self._gpu is not None and (rate := values.get("throughput/tokens_per_second")) is not None:
            found["throughput/tokens_per_second_per_gpu"] = rate / self._ranks
        if self._seen is None and (seen := self._work()) is not None:
            self._seen, self._samples = seen, samples
            self._told(seen)
            return found  # a step that was looked at is no measure of speed
        counts = self._seen is not None and self._seen.hardware_flops > 0 and self._samples > 0
        if self._seen is not None and counts and self._peak.flops_s and values["time/step"] > 0:
            share = samples / self._samples / (values["time/step"] * self._peak.flops_s)
            found |= {"throughput/mfu": self._seen.model_flops * share}
            found |= {"throughput/hfu": self._seen.hardware_flops * share}
        return found
