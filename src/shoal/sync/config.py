"""Table `[sync]`: how replicas agree."""

from __future__ import annotations

from typing import Annotated, Literal

from shoal.config.table import Table, says


class AllReduce(Table, frozen=True, tag_field="kind", tag="allreduce"):
    """Every step, the replicas' gradients are summed by all-reduce, bucket by bucket, while the backward still runs."""

    bucket_bytes: Annotated[int, says("Size of a gradient bucket.", ge=1, le=1 << 31)] = 8 << 20
    first_bucket_bytes: Annotated[
        int, says("Size of the bucket that is ready first; small, so that sending starts early.", ge=1, le=1 << 31)
    ] = 1 << 20
    transport: Annotated[
        Literal["auto", "gloo"],
        says('How ranks without GPUs talk: "auto" is shared memory where all of a group are on one host, else Gloo.'),
    ] = "auto"


SyncConfig = AllReduce
