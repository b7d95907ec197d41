"""What the host uses, as measurements of a step: gauges as they are, counters as rates since the figures before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from shoal.observe.host_usage import Metric, WithHostFigures, figures, summed
from shoal.observe.sink import Sink


def counter(name: str, value: float, **labels: str) -> tuple[Metric, float]:
    return Metric(f"shoal_host_{name}", "counter", tuple(labels.items())), value


def gauge(name: str, value: float, **labels: str) -> tuple[Metric, float]:
    return Metric(f"shoal_host_{name}", "gauge", tuple(labels.items())), value


def test_counters_become_rates_and_gauges_stay() -> None:
    """Over 4 s: 3 of 4 processor seconds used, 400 bytes sent by two interfaces and none counted of loopback's."""
    before = summed(
        [
            counter("cpu_seconds", 10.0, mode="user"), counter("cpu_seconds", 5.0, mode="system"),
            counter("cpu_seconds", 90.0, mode="idle"), counter("network_sent_bytes", 100.0, interface="eth0"),
            counter("network_sent_bytes", 9.0, interface="lo"), counter("network_sent_bytes", 50.0, interface="ib0"),
        ]
    )  # fmt: skip
    after = summed(
        [
            counter("cpu_seconds", 12.0, mode="user"), counter("cpu_seconds", 6.0, mode="system"),
            counter("cpu_seconds", 91.0, mode="idle"), counter("network_sent_bytes", 300.0, interface="eth0"),
            counter("network_sent_bytes", 9e9, interface="lo"), counter("network_sent_bytes", 250.0, interface="ib0"),
            gauge("memory_bytes", 64.0), gauge("gpu_power_watts", 300.0, gpu="1"),
        ]
    )  # fmt: skip
    assert dict(figures(after, None, time_s=5.0)) == {"host/memory_bytes": 64.0, "host/gpu1/power_watts": 300.0}
    found = dict(figures(after, (1.0, before), time_s=5.0))
    assert found["host/cpu"] == pytest.approx(0.75)
    assert found["host/network_sent_bytes_per_s"] == pytest.approx(100.0)


class Heard(Sink):
    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}

    def record(self, step: int, values: Mapping[str, float], *, time_s: float) -> None:
        self.steps[step] = dict(values)


def test_steps_get_the_figures_so_often_and_no_oftener(tmp_path: Path) -> None:
    """By the time of the steps; each measurement of the run reaches the sink as it was."""
    heard = Heard()
    sink = WithHostFigures(heard, tmp_path, every_s=10.0)
    for step, time_s in enumerate((0.0, 9.9, 10.0, 12.0, 25.0), 1):
        sink.record(step, {"lr": float(step)}, time_s=1e9 + time_s)
    assert [step for step, values in heard.steps.items() if "host/memory_bytes" in values] == [1, 3, 5]
    assert [values["lr"] for values in heard.steps.values()] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert "host/network_sent_bytes_per_s" not in heard.steps[1]
