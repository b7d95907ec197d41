"""`DistributedOptimizer`, and what ranks must have in common before the first step.

A hook begins the all-reduce of a gradient when backward has accumulated it, `backward_passes_per_step` times; `step`
waits for all of them. A parameter without a gradient is summed as zeros, so that ranks whose graphs differ stay alike.
A sparse gradient, as of `nn.Embedding(sparse=True)`, is sent as its indices and values, or made dense before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from shoal.errors import UsageError
from shoal.horovod.engine import Handle
from shoal.horovod.operations import (
    Adasum,
    Average,
    Max,
    Sum,
    allgather_async,
    allreduce,
    broadcast_,
    broadcast_object,
    grouped_allreduce_async_,
    synchronize,
)
from shoal.horovod.process import ProcessSet, process
from shoal.horovod.values import Compression, Compressor, to_device

Named = Iterable[tuple[str, Tensor]]


class SparseHandle:
    """A sum of sparse tensors under way; `synchronize` waits for it."""

    def __init__(self, indices: Handle, values: Handle, like: Tensor, divisor: int) -> None:
        self.future, self._indices, self._values = values.future, indices, values
        self._like, self._divisor = like, divisor

    def wait(self) -> Tensor:
        """The sum or mean, not coalesced."""
        values, indices = self._values.wait() / self._divisor, self._indices.wait().t()
        return torch.sparse_coo_tensor(indices, values, self._like.shape, is_coalesced=False)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None = None, op: str | None = None, process_set: ProcessSet | None = None
) -> SparseHandle:
    """The mean or sum (`op`) of the ranks' sparse tensors: all ranks get the indices and values of each."""
    op = op or Average
    if not tensor.is_sparse or op not in (Average, Sum):
        raise UsageError("sparse_allreduce_async takes a sparse tensor, and gives hvd.Average or hvd.Sum of the ranks'")
    indices = allgather_async(tensor._indices().t().contiguous(), name and f"{name}.indices", process_set)
    values = allgather_async(tensor._values().contiguous(), name and f"{name}.values", process_set)
    return SparseHandle(indices, values, tensor, (process_set or ProcessSet()).size() if op == Average else 1)


MISSING, DENSE, SPARSE = range(3)
"""Of a gradient; of ranks that differ the last one counts."""


class _Reduction:
    """The gradients of an optimizer on their way: hooks, counts and handles."""

    def __init__(
        self, groups: Sequence[Sequence[tuple[str, Tensor]]], *, compression: type[Compressor], op: str, passes: int,
        predivide: float, sparse_as_dense: bool, process_set: ProcessSet | None,
    ) -> None:  # fmt: skip
        self._groups, self.process_set = groups, process_set
        self._sparse_as_dense, self._seen_sparse = sparse_as_dense, set[Tensor]()
        self._kinds_known_in: int | None = None
        """The generation of ranks in which all kinds were agreed on: one that joins does not know them."""
        self._sparse: dict[Tensor, SparseHandle] = {}
        self._group_of = {parameter: place for place, group in enumerate(groups) for _, parameter in group}
        self._compression, self._op, self._predivide = compression, op, predivide
        self.passes = passes
        self._counts = dict.fromkeys(self._group_of, 0)
        self.handles: dict[int, tuple[Handle, list[Tensor], list[Any]] | None] = {}
        """By place of the group; None where all its gradients are sparse."""
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
        dense = [(name, parameter) for name, parameter in self._groups[place] if not self._sent_sparse(name, parameter)]
        if not dense:
            self.handles[place] = None
            return
        names, parameters = zip(*dense, strict=True)
        pairs = [self._compression.compress(parameter.grad) for parameter in parameters]
        op = self._op
        halves = self._predivide if op == Average else 1.0
        handle = grouped_allreduce_async_(
            [small for small, _ in pairs], name=f"gradient.{names[0]}", op=op, prescale_factor=1 / halves,
            postscale_factor=halves, process_set=self.process_set,
        )  # fmt: skip
        self.handles[place] = handle, list(parameters), [context for _, context in pairs]

    def _sent_sparse(self, name: str, parameter: Tensor) -> bool:
        """Begins to sum the gradient if it is sparse, here or, where it is missing, on others; a dense one is made
        ready.
        """
        if parameter.grad is None:
            zeros = torch.zeros_like(parameter)
            parameter.grad = zeros.to_sparse(1) if parameter in self._seen_sparse else zeros
        if parameter.grad.is_sparse and self._sparse_as_dense:
            parameter.grad = parameter.grad.to_dense()
        if not parameter.grad.is_sparse:
            return False
        self._seen_sparse.add(parameter)
        self._sparse[parameter] = sparse_allreduce_async(parameter.grad, f"gradient.{name}", self._op, self.process_set)
        return True

    def _agree_on_kinds(self) -> None:
        """Ranks tell each other which gradients are sparse, with every step until each gradient was on one of them: a
        rank that lacks one sends it as the others do.
        """
        if self._sparse_as_dense or self._kinds_known_in == process().generation:
            return
        grads = [parameter.grad for parameter in self._group_of]
        own = [MISSING if grad is None else SPARSE if grad.is_sparse else DENSE for grad in grads]
        kinds = allreduce(torch.tensor(own), name="gradient kinds", op=Max, process_set=self.process_set).tolist()
        self._seen_sparse.update(p for p, kind in zip(self._group_of, kinds, strict=True) if kind == SPARSE)
        self._kinds_known_in = None if MISSING in kinds else process().generation

    def finish(self) -> None:
        """Sends what no backward came to, and writes all reduced gradients."""
        self._agree_on_kinds()
        for place in range(len(self._groups)):
            if place not in self.handles:
                self._send(place)
        for handle, parameters, contexts in (sent for sent in self.handles.values() if sent is not None):
            reduced = synchronize(handle)
            for parameter, small, context in zip(parameters, reduced, contexts, strict=True):
                whole = self._compression.decompress(small, context)
                if parameter.grad is not None and whole.data_ptr() != parameter.grad.data_ptr():
                    parameter.grad.copy_(whole)
        for parameter, handle in self._sparse.items():
            parameter.grad = synchronize(handle)
        self._sparse.clear()
        self.handles.clear()
        self._counts = dict.fromkeys(self._counts, 0)
        self.done = True

    def abandon(self) -> None:
        """Forgets what was begun with ranks that are gone."""
        self._sparse.clear()
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
        """Waits for the gradients, then updates. Those that `closure` computes are reduced whenever it is called, and
        its loss, a tensor or a number, becomes the mean over ranks: so ranks stay alike that decide by it, as L-BFGS
        does. Anything else that it returns, such as None or a dictionary, stays as it is.
        """
        if not self._skips and closure is not None:
            closure = partial(self._reduced, closure)
        elif not self._skips:
            self.reduction.finish()
        self.reduction.done = False
        return super().step(closure)  # pyright: ignore[reportAttributeAccessIssue]

    def _reduced(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self.reduction.finish()
        if isinstance(loss, Tensor):
            return allreduce(loss.detach(), process_set=self.reduction.process_set)
        if not isinstance(loss, Real):
            return loss
        return float(allreduce(torch.tensor(loss, dtype=torch.float64), process_set=self.reduction.process_set))

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
    sparse_as_dense: bool = False, process_set: ProcessSet | None = None,
) -> Any:  # fmt: skip
    """`optimizer` whose `step` first averages (`op`) the gradients over all ranks; of its class, with its state.

    `num_groups`, or `groups` of parameters: gradients that are sent together, once the last of them is there. With
    op=hvd.Adasum the changes that ranks' own steps make are added up instead. `sparse_as_dense`: sparse gradients are
    made dense, else all ranks get the indices and values of each. `process_set`: the ranks that agree.
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
        predivide=gradient_predivide_factor, sparse_as_dense=sparse_as_dense, process_set=process_set,
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


def broadcast_parameters(params: Mapping[str, Tensor] | Named | Iterable[Tensor], root_rank: int = 0) -> None:
    """All tensors of a `state_dict()`, of `named_parameters()` or of `parameters()` become those of `root_rank`."""
    given = list(params.items() if isinstance(params, Mapping) else params)
    for place, each in enumerate(given):
        name, tensor = (str(place), each) if isinstance(each, Tensor) else each
        if isinstance(tensor, Tensor):
            broadcast_(tensor, root_rank, f"parameters.{name}")


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """The optimizer's state becomes that of `root_rank`, also where the others have none yet."""
    mine = optimizer.state_dict() if process().there().rank == root_rank else None
    whole = broadcast_object(mine, root_rank, "optimizer")
    if process().there().rank != root_rank:
        devices = [parameter.device for group in optimizer.param_groups for parameter in group["params"]]
        optimizer.load_state_dict(to_device(whole, devices[0] if devices else torch.device("cpu")))
