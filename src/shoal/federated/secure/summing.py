"""From updates to vectors that can be summed in secret, and from their sum to one mean update.

    quantised   q = round(v / clip (2^(bits-1) - 1)),   v cut to [-clip, clip]

The sum of n such numbers, each times a whole weight, is exact as long as it stays below half the modulus. `play` plays
a round between the two state machines in one process, for simulations, tests and benchmarks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shoal.errors import ConfigError, EnvironmentFault
from shoal.federated.config import FederatedConfig, PrivacyConfig, SecureAggregationConfig
from shoal.federated.privacy.accountants import Skellam
from shoal.federated.privacy.mechanisms import LEAST_MEAN, Uniform, simulated_uniform, skellam, uniform_from_entropy
from shoal.federated.secure.client import SecureClient
from shoal.federated.secure.messages import Roster, Sealed, Survivors
from shoal.federated.secure.server import SecureServer
from shoal.federated.strategy import Update

PHASES = ("keys", "shares", "vectors", "secrets")


def play(
    server: SecureServer,
    vectors: Mapping[str, np.ndarray],
    *,
    lost: Mapping[str, str] = {},
    make: Callable[..., SecureClient] = SecureClient,
    on_vector: Callable[[str, np.ndarray], object] = lambda *_: None,
) -> dict[str, SecureClient]:
    """Plays the round with a client for each of `vectors`, made by `make`; returns them. A client of `lost` says
    nothing from that phase on. `on_vector` sees what each uploads.
    """
    clients = {name: make(name, server.session, least=server.least) for name in vectors}
    gone: set[str] = set()
    now_s = 0.0
    for phase in PHASES:
        gone |= {name for name, when in lost.items() if when == phase}
        for name, client in clients.items():
            if name not in gone and server.phase == phase:
                _speak(server, name, client, vectors[name], on_vector, now_s)
        if not server.over and server.phase == phase:
            now_s += 2 * server.phase_s  # the deadline
            server.tick(now_s)
    return clients


def _speak(
    server: SecureServer,
    name: str,
    client: SecureClient,
    vector: np.ndarray,
    on_vector: Callable[[str, np.ndarray], object],
    now_s: float,
) -> None:
    match server.message_for(name):
        case None:
            server.take_keys(name, client.keys(), now_s)
        case Roster() as roster:
            server.take_shares(name, client.shares(roster), now_s)
        case Sealed() as sealed:
            masked = client.masked(sealed, vector)
            on_vector(name, masked)
            server.take_vector(name, masked, now_s)
        case Survivors() as survivors:
            server.take_secrets(name, client.revealed(survivors), now_s)


SUM = "sum"
"""What the mean of a cohort is called where a client's name would stand."""


@dataclass(frozen=True)
class Quantiser:
    """`most_weight`: the largest sum of all clients' weights. `noise`: what each client adds for privacy."""

    bits: int
    clip: float
    most_weight: int
    noise: ClientNoise | None = None

    @property
    def levels(self) -> int:
        """The largest quantised number."""
        return (1 << (self.bits - 1)) - 1

    @property
    def dtype(self) -> np.dtype:
        """uint32 where the sum fits, else uint64. Raises `ConfigError` where it fits neither."""
        room = 0 if self.noise is None else self.noise.largest
        bits = (self.levels * self.most_weight + room).bit_length() + 1
        if bits > 64:
            raise ConfigError(
                f"secure_aggregation.bits = {self.bits} with clients of {self.most_weight} samples in all: their sum "
                'has more than 64 bits; lower bits, or set federated.weights = "equal"'
            )
        return np.dtype(np.uint32 if bits <= 32 else np.uint64)

    def encode(self, values: np.ndarray, weight: int) -> np.ndarray:
        """`values` (real [numel]) as numbers modulo 2^32 or 2^64, and the weight behind them: [numel + 1]."""
        whole = np.rint(np.clip(values, -self.clip, self.clip) * (self.levels / self.clip)).astype(np.int64)
        if self.noise is not None:
            whole += self.noise.draw(whole.size)
        return np.append(whole * weight, weight).astype(np.int64).astype(self.dtype)

    def decode(self, total: np.ndarray) -> tuple[np.ndarray, int]:
        """The weighted mean (float64 [numel]) and the sum of the weights, from the sum of encoded vectors."""
        signed = total.view(np.int32 if total.dtype.itemsize == 4 else np.int64).astype(np.int64)
        weight = int(signed[-1])
        return signed[:-1] * (self.clip / self.levels / max(1, weight)), weight


@dataclass(frozen=True)
class ClientNoise:
    """Each client adds Skellam noise of two Poisson numbers of `mean`; the noise of a sum is below `largest`."""

    mean: float
    largest: int
    source: Uniform

    def draw(self, numel: int) -> np.ndarray:
        """int64 [numel]."""
        return skellam(numel, self.mean, self.source).numpy()


def skellam_of(
    privacy: PrivacyConfig | None, secure: SecureAggregationConfig | None, config: FederatedConfig, *, numel: int
) -> Skellam | None:
    """The noise of the smallest sum that counts; None where clients add none."""
    if privacy is None or secure is None or privacy.noise_by != "clients":
        return None
    scale = ((1 << (secure.bits - 1)) - 1) / secure.clip
    norm2 = privacy.clip * scale + math.sqrt(numel) / 2
    return Skellam((privacy.noise * norm2) ** 2, min(math.sqrt(numel) * norm2, norm2**2), norm2)


def noise_of_clients(
    privacy: PrivacyConfig | None,
    secure: SecureAggregationConfig,
    config: FederatedConfig,
    *,
    numel: int,
    source: Uniform = uniform_from_entropy,
) -> ClientNoise | None:
    """What each client adds, so that the fewest that may make a sum add all of it. Raises `ConfigError` for updates
    that are quantised too coarsely for it."""
    whole = skellam_of(privacy, secure, config, numel=numel)
    if whole is None:
        return None
    fewest = fewest_in_sum(config)
    mean = whole.variance / 2 / fewest
    if mean < LEAST_MEAN:
        raise ConfigError(
            f"secure_aggregation.bits = {secure.bits}: the noise of a client would have a variance of {2 * mean:.3g} "
            f"steps, and must have {2 * LEAST_MEAN:g}; raise bits, or lower secure_aggregation.clip"
        )
    return ClientNoise(mean, math.ceil(12 * math.sqrt(2 * mean * config.clients)), source)


def fewest_in_sum(config: FederatedConfig) -> int:
    """Of fewer clients there is no sum."""
    return max(2, config.least_contributions)


def quantiser_for(
    secure: SecureAggregationConfig,
    config: FederatedConfig,
    samples: Mapping[str, int],
    *,
    noise: ClientNoise | None = None,
) -> Quantiser:
    """For a cohort whose `samples` by client are known. Raises `ConfigError` where sums have no room."""
    weight = sum(samples.values()) if config.by_samples else len(samples)
    quantiser = Quantiser(secure.bits, secure.clip, max(1, weight), noise)
    assert quantiser.dtype  # it has room
    return quantiser


def encoded(
    update: Update, quantiser: Quantiser, config: FederatedConfig, *, largest_norm: float | None = None
) -> np.ndarray:
    """What the client of `update` masks: its change, cut to a norm where there is a largest, and its weight,
    [numel + 1]."""
    delta = update.delta.double()
    if largest_norm is not None:
        delta = delta * min(1.0, largest_norm / max(float(delta.norm()), 1e-300))
    return quantiser.encode(delta.numpy(), update.samples if config.by_samples else 1)


def largest_norm_of(privacy: PrivacyConfig | None) -> float | None:
    """The norm to which clients cut their updates themselves, because nobody else sees them."""
    return privacy.clip if privacy is not None and privacy.unit == "client" else None


def clipped_part(update: Update, secure: SecureAggregationConfig) -> float:
    """The part of an update's numbers that are cut to `secure_aggregation.clip`."""
    return float((update.delta.abs() > secure.clip).double().mean())


def mean_update(
    total: np.ndarray, quantiser: Quantiser, *, version: int, contributors: int, like: torch.Tensor
) -> Update:
    """The mean of a cohort, from the sum of what its clients encoded, as one update. Raises `EnvironmentFault` for a
    weight that no honest cohort has."""
    mean, weight = quantiser.decode(total)
    if not contributors <= weight <= quantiser.most_weight:
        raise EnvironmentFault(
            f"the sum of {contributors} clients has weight {weight}, and at most {quantiser.most_weight} can be: a "
            "client lied about its samples; the round does not count"
        )
    return Update(SUM, version, weight, torch.from_numpy(mean).to(like.dtype), contributors=contributors)


def secure_mean(
    secure: SecureAggregationConfig,
    config: FederatedConfig,
    privacy: PrivacyConfig | None,
    updates: Sequence[Update],
    *,
    version: int,
    seed: int,
) -> Update:
    """The mean update of a cohort in a simulation, by the protocol itself. Raises `EnvironmentFault` where it fails."""
    samples = {update.client: update.samples for update in updates}
    source = simulated_uniform(seed, "clients", version)
    noise = noise_of_clients(privacy, secure, config, numel=updates[0].delta.numel(), source=source)
    quantiser = quantiser_for(secure, config, samples, noise=noise)
    server = SecureServer(
        secure,
        tuple(sorted(samples)),
        session=f"simulated round {version}".encode(),
        numel=updates[0].delta.numel() + 1,
        dtype=quantiser.dtype,
        least=fewest_in_sum(config),
        phase_s=config.deadline_s,
        now_s=0.0,
    )
    norm = largest_norm_of(privacy)
    play(server, {u.client: encoded(u, quantiser, config, largest_norm=norm) for u in updates})
    if server.phase != "summed":
        raise EnvironmentFault(f"round {version + 1} has no sum: {server.reason}")
    like = updates[0].delta
    return mean_update(server.total, quantiser, version=version, contributors=len(server.contributors), like=like)
