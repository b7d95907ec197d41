"""Table `[gradients]`: how gradients are packed into buckets, and in which order buckets leave. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shoal.config.check import Table, says

NEAR_BUCKET_BYTES, FAR_BUCKET_BYTES = 25 << 20, 8 << 20


class GradientsConfig(Table, frozen=True):
    """Gradients are packed into flat buckets, which leave the rank while the backward still runs."""

    bucket_bytes: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=1 << 31)] | None,
        says(
            "Size of a bucket. Default: 25 MiB between GPUs and on one host, where fewer calls pay; 8 MiB between "
            "hosts, where smaller buckets overlap more of the backward."
        ),
    ] = None
    first_bucket_bytes: Annotated[
        int, says("Size of the bucket that is ready first; small, so that sending starts early.", ge=1, le=1 << 31)
    ] = 1 << 20
    bucket: Annotated[
        Literal["fixed", "auto"],
        says(
            "auto: the first steps try buckets of 1 MiB and more in turn; the fastest size stays until the link "
            "changes (sync.kind = allreduce on CPUs), and is saved in checkpoints. bucket_bytes is then unused. On "
            "three or more ranks over Gloo another size sums in another order, so a resumed run that searches again "
            "does not go on to the bit."
        ),
    ] = "fixed"
    schedule: Annotated[
        Literal["order", "priority"],
        says(
            "order: buckets leave as the backward fills them, and the step waits for all. priority: the gradients that "
            "the next forward needs first leave first, and each module waits for its own alone; only with "
            "layout.replicate, and without clipping."
        ),
    ] = "order"
    partition_bytes: Annotated[
        int, says("With schedule = priority: the largest partition, before a codec.", ge=1, le=1 << 31)
    ] = 1 << 20
    credit_bytes: Annotated[
        int, says("With schedule = priority: the most bytes on the wire at once.", ge=1, le=1 << 31)
    ] = 4 << 20

    @property
    def bucket_size(self) -> int:
        """In bytes."""
        return NEAR_BUCKET_BYTES if self.bucket_bytes is None else self.bucket_bytes

    def between_hosts(self) -> GradientsConfig:
        """The same for CPU ranks on several hosts."""
        return msgspec.structs.replace(self, bucket_bytes=FAR_BUCKET_BYTES) if self.bucket_bytes is None else self
