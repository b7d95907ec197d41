"""`DistributedOptimizer`, and what ranks must have in common before the first step.

A hook begins the all-reduce of a gradient when backward has accumulated it, `backward_passes_per_step` times; `step`
waits for all of them. A parameter without a gradient is summed as zeros, so that ranks whose graphs differ stay alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shoal.errors import UsageError
from shoal.horovod.engine import Handle
from shoal.horovod.operations import (
    Adasum,
    Average,
    Compression,
    Compressor,
    broadcast_,
    broadcast_object,
    grouped_allreduce_async_,
    synchronize,
)
from shoal.horovod.process import ProcessSet, process
from shoal.horovod.values import to_device

Named = Iterable[tuple[str, Tensor]]


class _Reduction:
    """The gradients of an optimizer on their way: hooks, counts and handles."""

    def __init__(
        self, groups: Sequence[Sequence[tuple[str, Tensor]]], *, compression: type[Compressor], op: str, passes: int,
        predivide: float, process_set: ProcessSet | None,
    ) -> None:  # fmt: skip
        self._groups, self._process_set = groups, process_set
        self._group_of = {parameter: place for place, group in enumerate(groups) for _, parameter in group}
        self._compression, self._op, self._predivide = compression, op, predivide
        self.passes = passes
        self._counts = dict.fromkeys(self._group_of, 0)
        self.handles: dict[int, tuple[Handle, list[Any]]] = {}
        self.done = False
        for parameter in self._group_of:
            parameter.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, parameter: Tensor) -> None:
        place = self._group_of[parameter]
        if place in self.handles:
            raise UsageError(
                "a gradient was computed again before step(): raise backward_passes_per_step, or call step() in between"
            )
        self._counts[parameter] += 1
        if all(self._counts[other] >= self.passes for _, other in self._groups[place]):
            self._send(place)

    def _send(self, place: int) -> None:
        names, parameters = zip(*self._groups[place], strict=True)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        pairs = [self._compression.compress(parameter.grad) for parameter in parameters]
        op = self._op
        halves = self._predivide if op == Average else 1.0
        handle = grouped_allreduce_async_(
            [small for small, _ in pairs], name=f"gradient.{names[0]}", op=op, prescale_factor=1 / halves,
            postscale_factor=halves, process_set=self._process_set,
        )  # fmt: skip
        self.handles[place] = handle, [context for _, context in pairs]

    def finish(self) -> None:
        """Sends what no backward came to, and writes all reduced gradients."""
        for place in range(len(self._groups)):
            if place not in self.handles:
                self._send(place)
        for place, (handle, contexts) in self.handles.items():
            reduced = synchronize(handle)
            for (_, parameter), small, context in zip(self._groups[place], reduced, contexts, strict=True):
                whole = self._compression.decompress(small, context)
                if parameter.grad is not None and whole.data_ptr() != parameter.grad.data_ptr():
                    parameter.grad.copy_(whole)
        self.handles.clear()
        self._counts = dict.fromkeys(self._counts, 0)
        self.done = True

    def abandon(self) -> None:
        """Forgets what was begun with ranks that are gone."""
        self.handles.clear()
        self._counts = dict.fromkeys(self._counts, 0)
        self.done = False


class _Distributed:
    """What `DistributedOptimizer` adds to the optimizer's own class."""

    reduction: _Reduction
    _skips = False

    def synchronize(self) -> None:
        """Waits until all gradients are reduced: before one clips them. `step` then belongs into `skip_synchronize`."""
        self.reduction.finish()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it `step` takes the gradients as they are."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many backwards add up before their sum is sent."""
        self.reduction.passes = passes

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Waits for the gradients, then updates."""
        if not self._skips:
            self.reduction.finish()
        self.reduction.done = False
        return super().step(closure)  # pyright: ignore[reportAttributeAccessIssue]

    def zero_grad(self, *given: Any, **named: Any) -> None:
        """Raises `UsageError` while gradients are on their way."""
        if self.reduction.handles:
            raise UsageError("zero_grad() between backward() and step(): gradients are on their way; call step() first")
        super().zero_grad(*given, **named)  # pyright: ignore[reportAttributeAccessIssue]


class _Adaptive:
    """Adasum of what each rank's step changed: `step` updates from the rank's own gradients, and adds up the changes
    (arXiv:2006.02924, section 3.3, for optimizers whose updates are no multiple of the gradient).
    """

    named: Sequence[tuple[str, Tensor]]
    process_set: ProcessSet | None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates, then agrees. Ranks that share their state before it do not afterwards: moments are each rank's."""
        before = [parameter.detach().clone() for _, parameter in self.named]
        loss = super().step(closure)  # pyright: ignore[reportAttributeAccessIssue]
        changes = [parameter - old for (_, parameter), old in zip(self.named, before, strict=True)]
        found = synchronize(grouped_allreduce_async_(changes, name="update", op=Adasum, process_set=self.process_set))
        for (_, parameter), old, change in zip(self.named, before, found, strict=True):
            parameter.copy_(old + change)
        return loss


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Named | None = None,
    compression: type[Compressor] = Compression.none, backward_passes_per_step: int = 1, op: str = Average,
    gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Sequence[Sequence[Tensor]] | None = None,
    process_set: ProcessSet | None = None,
) -> Any:  # fmt: skip
    """`optimizer` whose `step` first averages (`op`) the gradients over all ranks; of its class, with its state.

    `num_groups`, or `groups` of parameters: gradients that are sent together, once the last of them is there. With
    op=hvd.Adasum the changes that ranks' own steps make are added up instead. `process_set`: the ranks that agree.
    Raises `UsageError` for names that are missing or occur twice.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise UsageError("gradient_predivide_factor divides a mean: give op=hvd.Average, or leave it out")
    named = _named_parameters(optimizer, named_parameters)
    if op == Adasum:
        if compression is not Compression.none:
            raise UsageError("op=hvd.Adasum sends updates as they are: leave compression out")
        return _of_class(optimizer, _Adaptive, {"named": named, "process_set": process_set})
    reduction = _Reduction(
        _grouped(named, num_groups, groups), compression=compression, op=op, passes=backward_passes_per_step,
        predivide=gradient_predivide_factor, process_set=process_set,
    )  # fmt: skip
    return _of_class(optimizer, _Distributed, {"reduction": reduction})


def _of_class(optimizer: torch.optim.Optimizer, mixed_in: type, names: dict[str, Any]) -> Any:
    kind = type(optimizer.__class__.__name__, (mixed_in, optimizer.__class__), names)
    whole = kind.__new__(kind)
    whole.__dict__.update(optimizer.__dict__)
    return whole


def _named_parameters(optimizer: torch.optim.Optimizer, given: Named | None) -> list[tuple[str, Tensor]]:
    own = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]
    if given is None:
        return [(f"parameter.{place}", parameter) for place, parameter in enumerate(own)]
    pairs = list(given)
    names = {parameter: name for name, parameter in pairs}
    if len({name for name, _ in pairs}) < len(pairs):
        raise UsageError("named_parameters has a name twice: give model.named_parameters()")
    if any(parameter not in names for parameter in own):
        raise UsageError("named_parameters leaves out some that the optimizer updates: give model.named_parameters()")
    return [(names[parameter], parameter) for parameter in own]


def _grouped(
    named: list[tuple[str, Tensor]], count: int, groups: Sequence[Sequence[Tensor]] | None
) -> list[list[tuple[str, Tensor]]]:
    """Backward makes the last gradients first, so the last parameters come first."""
    if groups is not None:
        names = {parameter: name for name, parameter in named}
        found = [[(names[parameter], parameter) for parameter in group] for group in groups]
        together = {parameter for group in groups for parameter in group}
        return found + [[pair] for pair in reversed(named) if pair[1] not in together]
    backward = named[::-1]
    if count <= 0:
        return [[pair] for pair in backward]
    each = -(-len(backward) // count)
    return [backward[begin : begin + each] for begin in range(0, len(backward), each)]


def abandon_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Drops the gradients of a step that has failed, and those on their way to ranks that are gone."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
    if isinstance(optimizer, _Distributed):
        optimizer.reduction.abandon()


def broadcast_parameters(params: Mapping[str, Tensor] | Named, root_rank: int = 0) -> None:
    """All tensors of a `state_dict()` or of `named_parameters()` become those of `root_rank`."""
    pairs = params.items() if isinstance(params, Mapping) else params
    for name, tensor in pairs:
        if isinstance(tensor, Tensor):
            broadcast_(tensor, root_rank, f"parameters.{name}")


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """The optimizer's state becomes that of `root_rank`, also where the others have none yet."""
    mine = optimizer.state_dict() if process().there().rank == root_rank else None
    whole = broadcast_object(mine, root_rank, "optimizer")
    if process().there().rank != root_rank:
        devices = [parameter.device for group in optimizer.param_groups for parameter in group["params"]]
        optimizer.load_state_dict(to_device(whole, devices[0] if devices else torch.device("cpu")))
