"""Makes a model's attention see the whole sequence where the rank holds a part of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from torch import nn

from shoal.comm.collective import Collective
from shoal.errors import UserCodeError
from shoal.models.attention import CausalAttention
from shoal.parallel.context.allgather import GatheredAttention
from shoal.parallel.context.core import ContextCore
from shoal.parallel.context.ring import RingAttention
from shoal.parallel.context.ulysses import UlyssesAttention

ContextKind = Literal["ring", "ulysses", "allgather"]

KINDS: Mapping[ContextKind, type[ContextCore]] = MappingProxyType(
    {"ring": RingAttention, "ulysses": UlyssesAttention, "allgather": GatheredAttention}
)


def put_context(model: nn.Module, group: Collective, kind: ContextKind) -> None:
    """Replaces every `CausalAttention` of `model` by the kind's, over the context ranks of `group`.

    From then on the model is called with this rank's slices of the sequence and with its `positions` (see `shard`).
    Call it before `recompute`. A group of one rank changes nothing.
    Raises `UserCodeError` for a model without such a module, or one that is recomputed already.
    """
    if group.size == 1:
        return
    found = {
        name: module for name, module in model.named_modules(remove_duplicate=False) if type(module) is CausalAttention
    }
    if not found:
        raise UserCodeError(
            f"{type(model).__name__} has no module of type shoal.models.attention.CausalAttention, and without one a "
            f"rank sees only its own part of a sequence: compute attention in such a module, or set layout.context=1"
        )
    for name, module in found.items():
        if "forward" in vars(module):
            raise UserCodeError(f"'{name}' already has a forward of its own: split the context before recompute")
        model.set_submodule(name, KINDS[kind](group))
