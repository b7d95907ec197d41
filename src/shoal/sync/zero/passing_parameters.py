"""Parameters that are whole only while they are used: ZeRO-3.

Each rank keeps its piece. `gather` brings all pieces into one buffer and makes the parameters views of it; `release`
gives the buffer's memory back.

Note: what autograd has saved
-----------------------------
The backward of a product reads the weight that the forward saved, often as a view. The buffer is therefore one storage
that is emptied and filled again, not a new tensor: a saved view sees the numbers of the next `gather`, which are the
same ones, as nothing updates a piece between forward and backward.

Note: a parameter that is read while it is released
---------------------------------------------------
It is NaN in its own shape, and not memory that is gone: the loss shows it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.comm.collective import Collective, Handle
from shoal.sync.zero.flat_layout import FlatLayout
from shoal.sync.zero.flat_parameters import flattened


class PassingParameters:
    """The `parameters` of one unit and kind. They begin released."""

    def __init__(self, parameters: Sequence[Parameter], layout: FlatLayout, shard: Collective) -> None:
        self._parameters, self._layout, self._shard = parameters, layout, shard
        self._whole = flattened(parameters, layout)
        self.piece = self._whole[layout.mine(shard.rank)].clone()
        self._views = [self._whole[layout.slice(n)].view(p.shape) for n, p in enumerate(parameters)]
        nothing = torch.full((), math.nan, dtype=self._whole.dtype, device=self._whole.device)
        self._released = [nothing.expand(p.shape) for p in parameters]
        self._bytes = self._whole.untyped_storage().nbytes()
        self._handle: Handle | None = None
        self.here = True
        self.release()

    def start_gather(self) -> None:
        """Begins to bring the pieces of all ranks."""
        if self.here or self._handle is not None:
            return
        self._whole.untyped_storage().resize_(self._bytes)
        self._handle = self._shard.all_gather(self._whole, self.piece)

    def gather(self) -> None:
        """Returns when the parameters are whole."""
        if self.here:
            return
        self.start_gather()
        assert self._handle is not None
        self._handle.wait()
        self._handle, self.here = None, True
        self._show(self._views)

    def release(self) -> None:
        """The parameters are gone, but for this rank's piece."""
        if self._handle is not None:
            self._handle.wait()
            self._handle = None
        elif not self.here:
            return
        self.here = False
        self._show(self._released)
        self._whole.untyped_storage().resize_(0)

    def keep(self) -> None:
        """Takes over into the piece what was written into the whole parameters."""
        self.piece.copy_(self._whole[self._layout.mine(self._shard.rank)])

    def _show(self, tensors: Sequence[Tensor]) -> None:
        for parameter, tensor in zip(self._parameters, tensors, strict=True):
            parameter.data = tensor
