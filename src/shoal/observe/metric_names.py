"""The names of the measurements in Prometheus: `loss/train` is `shoal_loss_train`, times end in `_seconds`.

Units and suffixes follow https://prometheus.io/docs/practices/naming/. What is per step in the events (bytes sent,
checkpoint stall) adds up to a counter, so that `rate()` gives it per second whatever the scraping interval.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_LOADS = re.compile(r"moe/load/(.+)/(\d+)")
_LAYER = re.compile(r"grad/norm/(.+)")
_WIRE = re.compile(r"wire/([a-z_]+)/(bytes_sent|exposed_s|hidden_s)")
_COUNTED = {
    "wire/bytes_sent": "shoal_wire_sent_bytes",
    "wire/inside_bytes": "shoal_wire_inside_bytes",
    "wire/between_bytes": "shoal_wire_between_bytes",
    "time/checkpoint_stall": "shoal_checkpoint_stall_seconds",
}
_COUNTED_PARTS = {
    "bytes_sent": "shoal_collective_sent_bytes",
    "exposed_s": "shoal_collective_exposed_seconds",
    "hidden_s": "shoal_collective_hidden_seconds",
}


@dataclass(frozen=True)
class Metric:
    """A name without `_total`, which the exposition of a counter adds; labels beside `run` and `rank`."""

    name: str
    kind: Literal["gauge", "counter"]
    labels: tuple[tuple[str, str], ...] = ()


def metric_of(measurement: str) -> Metric:
    """The metric of a measurement of the events, known or the user's own."""
    if measurement in _COUNTED:
        return Metric(_COUNTED[measurement], "counter")
    if match := _WIRE.fullmatch(measurement):
        return Metric(_COUNTED_PARTS[match[2]], "counter", (("collective", match[1]),))
    if match := _LOADS.fullmatch(measurement):
        return Metric("shoal_moe_load_tokens", "gauge", (("mixture", match[1]), ("expert", match[2])))
    if match := _LAYER.fullmatch(measurement):
        return Metric("shoal_grad_norm_layer", "gauge", (("layer", match[1]),))
    words = re.sub(r"[^a-zA-Z0-9]+", "_", measurement).strip("_")
    seconds = measurement.startswith("time/") or measurement.endswith("_s")
    return Metric(f"shoal_{words.removesuffix('_s')}" + ("_seconds" if seconds else ""), "gauge")
