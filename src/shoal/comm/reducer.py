"""The bucketed gradient reducer: sums gradients over a group while the backward pass still runs.

Note: how a gradient gets into its bucket
-----------------------------------------
Before a step every `.grad` is None, so that autograd hands over a fresh tensor instead of adding into zeros. The hook
that runs after accumulation copies it into the parameter's slice of the bucket and makes `.grad` that slice; later
microbatches then accumulate straight into the bucket. That is one pass over memory less than zeroing and adding.

Note: order
-----------
Buckets leave in one fixed order on every rank: a bucket that is full waits for those before it. Otherwise ranks that
use different parameters would pair different buckets. What the backward did not fill is zero, and leaves at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.comm.buckets import Member, cut
from shoal.comm.collective import Collective, Handle
from shoal.errors import UserCodeError

_ALIGNMENT = 16  # elements: slices start on a cache line


@dataclass
class Bucket:
    """A flat buffer and the slices of it that are gradients. `missing` counts those that are not yet final."""

    flat: Tensor
    slices: dict[int, Tensor]
    missing: int = 0
    handle: Handle | None = None


@dataclass
class Reducer:
    """Sums the gradients of `parameters` over `group`. All parameters are floating point and dense."""

    parameters: Sequence[tuple[str, Parameter]]
    group: Collective | None
    bucket_bytes: int
    first_bucket_bytes: int
    buckets: list[Bucket] = field(init=False)

    def __post_init__(self) -> None:
        members = [
            Member(i, p.numel(), p.numel() * p.element_size(), (p.dtype, p.device))
            for i, (_, p) in enumerate(self.parameters)
        ]
        plan = cut(members, first_bytes=self.first_bucket_bytes, bytes_limit=self.bucket_bytes)
        self.buckets = [self._bucket(bucket) for bucket in plan]
        self._home = {index: bucket for bucket in self.buckets for index in bucket.slices}
        self._filled: set[int] = set()
        self._fired: set[int] = set()
        self._sending, self._next = False, 0
        self._hooks = [p.register_post_accumulate_grad_hook(self._hook(i)) for i, (_, p) in enumerate(self.parameters)]

    def start(self) -> None:
        """Forgets the gradients of the step before."""
        for _, parameter in self.parameters:
            parameter.grad = None
        self._filled.clear()

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """Around the backward of one microbatch; only the last of a step sends."""
        self._sending, self._next = last, 0
        self._fired.clear()
        for bucket in self.buckets:
            bucket.missing, bucket.handle = len(bucket.slices), None
        try:
            yield
        finally:
            self._sending = False

    def finish(self) -> Tensor:
        """Sends what the backward did not fill, waits for all, and leaves every `.grad` a slice of its bucket.

        Returns the 2-norm of the whole gradient, each parameter counted once, in float32 at least, on the device. Each
        bucket's part is computed while those behind it are still on the wire.
        """
        for index, (_, parameter) in enumerate(self.parameters):
            if index not in self._filled:
                self._slice(index).zero_()
                parameter.grad = self._slice(index)
        self._send(self.buckets[self._next :])
        norms = []
        for bucket in self.buckets:
            if bucket.handle is not None:
                bucket.handle.wait()
            norms.append(torch.linalg.vector_norm(bucket.flat))
        return torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms]))

    def scale(self, factor: float | Tensor) -> None:
        """Multiplies every gradient."""
        for bucket in self.buckets:
            bucket.flat.mul_(factor)

    def close(self) -> None:
        """Takes the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _bucket(self, members: Sequence[Member]) -> Bucket:
        starts, end = [], 0
        for member in members:
            starts.append(end)
            end += -(-member.numel // _ALIGNMENT) * _ALIGNMENT
        dtype, device = members[0].kind  # type: ignore[misc]
        flat = torch.zeros(end, dtype=dtype, device=device)
        views = {
            member.index: flat[start : start + member.numel].view_as(self.parameters[member.index][1])
            for member, start in zip(members, starts, strict=True)
        }
        return Bucket(flat, views)

    def _slice(self, index: int) -> Tensor:
        return self._home[index].slices[index]

    def _hook(self, index: int):
        def filled(parameter: Parameter) -> None:
            self._take(index, parameter)
            if index in self._fired:
                raise UserCodeError(
                    f"the gradient of {self.parameters[index][0]} was ready twice in one backward, as it is when a "
                    "parameter is used in several reentrant checkpoints; checkpoint with use_reentrant=False"
                )
            self._fired.add(index)
            if self._sending:
                bucket = self._home[index]
                bucket.missing -= 1
                if bucket.missing == 0:
                    self._send_full()

        return filled

    def _take(self, index: int, parameter: Parameter) -> None:
        gradient, place = parameter.grad, self._slice(index)
        if gradient is None or gradient.data_ptr() == place.data_ptr():
            return
        if gradient.is_sparse:
            name = self.parameters[index][0]
            raise UserCodeError(
                f"the gradient of {name} is sparse; gradients must be dense: build the module with sparse=False"
            )
        place.copy_(gradient) if index not in self._filled else place.add_(gradient)
        parameter.grad = place
        self._filled.add(index)

    def _send_full(self) -> None:
        while self._next < len(self.buckets) and self.buckets[self._next].missing <= 0:
            self._send(self.buckets[self._next : self._next + 1])

    def _send(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            bucket.handle = self.group.all_reduce(bucket.flat) if self.group is not None else None
            self._next += 1
