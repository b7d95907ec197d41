"""Pieces of parameters and gradients that live on the host, and the updates that the host makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from shoal.memory.spill_file import aligned_buffer
from shoal.memory.streamed_state import Part, State, StreamedState
from shoal.memory.traffic import Traffic


class HostPieces:
    """Allocates them outside of the device, and counts what comes and goes."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros on the host, one-dimensional."""
        size_bytes = numel * dtype.itemsize
        return aligned_buffer(max(1, size_bytes), torch.device("cpu"))[:size_bytes].view(dtype)

    def fetched(self, size_bytes: int) -> None:
        """A piece of parameters came to the device."""
        self._traffic.add(to_device_bytes=size_bytes)

    def kept(self, size_bytes: int) -> None:
        """A piece of gradients left it."""
        self._traffic.add(to_host_bytes=size_bytes)


class HostUpdates:
    """The home of the state of parameters that are on the host themselves: nothing moves but to and from `disk`.

    `on_host` is around what the host computes.
    """

    part_bytes: int

    def __init__(
        self, on_host: Callable[[], AbstractContextManager[None]], disk: StreamedState | None, *, part_bytes: int
    ) -> None:
        self._on_host, self._disk, self.part_bytes = on_host, disk, part_bytes

    def stream(self, parts: Sequence[Part], state: State) -> None:
        """Runs all updates in order."""
        with self._on_host():
            if self._disk is not None:
                self._disk.stream(parts, state)
                return
            for part in parts:
                part.update()

    def put_away(self, state: State) -> None:
        """Takes to the disk what a checkpoint was read into."""
        if self._disk is not None:
            self._disk.put_away(state)

    def close(self) -> None:
        """Ends the disk's threads, and frees its space."""
        if self._disk is not None:
            self._disk.close()
