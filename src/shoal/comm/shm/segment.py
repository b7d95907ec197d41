"""Segments: memory of one process that the other ranks of its host map too.

A segment is an anonymous file (memfd): it has no name that could leak or be guessed, and it is gone with the last
process that maps it. Its size is sealed, so that no peer can truncate it under a reader. Descriptors are needed only to
pass a segment on; a mapping outlives them.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

from shoal.comm.shm.core import Core


def create_segment(size_bytes: int, *, name: str = "shoal") -> int:
    """The descriptor of a new segment of zeros. The kernel allocates each page when it is first written.

    `name` appears in a process's list of mappings only: nobody can open a segment by it.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


class MappedSegment:
    """A segment in this process's memory, unmapped when it is dropped, unless the core takes it over.

    Raises `OSError` where it cannot be mapped.
    """

    def __init__(self, core: Core, descriptor: int, size_bytes: int) -> None:
        self.address = core.shoal_map(descriptor, size_bytes)
        if self.address is None:
            raise OSError(f"cannot map {size_bytes} shared bytes: no memory, or ranks run different versions")
        self._unmap = weakref.finalize(self, core.shoal_unmap, self.address, size_bytes)
        self._unmap.atexit = False

    def hand_over(self) -> int:
        """The address, for the core, which unmaps it."""
        self._unmap.detach()
        return self.address


def window_name() -> str:
    """The name of the segments that this process gives out as memory for tensors (`Transport.allocate`)."""
    return f"shoal-window-{os.getpid()}"


def window_bytes() -> int:
    """Bytes of tensor memory that this process has allocated in segments and still maps, in whole pages."""
    found = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [fields[0] for fields in found if len(fields) == 6 and fields[5].split()[0] == f"/memfd:{window_name()}"]
    return sum(int(stop, 16) - int(start, 16) for start, _, stop in (span.partition("-") for span in spans))
