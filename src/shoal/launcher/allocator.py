"""How much freed memory a CPU rank keeps for its next step, where the allocator is glibc's.

Left to itself, glibc gives freed activations back to the kernel, which clears their pages again for the next step:
31,000 page faults a second in a rank that trains a small GPT. Two thresholds decide. Blocks below `mmap_bytes` come
from the heap, and the heap keeps up to `trim_bytes` of free memory at its end.

What a rank keeps, others cannot have. So the ranks of a host together keep an eighth of its memory at most, and each
1 GiB at most. Source: mallopt(3), M_TRIM_THRESHOLD and M_MMAP_THRESHOLD.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import NamedTuple

from shoal import units

TRIM, MMAP = "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"
MOST_TRIM_BYTES, MOST_MMAP_BYTES = 1 << 30, 32 << 20  # glibc takes no larger M_MMAP_THRESHOLD
GLIBC_BYTES = 128 << 10
"""glibc's own value of both."""
SHARE = 8
"""One part in so many of the host's memory is kept by all its ranks, and one part in so many of that is one block."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


class Thresholds(NamedTuple):
    """In bytes."""

    trim_bytes: int
    mmap_bytes: int


def thresholds(memory_bytes: int | None, *, ranks: int) -> Thresholds:
    """Of each of `ranks` that share `memory_bytes` of memory (None: not known, and taken for plenty)."""
    share = MOST_TRIM_BYTES if memory_bytes is None else memory_bytes // (SHARE * ranks)
    trim = max(GLIBC_BYTES, min(MOST_TRIM_BYTES, share))
    return Thresholds(trim, max(GLIBC_BYTES, min(MOST_MMAP_BYTES, trim // SHARE)))


def variables(chosen: Thresholds) -> dict[str, str]:
    """The environment in which glibc takes them when a process starts."""
    return {TRIM: str(chosen.trim_bytes), MMAP: str(chosen.mmap_bytes)}


def is_chosen(environ: Mapping[str, str]) -> bool:
    """Whether the user has told glibc how to allocate; nothing is added to that."""
    return bool({TRIM, MMAP} & set(environ)) or "glibc.malloc" in environ.get("GLIBC_TUNABLES", "")


def described(chosen: Thresholds, environ: Mapping[str, str]) -> str:
    """What a CPU rank's allocator does, in a clause; `chosen` where `environ` says nothing."""
    if _glibc() is None:
        return "as the C library has it"
    if "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return f"GLIBC_TUNABLES={environ['GLIBC_TUNABLES']}"
    given = {name: environ[name] for name in (TRIM, MMAP) if name in environ}
    if not all(map(str.isdecimal, given.values())):
        return " ".join(f"{name}={value}" for name, value in given.items())
    defaults = (GLIBC_BYTES, GLIBC_BYTES) if given else chosen
    trim, mmap = (int(given.get(name, own)) for name, own in zip((TRIM, MMAP), defaults, strict=True))
    return f"glibc keeps {units.memory_size(trim)} of freed memory, blocks below {units.memory_size(mmap)} in the heap"


def keep_freed_memory(chosen: Thresholds, environ: Mapping[str, str]) -> bool:
    """Gives this process `chosen`, from now on. False where it keeps what it has: the allocator is not glibc's, or
    `environ` has set it already.
    """
    library = _glibc()
    if library is None or is_chosen(environ):
        return False
    trimmed = library.mallopt(_M_TRIM_THRESHOLD, chosen.trim_bytes)
    return bool(library.mallopt(_M_MMAP_THRESHOLD, chosen.mmap_bytes) and trimmed)


def _glibc() -> ctypes.CDLL | None:
    """The C library of this process, where it is glibc."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None


def keep_memory(environ: Mapping[str, str]) -> None:
    """What glibc is told of freed memory by this environment when it starts; a user's own numbers that are no decimals
    it was told when this process began.
    """
    trim, mmap = environ.get(TRIM, ""), environ.get(MMAP, "")
    if trim.isdecimal() and mmap.isdecimal():
        keep_freed_memory(Thresholds(int(trim), int(mmap)), {})
