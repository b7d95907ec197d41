"""Horovod's operations on torch tensors. Names are optional; all ranks number the calls without one alike.

`..._async` returns a `Handle` for `synchronize` and `poll`; a name with `_` at its end writes into the tensor itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.horovod.engine import Handle
from shoal.horovod.negotiation import Begun, Kind
from shoal.horovod.process import ProcessSet, process
from shoal.horovod.values import Compression, Compressor, decode, encode

Average, Sum, Min, Max, Product, Adasum = "avg", "sum", "min", "max", "product", "adasum"
"""Reductions. Adasum adds what is orthogonal and averages what is parallel (`engine.adaptive_sum`)."""


def _reduction(average: bool | None, op: str | None) -> str:
    if average is not None and op is not None:
        raise UsageError("both average and op are given: give op (hvd.Average or hvd.Sum)")
    op = (Average if average in (None, True) else Sum) if op is None else op
    if op not in (Average, Sum, Min, Max, Product, Adasum):
        raise UsageError(f"there is no reduction {op!r}: use hvd.Average, Sum, Min, Max, Product or Adasum")
    return op


def _begin(
    kind: Kind, name: str | None, tensors: Sequence[Tensor], process_set: ProcessSet | None, **given: Any
) -> Handle:
    engine, ranks = process().engine_of(process_set), process_set.ranks if process_set is not None else ()
    if ranks and any(tensor.is_cuda for tensor in tensors):
        raise UsageError("a process set takes tensors on the CPU: move them there, or call on all ranks")
    begun = Begun(
        f"{kind}.{name or engine.next_name(kind)}", kind, tuple(str(t.dtype).removeprefix("torch.") for t in tensors),
        tuple(tuple(t.shape) for t in tensors), device=tensors[0].device.type if tensors else "cpu", **given,
    )  # fmt: skip
    return engine.submit(Handle(begun, list(tensors)))


def _check_numbers(op: str, tensors: Sequence[Tensor]) -> None:
    if op == Adasum and any(not t.is_floating_point() or t.device.type != "cpu" for t in tensors):
        raise UsageError("op=hvd.Adasum takes floating-point tensors on the CPU: move them there, or use hvd.Average")
    if op == Average and any(not (t.is_floating_point() or t.is_complex()) for t in tensors):
        raise UsageError("a mean of whole numbers: give op=hvd.Sum")


def synchronize(handle: Any) -> Any:
    """The result of a call, once it is there."""
    return handle.wait()


def poll(handle: Any) -> bool:
    """Whether `synchronize` would return at once."""
    return handle.future.done()


def grouped_allreduce_async_(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: str | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet | None = None,
) -> Handle:  # fmt: skip
    """All of `tensors` at once, in place: none is summed before the last is ready on all ranks (of `process_set`)."""
    op = _reduction(average, op)
    _check_numbers(op, tensors)
    whole = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]
    handle = _begin(
        "allreduce", name, [t.detach() for t in whole], process_set, op=op, prescale=prescale_factor,
        postscale=postscale_factor,
    )  # fmt: skip

    def undo(result: Any) -> list[Tensor]:
        for tensor, reduced in zip(tensors, result, strict=True):
            if tensor.data_ptr() != reduced.data_ptr():
                tensor.data.copy_(reduced)
        return list(tensors)

    handle.undo = undo
    return handle


def grouped_allreduce_async(tensors: Sequence[Tensor], *given: Any, **named: Any) -> Handle:
    """See `grouped_allreduce_async_`; the tensors stay as they are."""
    return grouped_allreduce_async_([tensor.detach().clone() for tensor in tensors], *given, **named)


def grouped_allreduce_(tensors: Sequence[Tensor], *given: Any, **named: Any) -> list[Tensor]:
    """See `grouped_allreduce_async_`."""
    return synchronize(grouped_allreduce_async_(tensors, *given, **named))


def grouped_allreduce(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None,
    compression: type[Compressor] = Compression.none, *given: Any, **named: Any,
) -> list[Tensor]:  # fmt: skip
    """The sums or means of the ranks' tensors, sent as `compression` says."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    found = synchronize(grouped_allreduce_async([small for small, _ in pairs], average, name, *given, **named))
    return [compression.decompress(each, context) for each, (_, context) in zip(found, pairs, strict=True)]


def _first(handle: Handle) -> Handle:
    undo = handle.undo
    handle.undo = lambda result: undo(result)[0]
    return handle


def allreduce_async_(tensor: Tensor, *given: Any, **named: Any) -> Handle:
    """In place; see `grouped_allreduce_async_`."""
    return _first(grouped_allreduce_async_([tensor], *given, **named))


def allreduce_async(tensor: Tensor, *given: Any, **named: Any) -> Handle:
    """See `grouped_allreduce_async_`; the tensor stays as it is."""
    return _first(grouped_allreduce_async([tensor], *given, **named))


def allreduce_(tensor: Tensor, *given: Any, **named: Any) -> Tensor:
    """In place; see `allreduce`."""
    return synchronize(allreduce_async_(tensor, *given, **named))


def allreduce(
    tensor: Tensor, average: bool | None = None, name: str | None = None,
    compression: type[Compressor] = Compression.none, *given: Any, **named: Any,
) -> Tensor:  # fmt: skip
    """The mean (or, by `op`, the sum, ...) of the ranks' tensors, which are of one shape. It has a gradient: the same
    reduction of the gradient.
    """
    return _AllReduce.apply(tensor, average, name, compression, given, named)  # pyright: ignore[reportReturnType]


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        context: Any, tensor: Tensor, average: Any, name: Any, compression: type[Compressor], given: Any, named: Any
    ) -> Tensor:
        context.how = (average, name and f"{name}.gradient", compression, given, named)
        return grouped_allreduce([tensor], average, name, compression, *given, **named)[0]

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        average, name, compression, given, named = context.how
        return _AllReduce.apply(gradient, average, name, compression, given, named), None, None, None, None, None


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet | None = None) -> Handle:
    """See `allgather`."""
    if tensor.ndim == 0:
        raise UsageError("allgather of a tensor without dimensions: ranks are joined along the first; use tensor[None]")
    return _first(_begin("allgather", name, [tensor], process_set))


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet | None = None) -> Tensor:
    """The ranks' tensors along the first dimension, in which they may differ. Its gradient is Horovod's: this rank's
    rows of the mean over ranks.
    """
    return _AllGather.apply(tensor, name, process_set)  # pyright: ignore[reportReturnType]


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, name: str | None, process_set: ProcessSet | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        context.rows, context.how = tensor.shape[:1], (_of_gradient(name), process_set)
        return synchronize(allgather_async(tensor, name, process_set))

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        name, process_set = context.how
        mean = allreduce(gradient, name=name, process_set=process_set)
        rows = synchronize(allgather_async(torch.tensor(context.rows), name and f"{name}.rows", process_set))
        rank = (process_set or ProcessSet()).rank()
        return mean.split(rows.tolist())[rank], None, None


def _of_gradient(name: str | None) -> str | None:
    return name and f"{name}.gradient"


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet | None = None
) -> list[Tensor]:
    """`allgather` of each of them, in one call."""
    return synchronize(grouped_allgather_async(tensors, name, process_set))


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """See `grouped_allgather`."""
    if any(tensor.ndim == 0 for tensor in tensors):
        raise UsageError("allgather of a tensor without dimensions: ranks are joined along the first; use tensor[None]")
    return _begin("allgather", name, list(tensors), process_set)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """In place; see `broadcast`."""
    if not 0 <= root_rank < process().there().world_size:
        raise UsageError(f"broadcast: there is no rank {root_rank} among {process().there().world_size}")
    if process_set is not None and process_set.ranks:
        if root_rank not in process_set.ranks:
            raise UsageError(f"broadcast: rank {root_rank} is not in the process set {list(process_set.ranks)}")
        root_rank = process_set.ranks.index(root_rank)
    return _first(_begin("broadcast", name, [tensor.detach()], process_set, root=root_rank))


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """See `broadcast`."""
    return broadcast_async_(tensor.detach().clone(), root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Tensor:
    """`tensor` becomes that of `root_rank`."""
    synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return tensor


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None) -> Tensor:
    """The tensor of `root_rank`. Its gradient is Horovod's: at the root the mean over ranks, elsewhere zeros."""
    return _Broadcast.apply(tensor, root_rank, name, process_set)  # pyright: ignore[reportReturnType]


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        context: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet | None
    ) -> Tensor:
        context.root, context.how = root_rank, (_of_gradient(name), process_set)
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        name, process_set = context.how
        mean = allreduce(gradient, name=name, process_set=process_set)
        at_root = process().there().rank == context.root
        return mean if at_root else torch.zeros_like(mean), None, None, None


def alltoall(
    tensor: Tensor, splits: Tensor | Sequence[int] | None = None, name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:  # fmt: skip
    """See `alltoall_async`. Its gradient goes back to the ranks whose rows they were."""
    came, rows = _AllToAll.apply(tensor, splits, name, process_set)  # pyright: ignore[reportGeneralTypeIssues]
    return came if splits is None else (came, rows)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        context: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet | None
    ) -> tuple[Tensor, Tensor]:
        found = synchronize(alltoall_async(tensor, splits, name, process_set))
        size = (process_set or ProcessSet()).size()
        came, rows = found if splits is not None else (found, torch.full((size,), tensor.shape[0] // size))
        context.how = (rows, _of_gradient(name), process_set)
        context.mark_non_differentiable(rows)
        return came, rows

    @staticmethod
    def backward(context: Any, gradient: Tensor, _: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        back, _ = synchronize(alltoall_async(gradient.contiguous(), *context.how))
        return back, None, None, None


def alltoall_async(
    tensor: Tensor, splits: Tensor | Sequence[int] | None = None, name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Handle:  # fmt: skip
    """Rows of `tensor` to each rank, as many as `splits` says, else equally many. With them: also the rows of each."""
    size = (process_set or ProcessSet()).size()
    given = splits is not None
    if splits is None and tensor.shape[0] % size:
        raise UsageError(f"alltoall of {tensor.shape[0]} rows over {size} ranks: give splits, or as many rows for each")
    rows = [int(n) for n in splits] if splits is not None else [tensor.shape[0] // size] * size
    if len(rows) != size or sum(rows) != tensor.shape[0] or min(rows) < 0:
        raise UsageError(f"alltoall: splits {rows} do not divide {tensor.shape[0]} rows over {size} ranks")
    handle = _begin("alltoall", name, [tensor], process_set, splits=tuple(rows))
    return handle if given else _first(handle)


def reducescatter(
    tensor: Tensor, name: str | None = None, compression: type[Compressor] = Compression.none,
    op: str | None = None, process_set: ProcessSet | None = None, **scales: float,
) -> Tensor:  # fmt: skip
    """This rank's rows of the mean of the ranks' tensors; lower ranks have one more where they cannot be divided. Its
    gradient is Horovod's: the ranks' rows, of a sum times the number of ranks.
    """
    small, context = compression.compress(tensor)
    found = _ReduceScatter.apply(small, name, op, process_set, scales)
    return compression.decompress(found, context)  # pyright: ignore[reportArgumentType]


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        context: Any, tensor: Tensor, name: str | None, op: str | None, process_set: ProcessSet | None, scales: Any
    ) -> Tensor:
        context.op, context.how = op, (_of_gradient(name), process_set)
        return synchronize(reducescatter_async(tensor, name, op, process_set, **scales))

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        _, process_set = context.how
        whole = allgather(gradient, *context.how)
        return whole * (process_set or ProcessSet()).size() if context.op == Sum else whole, None, None, None, None


def reducescatter_async(tensor: Tensor, *given: Any, **named: Any) -> Handle:
    """See `grouped_reducescatter_async`."""
    return _first(grouped_reducescatter_async([tensor], *given, **named))


def grouped_reducescatter(
    tensors: Sequence[Tensor], name: str | None = None, compression: type[Compressor] = Compression.none,
    op: str | None = None, process_set: ProcessSet | None = None, **scales: float,
) -> list[Tensor]:  # fmt: skip
    """`reducescatter` of each of them, in one call."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    found = synchronize(grouped_reducescatter_async([small for small, _ in pairs], name, op, process_set, **scales))
    return [compression.decompress(each, context) for each, (_, context) in zip(found, pairs, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor], name: str | None = None, op: str | None = None, process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Handle:  # fmt: skip
    """See `grouped_reducescatter`."""
    own, op = [tensor.detach().clone() for tensor in tensors], _reduction(None, op)
    _check_numbers(op, own)
    scales = {"prescale": prescale_factor, "postscale": postscale_factor}
    return _begin("reducescatter", name, own, process_set, op=op, **scales)


def barrier(process_set: ProcessSet | None = None) -> None:
    """Returns once all ranks (of `process_set`) have called it."""
    synchronize(_begin("barrier", None, [], process_set))


def join(device: int = -1, process_set: ProcessSet | None = None) -> int:
    """This rank has no more data: it gives zeros to the others' calls until all (of `process_set`) have joined. Returns
    the last, by its rank among all. `device` is Horovod's, and not needed.
    """
    last = process().engine_of(process_set).join()
    return process_set.ranks[last] if process_set is not None and process_set.ranks else last


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet | None = None
) -> Any:
    """What `root_rank` passes, on every rank: numbers, strings, tensors, and lists and dictionaries of them.

    Nothing is pickled. Raises `UsageError` for other objects.
    """
    place, size = process().there(), torch.zeros(1, dtype=torch.int64)
    content = torch.zeros(0, dtype=torch.uint8)
    if place.rank == root_rank:
        content = torch.frombuffer(bytearray(encode(obj)), dtype=torch.uint8)
        size[0] = content.numel()
    size = broadcast(size, root_rank, name and f"{name}.size", process_set)
    if place.rank != root_rank:
        content = torch.zeros(int(size), dtype=torch.uint8)
    return decode(bytes(broadcast(content, root_rank, name and f"{name}.content", process_set).numpy()))


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet | None = None) -> list[Any]:
    """What each rank passes, in rank order; see `broadcast_object`."""
    content = torch.frombuffer(bytearray(encode(obj)), dtype=torch.uint8)
    sizes = allgather(torch.tensor([content.numel()]), name and f"{name}.size", process_set)
    whole = allgather(content, name and f"{name}.content", process_set)
    return [decode(bytes(piece.numpy())) for piece in whole.split(sizes.tolist())]


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch normalisation by the mean and the variance of all ranks' batches, which may differ in size; input
    `[samples, channels, ...]`. Calls are matched by their order: all ranks use its layers alike.

    Statistics of inputs in 16 bits, and under autocast, are in float32. In evaluation it is `torch.nn.BatchNorm1d` and
    the others. Raises `ValueError` where all ranks together have fewer than two values a channel.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm of {list(input.shape)}: it takes [samples, channels, ...]")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training or process().there().world_size == 1:
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            return self._normal(input if input.dtype == torch.float64 else input.float()).to(input.dtype)

    def _normal(self, wide: Tensor) -> Tensor:
        dims, shape = [0, *range(2, wide.dim())], [1, -1, *[1] * (wide.dim() - 2)]
        count = wide.numel() / wide.shape[1]
        total = allreduce(torch.cat([wide.sum(dims), wide.new_tensor([count])]), op=Sum)
        if count < 2 and total[-1] < 2:
            raise ValueError(
                f"SyncBatchNorm of {list(wide.shape)}: expected more than 1 value per channel on all ranks together; "
                "train with larger batches"
            )
        mean, samples = total[:-1] / total[-1], total[-1].detach()
        centred = wide - mean.view(shape)
        variance = allreduce((centred * centred).sum(dims), op=Sum) / samples
        self._note(mean.detach(), variance.detach() * samples / (samples - 1))
        normal = centred * torch.rsqrt(variance + self.eps).view(shape)
        return normal if self.weight is None else normal * self.weight.view(shape) + self.bias.view(shape)

    def _note(self, mean: Tensor, variance: Tensor) -> None:
        """Running statistics, the variance without bias."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)
