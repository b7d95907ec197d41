"""A round of secure aggregation between the two state machines in one process: for simulations, tests, benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from shoal.federated.secure.client import SecureClient
from shoal.federated.secure.messages import Roster, Sealed, Survivors
from shoal.federated.secure.server import SecureServer

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
