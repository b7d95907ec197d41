"""What the host uses, for the exporters that get steps: TensorBoard, MLflow, Weights & Biases.

Prometheus asks for the same figures by itself (`host_usage`, `gpu_usage`). Here they are read in the exporter's own
thread, at most every `EVERY_S` seconds, and a counter becomes the rate since the figures before: `host/cpu` is the
share of the processors' time that was used, `host/network_sent_bytes_per_s` all interfaces' bytes but loopback's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from shoal.observe.ending import Ending
from shoal.observe.gpu_usage import GpuUsage
from shoal.observe.host_usage import PROC, host_usage
from shoal.observe.metric_names import Metric
from shoal.observe.sink import RunStart, Sink

EVERY_S = 10.0
_IDLE = ("idle", "iowait")
Figures = Iterable[tuple[Metric, float]]


class WithHostFigures(Sink):
    """Passes a run on to `sink`, and adds the host's figures to a step every `every_s` seconds."""

    def __init__(self, sink: Sink, run_directory: Path, *, every_s: float = EVERY_S, proc: Path = PROC) -> None:
        self._sink, self._directory, self._every_s, self._proc = sink, run_directory, every_s, proc
        self._gpus = GpuUsage()
        self._last: tuple[float, dict[str, float]] | None = None

    def start(self, run: RunStart) -> None:
        self._sink.start(run)

    def record(self, step: int, values: Mapping[str, float], *, time_s: float) -> None:
        if self._last is None or time_s - self._last[0] >= self._every_s:
            sums = summed((*host_usage(self._directory, self._proc), *self._gpus.figures()))
            found = dict(figures(sums, self._last, time_s=time_s))
            self._last = (time_s, sums)
            values = {**values, **found}
        self._sink.record(step, values, time_s=time_s)

    def finish(self, ending: Ending) -> None:
        self._sink.finish(ending)


def summed(found: Figures) -> dict[str, float]:
    """Values by name, added up over disks, over interfaces but loopback, and over what processors do; GPUs apart."""
    sums: dict[str, float] = {}
    for metric, value in found:
        labels = dict(metric.labels)
        name = metric.name.removeprefix("shoal_").removeprefix("host_")
        if labels.get("interface") == "lo":
            continue
        if "mode" in labels:
            name = "cpu_idle" if labels["mode"] in _IDLE else "cpu_busy"
        if "gpu" in labels:
            name = f"gpu{labels['gpu']}/{name.removeprefix('gpu_')}"
        sums[name] = sums.get(name, 0.0) + value
    return sums


def figures(
    sums: Mapping[str, float], last: tuple[float, Mapping[str, float]] | None, *, time_s: float
) -> Iterator[tuple[str, float]]:
    """The measurements of these sums at `time_s`, `last` being the time and the sums of the look before."""
    for name, value in sums.items():
        if name.startswith("gpu") or name in ("memory_bytes", "memory_available_bytes", "run_directory_free_bytes"):
            yield f"host/{name}", value
    if last is None or time_s <= last[0]:
        return
    grown = {name: value - last[1].get(name, value) for name, value in sums.items()}
    busy, all_s = grown.get("cpu_busy", 0.0), grown.get("cpu_busy", 0.0) + grown.get("cpu_idle", 0.0)
    if all_s > 0:
        yield "host/cpu", busy / all_s
    for name in ("network_received_bytes", "network_sent_bytes", "disk_read_bytes", "disk_written_bytes"):
        if name in grown:
            yield f"host/{name}_per_s", grown[name] / (time_s - last[0])
