"""What simulated clients are: their samples, speeds and links, and when they drop out; pure functions of a seed.

    iid            samples dealt out at random
    dirichlet      of each class client i gets the part q_i, q from Dir(concentration)    (arXiv:1909.06335)
    pathological   samples sorted by class, cut into clients x shards runs, dealt out     (arXiv:1602.05629)
    contiguous     the samples in their order, cut into equal runs
    quantity       classes mixed, sizes from Dir(concentration)                           (arXiv:2102.02079)

Every sample goes to exactly one client, and every client has at least one: a client that would have none takes one from
the largest.

    step time   step_s exp(step_spread z),   rates   bytes_per_s exp(link_spread z),   z standard normal

A round of a client takes latency + bytes / down rate + steps x step time + latency + bytes / up rate. Log-normal speeds
are what measurements of phones show (FedScale, arXiv:2105.11367, section 3.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from shoal.data.order import permuted
from shoal.data.sample import Source, Tree, parse_sample
from shoal.errors import ConfigError, DataError
from shoal.federated.config import Contiguous, DeviceConfig, Dirichlet, Iid, PartitionConfig, Pathological, QuantitySkew
from shoal.maths.counter import key_of, normal, uniform


def partition(config: PartitionConfig, *, clients: int, samples: int, classes: np.ndarray | None, seed: int) -> list:
    """Sample ids of each client, a list of `clients` arrays int64. `classes`: int64 [samples], where they are needed.

    Raises `ConfigError` where there are fewer samples than clients.
    """
    if samples < clients:
        raise ConfigError(
            f"federated.clients = {clients} and {samples} training samples: each needs one; lower clients"
        )
    generator = np.random.Generator(np.random.Philox(key=key_of(seed, "partition") % 2**64))
    match config:
        case Iid():
            parts = np.array_split(_mixed(samples, seed), clients)
        case Contiguous():
            parts = np.array_split(np.arange(samples), clients)
        case QuantitySkew():
            parts = _cut(_mixed(samples, seed), generator.dirichlet([config.concentration] * clients))
        case Dirichlet():
            parts = _dirichlet(_known(classes), clients, config.concentration, generator, seed)
        case Pathological():
            parts = _pathological(_known(classes), clients, config.shards, seed)
    return _without_empty([np.sort(np.asarray(part, dtype=np.int64)) for part in parts])


def classes_of(source: Source) -> np.ndarray:
    """The class of every sample, int64 [samples]: its target. Raises `DataError` where targets are no classes."""
    targets: Tree
    if hasattr(source, "samples_at"):
        targets = parse_sample(source.samples_at(np.arange(len(source)))).targets  # type: ignore[attr-defined]
        found = np.asarray(targets)
    else:
        found = np.asarray([np.asarray(parse_sample(source[index]).targets) for index in range(len(source))])
    if found.shape != (len(source),) or found.dtype.kind not in "iub":
        raise DataError(
            f"targets of shape {list(found.shape[1:])} and type {found.dtype} are no classes to divide by: use "
            'partition.kind = "iid" or "quantity"'
        )
    return found.astype(np.int64)


def needs_classes(config: PartitionConfig) -> bool:
    """Whether the partition looks at classes."""
    return isinstance(config, Dirichlet | Pathological)


def _known(classes: np.ndarray | None) -> np.ndarray:
    assert classes is not None, "a partition by class was given none"
    return classes


def _mixed(samples: int, seed: int, *names: int) -> np.ndarray:
    places = np.arange(samples, dtype=np.int64)
    return permuted(places, samples, key="/".join(map(str, (seed, "partition", *names))))


def _cut(ids: np.ndarray, parts: np.ndarray) -> list[np.ndarray]:
    edges = np.rint(np.cumsum(parts)[:-1] * len(ids)).astype(np.int64)
    return np.split(ids, edges)


def _dirichlet(
    classes: np.ndarray, clients: int, concentration: float, generator: np.random.Generator, seed: int
) -> list[np.ndarray]:
    shares: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for kind in np.unique(classes):
        members = np.flatnonzero(classes == kind)
        members = members[_mixed(len(members), seed, int(kind))]
        for client, part in enumerate(_cut(members, generator.dirichlet([concentration] * clients))):
            shares[client].append(part)
    return [np.concatenate(parts) for parts in shares]


def _pathological(classes: np.ndarray, clients: int, shards: int, seed: int) -> list[np.ndarray]:
    runs = np.array_split(np.argsort(classes, kind="stable"), clients * shards)
    dealt = _mixed(clients * shards, seed)
    return [np.concatenate([runs[run] for run in dealt[client::clients]]) for client in range(clients)]


def _without_empty(parts: list[np.ndarray]) -> list[np.ndarray]:
    for client, part in enumerate(parts):
        if not len(part):
            largest = max(range(len(parts)), key=lambda other: len(parts[other]))
            parts[client], parts[largest] = parts[largest][-1:], parts[largest][:-1]
    return parts


@dataclass(frozen=True)
class Device:
    """One client's speed and link."""

    step_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    latency_s: float

    def round_s(self, *, steps: float, down_bytes: int, up_bytes: int) -> float:
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
