"""Table `[sync]`: how replicas agree."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shoal.comm.algorithms.config import Algorithm
from shoal.comm.backends import Transport
from shoal.config.table import Table, says

NEAR_BUCKET_BYTES, FAR_BUCKET_BYTES = 25 << 20, 8 << 20


class AllReduce(Table, frozen=True, tag_field="kind", tag="allreduce"):
    """Every step, the replicas' gradients are summed by all-reduce, bucket by bucket, while the backward still runs."""

    bucket_bytes: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=1 << 31)] | None,
        says(
            "Size of a gradient bucket. Default: 25 MiB between GPUs and on one host, where fewer calls pay; 8 MiB "
            "between hosts, where more of them hide behind the backward."
        ),
    ] = None
    first_bucket_bytes: Annotated[
        int, says("Size of the bucket that is ready first; small, so that sending starts early.", ge=1, le=1 << 31)
    ] = 1 << 20
    bucket: Annotated[
        Literal["fixed", "auto"],
        says(
            "auto: the first steps try buckets of 1 MiB and more in turn, and the fastest size stays, in checkpoints "
            "too; bucket_bytes is then not used."
        ),
    ] = "fixed"
    schedule: Annotated[
        Literal["order", "priority"],
        says(
            "order: gradients leave as the backward fills buckets, and the step waits for all. priority: those first "
            "that the next forward needs first, which waits for its own alone; goes together with layout.replicate, "
            "and with no clipping."
        ),
    ] = "order"
    partition_bytes: Annotated[
        int, says("Under schedule = priority: the most bytes that leave at once.", ge=1, le=1 << 31)
    ] = 1 << 20
    credit_bytes: Annotated[
        int, says("Under schedule = priority: the most bytes that are on the wire.", ge=1, le=1 << 31)
    ] = 4 << 20
    transport: Annotated[
        Transport,
        says(
            "How ranks without GPUs talk: over Gloo, shared memory, shared memory inside hosts and Gloo between them "
            "(hierarchical), or MPI. auto: shared memory where all of a group are on one host; else MPI where mpiexec "
            "started them; else hierarchical, or Gloo where no two share a host."
        ),
    ] = "auto"
    algorithm: Annotated[
        Algorithm,
        says(
            "How groups over Gloo make collectives: as Gloo does (backend), by what is cheapest on the links as "
            "measured at the start (auto; the next run may add in another order), or all-reduces by one algorithm."
        ),
    ] = "backend"

    @property
    def bucket_size(self) -> int:
        """In bytes."""
        return NEAR_BUCKET_BYTES if self.bucket_bytes is None else self.bucket_bytes

    def between_hosts(self) -> AllReduce:
        """The same for ranks on several hosts without GPUs."""
        return msgspec.structs.replace(self, bucket_bytes=FAR_BUCKET_BYTES) if self.bucket_bytes is None else self


SyncConfig = AllReduce
