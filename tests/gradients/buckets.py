"""Buckets over one group, for tests of what fills and sends them."""

from __future__ import annotations

from collections.abc import Iterable

from torch.nn import Parameter

from shoal.comm.collective import Collective
from shoal.comm.exchanges.exchange import AllReduce
from shoal.gradients.bucket import Bucket, parts_by_size
from shoal.gradients.replicated import replicated_bucket
from shoal.state import Trained
from shoal.topology.holding import held
from shoal.topology.layout import Layout


def replicated(parameters: Iterable[tuple[str, Parameter]], *, rank: int = 0, size: int = 1) -> list[Trained]:
    """The parameters of replicas of one rank."""
    layout = Layout(replicate=size)
    return [Trained(held(layout, rank, name, tuple(p.shape)), p) for name, p in parameters]


def buckets_over(
    parameters: Iterable[tuple[str, Parameter]], group: Collective, *, bucket_bytes: int, first_bucket_bytes: int
) -> list[Bucket]:
    """Every gradient summed over `group`."""
    trained = replicated(parameters, rank=group.rank, size=group.size)
    parts = parts_by_size(
        trained, lambda holding: holding.sums, bytes_limit=bucket_bytes, first_bytes=first_bucket_bytes, divided=False
    )
    return [replicated_bucket(trained, part, group, AllReduce) for part in parts]
