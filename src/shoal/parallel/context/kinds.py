"""The kinds of context parallelism by name, and how their cores take the places of a model's own attentions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Literal

from torch import nn

from shoal.comm.collective import Collective
from shoal.comm.messages import Messages
from shoal.errors import UserCodeError
from shoal.models.layers import CausalAttention
from shoal.models.sparse_attention import SparseAttention
from shoal.parallel.context.all_gather import GatheredAttention
from shoal.parallel.context.core import ContextCore
from shoal.parallel.context.fetch import FetchedAttention
from shoal.parallel.context.ring import RingAttention
from shoal.parallel.context.ulysses import UlyssesAttention

ContextKind = Literal["ring", "ulysses", "allgather"]

KINDS: Mapping[ContextKind, type[ContextCore]] = MappingProxyType(
    {"ring": RingAttention, "ulysses": UlyssesAttention, "allgather": GatheredAttention}
)


def check_context(model: nn.Module, group: Collective) -> None:
    """Raises `UserCodeError` for a whole model without `CausalAttention`, where `group` has several ranks."""
    if group.size > 1 and not _cores(model):
        raise UserCodeError(
            f"{type(model).__name__} has no module of type shoal.models.layers.CausalAttention, and without one a "
            f"rank sees only its own part of a sequence: compute attention in such a module, or set layout.context=1"
        )


def put_context(model: nn.Module, group: Collective, kind: ContextKind, messages: Messages | None = None) -> None:
    """Replaces every `CausalAttention` of `model` by the kind's, over the context ranks of `group`, and every
    `SparseAttention` by one under its mask. `messages`: what a ring sends over, None: the group.

    From then on the model is called with this rank's slices of the sequence and with its `positions`.
    Call it before `recompute`. A group of one rank changes nothing, and neither does a stage without attention.
    Raises `UserCodeError` for a module that is recomputed already.
    """
    if group.size == 1:
        return
    for name, module in _cores(model).items():
        if "forward" in vars(module):
            raise UserCodeError(f"'{name}' already has a forward of its own: split the context before recompute")
        model.set_submodule(name, _core(module, kind, messages)(group))


def _core(module: CausalAttention, kind: ContextKind, messages: Messages | None) -> Callable[[Collective], ContextCore]:
    if not isinstance(module, SparseAttention):
        return partial(RingAttention, messages=messages) if kind == "ring" else KINDS[kind]
    return partial(UlyssesAttention if kind == "ulysses" else FetchedAttention, mask=module.config)


def _cores(model: nn.Module) -> dict[str, CausalAttention]:
    named = model.named_modules(remove_duplicate=False)
    return {name: m for name, m in named if type(m) is CausalAttention or type(m) is SparseAttention}
