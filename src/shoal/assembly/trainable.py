"""Which parameters of a user's model can be trained at all, before anything is divided, summed or saved.

Numbers that two parameters share, or that one shows twice, have one place in memory and several gradients: each layout
would add, update and save them in another way.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.errors import UserCodeError


def require_trainable(model: nn.Module) -> None:
    """Raises `UserCodeError` for a parameter that cannot be trained on many ranks as on one."""
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise UserCodeError(
                f"the parameter {name} has no shape before the model's first forward: call the model on a sample first"
            )
        _refuse_complex(name, parameter)
        _refuse_updates_in_backward(name, parameter)
        _refuse_repeated_numbers(name, parameter)
    for one, other in _sharing(model):
        raise UserCodeError(
            f"the parameters {one} and {other} share some of their numbers, which two gradients would then change: "
            "assign one parameter to both places to tie them, or clone() the tensors that they are made of"
        )


def _refuse_complex(name: str, parameter: Tensor) -> None:
    if parameter.is_complex():
        raise UserCodeError(
            f"the parameter {name} is complex, and Shoal's norms, optimizers and checkpoints are of real numbers: "
            "hold it as a real parameter [..., 2], and read it by torch.view_as_complex in forward"
        )


def _refuse_updates_in_backward(name: str, parameter: Tensor) -> None:
    if getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise UserCodeError(
            f"the parameter {name} has a hook of register_post_accumulate_grad_hook, which would be given the gradient "
            "of one rank's microbatch, as for an update inside of the backward: take it off, and let the optimizer "
            "that is handed over make the update"
        )


def _refuse_repeated_numbers(name: str, parameter: Tensor) -> None:
    if any(size > 1 and step == 0 for size, step in zip(parameter.shape, parameter.stride(), strict=True)):
        raise UserCodeError(
            f"the parameter {name} shows some of its numbers several times (it was made by expand): make it of the "
            "numbers alone, and expand it in forward"
        )


def _sharing(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Pairs of different parameters that have numbers in common."""
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.device.type != "meta" and parameter.numel():
            by_storage.setdefault(parameter.untyped_storage().data_ptr(), []).append((name, parameter))
    for found in by_storage.values():
        open_ones: list[tuple[str, Tensor]] = []
        for name, tensor in sorted(found, key=lambda each: each[1].storage_offset()):
            open_ones = [(other, one) for other, one in open_ones if _last(one) >= tensor.storage_offset()]
            for other, one in open_ones:
                if torch.isin(_places(one), _places(tensor)).any():
                    yield other, name
            open_ones.append((name, tensor))


def _last(tensor: Tensor) -> int:
    """Where its last element stands in its storage."""
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + reach)


def _places(tensor: Tensor) -> Tensor:
    """Where its elements stand in its storage."""
    places = torch.tensor(tensor.storage_offset())
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        places = places[..., None] + torch.arange(size) * step
    return places.flatten()
