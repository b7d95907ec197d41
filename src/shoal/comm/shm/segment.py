"""A segment: memory of one process that others map too.

It is an anonymous file (memfd): it has no name that could leak or be guessed, and it is gone with the last process that
maps it. Its size is sealed, so that no peer can cut it away under a reader. Descriptors are needed only to pass a
segment on; a map outlives them.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import torch


def create_segment(size_bytes: int, *, name: str = "shoal") -> int:
    """The descriptor of a new segment, full of zeros. Memory is taken page by page as it is first written.

    `name` is for those who look at a process's maps: nobody can open a segment by it.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


def window_name() -> str:
    """What the segments are called that this process gives out as memory for tensors."""
    return f"shoal-window-{os.getpid()}"


def window_bytes() -> int:
    """Bytes of memory for tensors that this process has made in segments and still maps, in whole pages."""
    found = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [fields[0] for fields in found if len(fields) == 6 and fields[5].split()[0] == f"/memfd:{window_name()}"]
    return sum(int(stop, 16) - int(start, 16) for start, _, stop in (span.partition("-") for span in spans))


def map_segment(descriptor: int, size_bytes: int) -> torch.Tensor:
    """The segment as uint8 [size_bytes], unmapped when the last view of it is dropped. Raises `OSError`."""
    found_bytes = os.fstat(descriptor).st_size
    if found_bytes != size_bytes:
        raise OSError(f"a shared segment has {found_bytes} bytes, expected {size_bytes}: ranks run different versions")
    try:
        return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(f"cannot map shared memory: {str(error).splitlines()[0]}") from None
