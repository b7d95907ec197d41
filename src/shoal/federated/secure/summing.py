"""From updates to vectors that can be summed in secret, and from their sum to one mean update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from shoal.errors import EnvironmentFault
from shoal.federated.config import FederatedConfig, PrivacyConfig, SecureAggregationConfig
from shoal.federated.secure.in_process import play
from shoal.federated.secure.masks import Quantiser
from shoal.federated.secure.server import SecureServer
from shoal.federated.strategy import Update

SUM = "sum"
"""What the mean of a cohort is called where a client's name would stand."""


def quantiser_for(secure: SecureAggregationConfig, config: FederatedConfig, samples: Mapping[str, int]) -> Quantiser:
    """For a cohort whose `samples` by client are known. Raises `ConfigError` where sums have no room."""
    weight = sum(samples.values()) if config.by_samples else len(samples)
    quantiser = Quantiser(secure.bits, secure.clip, max(1, weight))
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
) -> Update:
    """The mean update of a cohort in a simulation, by the protocol itself. Raises `EnvironmentFault` where it fails."""
    samples = {update.client: update.samples for update in updates}
    quantiser = quantiser_for(secure, config, samples)
    server = SecureServer(
        secure,
        tuple(sorted(samples)),
        session=f"simulated round {version}".encode(),
        numel=updates[0].delta.numel() + 1,
        dtype=quantiser.dtype,
        least=max(2, config.least_contributions),
        phase_s=config.deadline_s,
        now_s=0.0,
    )
    norm = largest_norm_of(privacy)
    play(server, {u.client: encoded(u, quantiser, config, largest_norm=norm) for u in updates})
    if server.phase != "summed":
        raise EnvironmentFault(f"round {version + 1} has no sum: {server.reason}")
    like = updates[0].delta
    return mean_update(server.total, quantiser, version=version, contributors=len(server.contributors), like=like)
