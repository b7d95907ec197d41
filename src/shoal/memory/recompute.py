"""Activations computed again in the backward instead of kept (Chen et al., arXiv:1604.06174).

    full        of each block its inputs alone are kept, and it runs again: about a third more work
    operators   of each block also the outputs of attention and of every second product (`KeptOperators`)
    budget      of all blocks together the outputs that save most for their bytes, up to a budget (`recompute_budget`)
    selective   of each attention core its query, key and value alone are kept (arXiv:2205.05198): little work, and
                what it saves are the log-sum-exps, the masks of documents and copies of shared heads

A recomputed forward is the same to the last bit: same autocast, same generator, same sample keys though other batches
went through the model in between (`replay`). Where it calls collectives, all ranks of the group call them again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from shoal.errors import UserCodeError
from shoal.memory.recompute_budget import Exchange, Numbering, Operator, Profile, RecomputeBudget, profiled, sizes_of
from shoal.models.draw_watch import DrawWatch
from shoal.models.keyed_draws import active_draws
from shoal.models.layers import CausalAttention

# Which modules of a model are its blocks: what `recompute` computes again one by one.


@runtime_checkable
class DeclaresBlocks(Protocol):
    """A module that says which of its submodules are blocks, where they are not the children of a `ModuleList`."""

    def recompute_blocks(self) -> Sequence[str]:
        """The names of submodules, none inside another, in the order in which they run."""
        ...


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks by name: those that the model declares, else the children of its outermost `nn.ModuleList`s. Without
    these, the children of its outermost `nn.Sequential`s that have submodules, as vision models hold theirs.
    """
    if isinstance(model, DeclaresBlocks):
        return {name: model.get_submodule(name) for name in model.recompute_blocks()}
    return dict(_children_of_lists(model, "")) or dict(_children_of_sequentials(model, ""))


def chosen_blocks(model: nn.Module, layers: Collection[int] | None) -> dict[str, nn.Module]:
    """The blocks numbered `layers`, from 0 in the model's order; None: all.

    Raises `UserCodeError` where the model has no blocks, or not that many.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise UserCodeError(
            f"{type(model).__name__} has no blocks to recompute: hold them in an nn.ModuleList, or in an "
            "nn.Sequential as modules with submodules, name them in recompute_blocks(), or set "
            "memory.recompute = 'none'"
        )
    beyond = [layer for layer in layers or () if not 0 <= layer < len(blocks)]
    if beyond:
        raise UserCodeError(
            f"layer {beyond[0]} cannot be recomputed: {type(model).__name__} has {len(blocks)} blocks, numbered from 0 "
            f"to {len(blocks) - 1}; correct memory.recompute_layers"
        )
    return {name: block for i, (name, block) in enumerate(blocks.items()) if layers is None or i in layers}


def _children_of_lists(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList):
            yield from ((f"{path}.{index}", block) for index, block in child.named_children())
        else:
            yield from _children_of_lists(child, f"{path}.")


def _children_of_sequentials(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        blocks = [(index, block) for index, block in child.named_children() if any(True for _ in block.children())]
        if isinstance(child, nn.Sequential) and blocks:
            yield from ((f"{path}.{index}", block) for index, block in blocks)
        else:
            yield from _children_of_sequentials(child, f"{path}.")


# Which operators of a recomputed forward keep their outputs: recomputation by operator, "selective op" in torchtitan.
#
# A recomputed block pays for its products twice, and holds only its input. Between that and keeping everything lies a
# choice for each operator (arXiv:2410.06511, section 2.1.1): outputs that are dear to compute and small are kept, and
# all else (norms, gates, rotations, casts) is computed again from them:
#
#     kept        the outputs of fused attention, and of every second product: the second, the fourth, ...
#     repeated    the other products, and everything between
#
# So half of the products run twice in the place of all of them. The first product is the one that is repeated: the last
# product of a block with seven (query, key, value, output, gate, up, down) gives what no backward needs, and what is
# repeated ends before it.
#
# `torch.utils.checkpoint.create_selective_checkpoint_contexts` refuses a kept output that somebody writes to in place,
# as `nn.ReLU(inplace=True)` does, and a second backward. Here such an output is computed again.


PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"}
)
ATTENTION = frozenset(
    {
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    }
)


@dataclass(frozen=True)
class _Output:
    """A tensor and the version that it had: another one says that somebody has written to it since."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Output:
        """Without the graph, which would keep everything else alive; the count of versions stays a common one."""
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            own = tensor.detach()
        return cls(own, own._version)

    @property
    def is_whole(self) -> bool:
        """Are the numbers those that the operator gave?"""
        return self.tensor._version == self.version


class KeptOperators:
    """The outputs that one forward of a block keeps, by their operator. `chosen`: which ones; None: as above."""

    def __init__(self, chosen: frozenset[Operator] | None = None) -> None:
        self._outputs: dict[Operator, Any] = {}
        self._chosen = chosen

    def keeping(self) -> TorchDispatchMode:
        """A mode for the forward."""
        return _Keeping(self._outputs, self._chosen)

    def repeating(self) -> TorchDispatchMode:
        """A mode for the repeated forward: what was kept is handed out, once, and not computed."""
        return _Repeating(self._outputs, self._chosen)


class _Numbered(TorchDispatchMode):
    """Numbers the operators that may be kept, in the order of their calls, which a repeated forward has too."""

    def __init__(self, outputs: dict[Operator, Any], chosen: frozenset[Operator] | None) -> None:
        super().__init__()
        self._outputs, self._chosen = outputs, chosen
        self._operators = self._products = 0
        self._numbering = Numbering()

    def _number(self, func: Any) -> Operator | None:
        """The number of an operator whose output is kept; None for others."""
        if self._chosen is not None:
            found = self._numbering.number(func)
            return found if found in self._chosen else None
        if func.namespace != "aten":
            return None
        name = func._schema.name.removeprefix("aten::")
        if name in PRODUCTS:
            self._products += 1
            if self._products % 2:
                return None
        elif name not in ATTENTION:
            return None
        self._operators += 1
        return "kept", self._operators


class _Keeping(_Numbered):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        number = self._number(func)
        if number is not None and (self._chosen is not None or not _grows(func, args, result)):
            self._outputs[number] = tree_map_only(Tensor, _Output.of, result)
        return result


def _grows(func: Any, args: Sequence[Any], result: Any) -> bool:
    """Whether a batched product is larger than its two factors, as the scores of attention that is not fused are."""
    if func._schema.name.removeprefix("aten::") not in ("bmm", "baddbmm"):
        return False
    return result.numel() > sum(factor.numel() for factor in args[-2:])


class _Repeating(_Numbered):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        number = self._number(func)
        kept = None if number is None else self._outputs.pop(number, None)
        if kept is None:
            return func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(kept) if isinstance(leaf, _Output)]
        if outputs and all(output.is_whole for output in outputs):
            return tree_map_only(_Output, lambda output: output.tensor, kept)
        return func(*args, **(kwargs or {}))


# What a module is told beside its arguments, so that a forward can be repeated later as it was.
#
# The keys of the samples, what a router has to know of its microbatch, training or evaluation: such things are set on
# the modules before a forward, and by the time of the backward others may have been set for the next microbatch.
# `Replay` takes them down; inside of it they are as they were, and what the repeated forward writes leaves no trace.


_INTERNAL = frozenset(vars(nn.Module())) - {"training"}

Attributes = Mapping[nn.Module, Mapping[str, Any]]


class Replay(AbstractContextManager[None]):
    """Takes down the attributes of `module` and its submodules, by reference; inside, they are those again.

    It may be entered any number of times: a backward in two parts, of activations and of weights, recomputes twice.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._attributes = module, _attributes(module)
        self._draws = active_draws()
        self._moment = None if self._draws is None else self._draws.moment()
        self._entered: list[tuple[Attributes, ExitStack]] = []

    def __enter__(self) -> None:
        later, buffers = _attributes(self._module), ExitStack()
        _set(self._attributes)
        buffers.enter_context(_copied_buffers(self._module))
        if self._draws is not None and self._moment is not None:
            buffers.enter_context(self._draws.replaying(self._moment))
        self._entered.append((later, buffers))

    def __exit__(self, *error: object) -> None:
        later, buffers = self._entered.pop()
        buffers.close()
        _set(later)


def _attributes(module: nn.Module) -> Attributes:
    return {m: {name: x for name, x in vars(m).items() if name not in _INTERNAL} for m in module.modules()}


def _set(attributes: Attributes) -> None:
    for module, values in attributes.items():
        now = vars(module)
        for name, value in values.items():
            if now.get(name) is not value:
                setattr(module, name, value)


@contextmanager
def _copied_buffers(module: nn.Module) -> Iterator[None]:
    """Gives the modules copies of their buffers to write to, such as running statistics."""
    places = [
        (m, name, old) for m in module.modules() for name, old in m.named_buffers(recurse=False, remove_duplicate=False)
    ]
    copies = {id(old): old.clone() for _, _, old in places}
    try:
        for owner, name, old in places:
            setattr(owner, name, copies[id(old)])
        yield
    finally:
        for owner, name, old in places:
            setattr(owner, name, old)


RecomputeKind = Literal["none", "selective", "operators", "full", "budget"]


def recompute(
    model: nn.Module,
    kind: RecomputeKind,
    *,
    layers: Collection[int] | None = None,
    budget_bytes: int = 0,
    exchange: Exchange | None = None,
    looks_again: bool = True,
) -> None:
    """Has `model` compute again what `kind` says, in the blocks numbered `layers`, from 0 (None: all). `budget_bytes`:
    what these may keep beside their inputs, of a microbatch, under "budget"; for `exchange` and `looks_again` see
    `RecomputeBudget`.

    Names of parameters stay. Call it once, after what replaces its modules; a rank that holds a part of the model has
    its whole checked beforehand, by `check_recompute`.
    """
    if kind == "none":
        return
    blocks = chosen_blocks(model, layers)
    _without_cache(model)
    budget = RecomputeBudget(budget_bytes, exchange=exchange, looks_again=looks_again) if kind == "budget" else None
    for number, module in enumerate(_attention_cores(blocks) if kind == "selective" else blocks.values()):
        module.forward = Recomputed(module, module.forward, kind == "operators", number, budget)


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
    """The `forward` of one module, which keeps its inputs, and what `keeps_operators` or `budget` says; copied with the
    module. `number` is that of the block.
    """

    module: nn.Module
    inner: Callable[..., Any]
    keeps_operators: bool = False
    number: int = 0
    budget: RecomputeBudget | None = None

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*inputs, **named)
        choice = None
        if self.budget is not None:
            choice = self.budget.choice(self.number, sizes_of((inputs, named)), partial(self._look, inputs, named))
            if choice.whole:
                return self.inner(*inputs, **named)
        kept = KeptOperators(None if choice is None else choice.operators)
        keeps = self.keeps_operators or (choice is not None and bool(choice.operators))
        contexts = partial(_contexts, Replay(self.module), kept if keeps else None)
        return checkpoint(partial(self.inner, **named), *inputs, use_reentrant=False, context_fn=contexts)

    def _look(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Profile:
        """At one forward that leaves no trace."""
        own = [x for x in tree_leaves((inputs, named)) if isinstance(x, Tensor)]
        apart = [*own, *self.module.parameters(), *self.module.buffers()]
        draws = DrawWatch()
        try:
            with Replay(self.module):
                return profiled(partial(self.inner, *inputs, **named), apart)
        finally:
            draws.rewind()


def _contexts(
    as_now: Replay, kept: KeptOperators | None
) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Of the forward and of its repetition."""
    if kept is None:
        return nullcontext(), as_now
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
