"""What Lightning's callbacks and modules ask of all ranks: sums, copies and decisions, over PyTorch's default group.

Before the run begins, and behind its end, this process is alone. What is sent is a tensor, or text: nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import UserCodeError

_OPERATIONS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def ranks() -> int:
    """How many take part."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def of_each(own: Tensor) -> list[Tensor]:
    """What every rank has, of tensors of one shape."""
    return [own] if ranks() == 1 else list(all_gathered(own, None, sync_grads=False))


def part_of(each: Sequence[Tensor], operation: str) -> Tensor:
    """This rank's of what every rank had. Where there were others, the first one has their sum, or all have the
    smallest or the largest.
    """
    rank = dist.get_rank() if ranks() > 1 else 0
    if len(each) == ranks():
        return each[rank]
    whole = torch.stack(list(each))
    if operation in ("min", "max"):
        return whole.amin(0) if operation == "min" else whole.amax(0)
    return whole.sum(0) if rank == 0 else torch.zeros_like(each[0])


def reduced(value: Any, operation: Any, group: Any = None, *, weight: int | None = None) -> Any:
    """A tensor over all ranks; what is none stays as it is. `weight`: what this rank counts in a mean; None: as every
    other one does.
    """
    if not isinstance(value, Tensor) or ranks() == 1:
        return value
    name = _name(operation)
    if name not in _OPERATIONS:
        raise UserCodeError(f"strategy.reduce(reduce_op={operation!r}): it is one of {', '.join(_OPERATIONS)}")
    mean = name in ("mean", "avg")
    total = value.detach().clone()
    total = total.double() if mean and not total.is_floating_point() else total
    if not mean:
        dist.all_reduce(total, _OPERATIONS[name], group)
        return total
    counts = torch.tensor(1.0 if weight is None else float(weight), dtype=torch.float64, device=total.device)
    total = torch.zeros_like(total) if weight == 0 else total * float(counts)
    dist.all_reduce(total, group=group)
    dist.all_reduce(counts, group=group)
    return total / counts.to(total.dtype)


def _name(operation: Any) -> str:
    if operation is None:
        return "sum"
    if isinstance(operation, str):
        return operation.lower()
    return str(operation).rpartition(".")[2].lower()


def broadcast(value: Any, source: int, device: torch.device) -> Any:
    """What rank `source` has: numbers, texts, None, and lists and dicts of these. Raises `UserCodeError` for others."""
    if ranks() == 1:
        return value
    try:
        text = json.dumps(value).encode()
    except TypeError as error:
        raise UserCodeError(
            f"strategy.broadcast() of a {type(value).__name__}: it takes numbers, texts, None, and lists and dicts of "
            "these; send a tensor by torch.distributed.broadcast"
        ) from error
    size = torch.tensor([len(text)], device=device)
    dist.broadcast(size, source)
    sent = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if dist.get_rank() == source:
        sent.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(sent, source)
    return json.loads(bytes(sent.cpu().tolist()).decode())


def decided(own: bool, *, by_all: bool, device: torch.device) -> bool:
    """Whether all ranks are for it, or any."""
    if ranks() == 1:
        return own
    votes = torch.tensor([int(own)], device=device)
    dist.all_reduce(votes)
    return int(votes) == ranks() if by_all else int(votes) > 0


def all_gathered(tensor: Tensor, group: Any, *, sync_grads: bool) -> Tensor:
    """The tensors of all ranks, [ranks, ...]; `sync_grads`: with their gradients."""
    if ranks() == 1:
        return tensor
    if sync_grads:
        from torch.distributed.nn.functional import all_gather

        return torch.stack(list(all_gather(tensor.contiguous(), group or dist.group.WORLD)))
    found = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(ranks())]
    dist.all_gather(found, tensor.detach().contiguous(), group)
    return torch.stack(found)
