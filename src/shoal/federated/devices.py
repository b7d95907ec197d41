"""What simulated clients are: speeds and links, drawn for each client from the run's seed, and when they drop out.

    step time   step_s exp(step_spread z),   rates   bytes_per_s exp(link_spread z),   z standard normal

A round of a client takes latency + bytes / down rate + steps x step time + latency + bytes / up rate. Log-normal speeds
are what measurements of phones show (FedScale, arXiv:2105.11367, section 3.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from shoal.federated.config import DeviceConfig
from shoal.maths.counter import key_of, normal, uniform


@dataclass(frozen=True)
class Device:
    """One client's speed and link."""

    step_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    latency_s: float

    def round_s(self, *, steps: int, down_bytes: int, up_bytes: int) -> float:
        """Seconds from the call for a model to the arrival of the update."""
        on_the_way_s = 2 * self.latency_s + down_bytes / self.down_bytes_per_s + up_bytes / self.up_bytes_per_s
        return on_the_way_s + steps * self.step_s


def device_of(config: DeviceConfig, client: str, *, seed: int) -> Device:
    """The device of a client, always the same."""
    if not (config.step_spread or config.link_spread):
        return Device(config.step_s, config.up_bytes_per_s, config.down_bytes_per_s, config.latency_s)
    z = normal(key_of(seed, "device", client), torch.arange(3), dtype=torch.float64).tolist()
    return Device(
        step_s=config.step_s * math.exp(config.step_spread * z[0]),
        up_bytes_per_s=config.up_bytes_per_s * math.exp(config.link_spread * z[1]),
        down_bytes_per_s=config.down_bytes_per_s * math.exp(config.link_spread * z[2]),
        latency_s=config.latency_s,
    )


def drops_out(config: DeviceConfig, client: str, *, seed: int, version: int, number: int) -> bool:
    """Whether a client is lost in this piece of work."""
    if not config.dropout:
        return False
    drawn = uniform(key_of(seed, "dropout", client, version, number), torch.zeros(1, dtype=torch.int64))
    return float(drawn) < config.dropout
