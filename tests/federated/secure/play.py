"""A server of secure aggregation as the tests ask for it."""

from __future__ import annotations

from shoal.federated.config import SecureAggregationConfig
from shoal.federated.secure.masks import Quantiser
from shoal.federated.secure.server import SecureServer

SESSION, PHASE_S = b"round 0", 10.0


def server_for(
    names: list[str], *, numel: int, least: int = 2, neighbours: int | None = None, threshold: float = 0.67
) -> SecureServer:
    quantiser = Quantiser(bits=20, clip=1.0, most_weight=len(names))
    return SecureServer(
        SecureAggregationConfig(neighbours=neighbours, threshold=threshold),
        tuple(names),
        session=SESSION,
        numel=numel,
        dtype=quantiser.dtype,
        least=least,
        phase_s=PHASE_S,
        now_s=0.0,
    )
