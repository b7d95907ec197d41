"""Activations computed again in the backward instead of kept (Chen et al., arXiv:1604.06174).

    full        of each block its inputs alone are kept, and it runs again: about a third more work
    operators   of each block also the outputs of attention and of every second product (`kept_operators`)
    selective   of each attention core its query, key and value alone are kept (arXiv:2205.05198): little work, and
                what it saves are the log-sum-exps, the masks of documents and copies of shared heads

A recomputed forward is the same to the last bit: same autocast, same generator, same sample keys though other batches
went through the model in between (`replay`). Where it calls collectives, all ranks of the group call them again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.errors import UserCodeError
from shoal.memory.blocks import chosen_blocks
from shoal.memory.kept_operators import KeptOperators
from shoal.memory.replay import Replay
from shoal.models.layers import CausalAttention

RecomputeKind = Literal["none", "selective", "operators", "full"]


def recompute(model: nn.Module, kind: RecomputeKind, *, layers: Collection[int] | None = None) -> None:
    """Has `model` compute again what `kind` says, in the blocks numbered `layers`, from 0 (None: all).

    Names of parameters stay. Call it once, after what replaces its modules; a rank that holds a part of the model has
    its whole checked beforehand, by `check_recompute`.
    """
    if kind == "none":
        return
    blocks = chosen_blocks(model, layers)
    _without_cache(model)
    for module in _attention_cores(blocks) if kind == "selective" else blocks.values():
        module.forward = Recomputed(module, module.forward, keeps_operators=kind == "operators")


def _without_cache(model: nn.Module) -> None:
    """Turns off the key-value caches of Hugging Face's models, which a second forward would find filled."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False  # pyright: ignore[reportOptionalMemberAccess]


def check_recompute(model: nn.Module, kind: RecomputeKind, *, layers: Collection[int] | None = None) -> None:
    """Raises `UserCodeError` for a model without such blocks, or without attention for "selective"."""
    if kind != "none" and not _attention_cores(chosen_blocks(model, layers)) and kind == "selective":
        raise UserCodeError(
            f"no block of {type(model).__name__} has a module of type shoal.models.layers.CausalAttention, which "
            f"memory.recompute = 'selective' computes again: set it to 'full' or 'none'"
        )


@dataclass(frozen=True)
class Recomputed:
    """The `forward` of one module, which keeps its inputs, and what `kept_operators` says; copied with the module."""

    module: nn.Module
    inner: Callable[..., Any]
    keeps_operators: bool = False

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*inputs, **named)
        contexts = partial(_contexts, Replay(self.module), keeps_operators=self.keeps_operators)
        return checkpoint(partial(self.inner, **named), *inputs, use_reentrant=False, context_fn=contexts)


def _contexts(
    as_now: Replay, *, keeps_operators: bool
) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Of the forward and of its repetition."""
    if not keeps_operators:
        return nullcontext(), as_now
    kept = KeptOperators()
    return kept.keeping(), _Both(as_now, kept)


@dataclass
class _Both(AbstractContextManager[None]):
    """A repeated forward as it was, with what it kept; entered once for each backward."""

    as_now: Replay
    kept: KeptOperators
    entered: list[ExitStack] = field(default_factory=list)

    def __enter__(self) -> None:
        contexts = ExitStack()
        contexts.enter_context(self.as_now)
        contexts.enter_context(self.kept.repeating())
        self.entered.append(contexts)

    def __exit__(self, *error: Any) -> None:
        self.entered.pop().__exit__(*error)


def _attention_cores(blocks: dict[str, nn.Module]) -> list[nn.Module]:
    return [m for block in blocks.values() for m in block.modules() if isinstance(m, CausalAttention)]
