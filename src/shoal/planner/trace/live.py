"""Bytes that are alive at each moment of a trace: what an eager program would hold, storage by storage.

Fake tensors die when real ones would, so that the timeline of their storages is that of an allocator without
fragmentation. It holds what autograd keeps, what a recomputed block keeps of its inputs, and temporaries between
operators; scratch memory inside of an operator it does not see.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Alive:
    """Counts storages from their first sight to their end; those of `apart` never."""

    bytes: int = 0
    peak_bytes: int = 0
    peak_by_unit: dict[int | None, int] = field(default_factory=dict)
    _living: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    _apart: set[int] = field(default_factory=set)
    _kept_bytes: int = 0
    _kept: set[int] = field(default_factory=set)

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """These are no activations: parameters, gradients, inputs. They must outlive the trace."""
        self._apart |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def see(self, tensor: Tensor, unit: int | None) -> None:
        """A tensor that came out of an operator of `unit`."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._apart or key in self._living or not size:
            return
        self._living[key] = (size, unit)
        weakref.finalize(storage, self._end, key, size)
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        new = self.bytes - self._kept_bytes
        self.peak_by_unit[unit] = max(self.peak_by_unit.get(unit, 0), new)

    def keep(self) -> dict[int | None, int]:
        """Bytes by unit that are alive now, at the end of a forward: from here on, what is new is counted apart."""
        held: dict[int | None, int] = {}
        for size, unit in self._living.values():
            held[unit] = held.get(unit, 0) + size
        self._kept, self._kept_bytes = set(self._living), self.bytes
        self.peak_by_unit = {}
        return held

    def _end(self, key: int, size: int) -> None:
        del self._living[key]
        self.bytes -= size
        if key in self._kept:
            self._kept.discard(key)
            self._kept_bytes -= size
