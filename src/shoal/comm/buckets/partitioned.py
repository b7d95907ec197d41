"""A bucket that leaves in partitions, each when its turn comes: what is urgent need not wait for all of a large one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.comm.buckets.credit import CreditQueue
from shoal.comm.buckets.summed import Summand, SummedBucket, summed_buckets


@dataclass(kw_only=True)
class PartitionedBucket(SummedBucket):
    """`partitions` are the numbers of its parts in `queue`; `filled_s` when the last round had filled it."""

    queue: CreditQueue
    partitions: Sequence[int]
    filled_s: float = field(default=0.0, init=False)

    def send(self) -> None:
        """Tells the queue that it is filled."""
        self.filled_s = time.perf_counter()
        self.queue.fill(self.partitions)

    def wait(self) -> None:
        """Returns when every slice is the sum."""
        self.queue.wait(self.partitions)


def partitioned_buckets(
    summands: Sequence[Summand], queue: CreditQueue, *, partition_bytes: int
) -> list[PartitionedBucket]:
    """Small parameters share one partition, a large one has several; none is longer than `partition_bytes`."""
    whole = summed_buckets(summands, bucket_bytes=partition_bytes, first_bucket_bytes=partition_bytes)
    return [_partitioned(bucket, queue, partition_bytes) for bucket in whole]


def _partitioned(bucket: SummedBucket, queue: CreditQueue, partition_bytes: int) -> PartitionedBucket:
    numel = max(1, partition_bytes // bucket.flat.element_size())
    partitions = [queue.add(part) for part in bucket.flat.split(numel)]
    return PartitionedBucket(
        bucket.flat, bucket.slices, bucket.group, bucket.counted, queue=queue, partitions=partitions
    )
