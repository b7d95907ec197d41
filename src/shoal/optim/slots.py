"""An optimizer's state as named tensors: `exp_avg/layers.0.weight`. What checkpoints save and load.

The names are those of the parameters in the unsplit model. The tensors are what lies on this rank: of a sharded
parameter (a `DTensor`) its local part. Of a slot in 8 bits they are the numbers that it stands for, in float32 and in
memory of their own: blocks begin where a rank's part does, and so only numbers can be divided otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_map_only

from shoal.codec.moments import Quantised
from shoal.errors import UsageError
from shoal.optim.declared import Dims, Slot
from shoal.optim.fused import Delays, FusedOptimizer, StateHome


@runtime_checkable
class Packs(Protocol):
    """An optimizer that keeps slots in another form than that in which they are read."""

    def pack(self) -> None:
        """Brings them there."""
        ...


@runtime_checkable
class KeepsWhole(Protocol):
    """An optimizer that keeps slots of whole parameters, each on one rank (`Slot.whole`)."""

    def whole_shape(self, parameter: Parameter) -> Dims | None:
        """That of the whole parameter; None if its slots are on another rank."""
        ...


@runtime_checkable
class KeepsNumbers(Protocol):
    """An optimizer with slots that are numbers of Python (`Slot.python_number`)."""

    python_numbers: Sequence[str]
    """Their names."""


@runtime_checkable
class StoredElsewhere(Protocol):
    """What stands in the state for a tensor that is on disk, or that is held in another form."""

    def read(self) -> Tensor: ...


def named_slots(optimizer: torch.optim.Optimizer, parameters: Iterable[tuple[str, Parameter]]) -> dict[str, Tensor]:
    """Every tensor of the state, by slot and parameter name, and numbers (`KeepsNumbers`) as one. Empty before the
    first step. Waits for delayed updates.
    """
    _settle(optimizer)
    numbers = optimizer.python_numbers if isinstance(optimizer, KeepsNumbers) else ()
    return {
        f"{slot}/{name}": _as_tensor(value)
        for name, parameter in parameters
        for slot, value in tree_map_only(StoredElsewhere, _read, dict(optimizer.state.get(parameter, {}))).items()
        if isinstance(value, Tensor | Quantised) or slot in numbers
    }


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it has state of steps before, its own or loaded."""
    return any(float(state.get("step", 1)) != 0 for state in optimizer.state.values() if state)


def state_of_whole(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Tensor]:
    """Copies of the state of the parameters that it trains and that have `names`, by id: as `named_slots`, but with all
    numbers, and moments in the type of their parameter where it is the wider one.
    """
    found: dict[str, Tensor] = {}
    for parameter, state in optimizer.state.items():
        for slot, value in state.items() if parameter.requires_grad and id(parameter) in names else ():
            if value is not None:
                whole = torch.as_tensor(value).detach()
                is_moment = whole.shape == parameter.shape and whole.is_floating_point()
                dtype = torch.promote_types(whole.dtype, parameter.dtype) if is_moment else whole.dtype
                found[f"{slot}/{names[id(parameter)]}"] = whole.to(dtype, copy=True)
    return found


def make_slots(
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[tuple[str, Parameter]],
    saved: Mapping[str, torch.dtype],
    *,
    slots: Iterable[Slot],
) -> dict[str, Tensor]:
    """Empty tensors for the slots that were `saved` (name and dtype), put in the optimizer's state, to be filled.

    `slots` is what the optimizer declares. Those in 8 bits are filled in float32; then `pack_slots` is called. Raises
    `UsageError` for a saved slot that it does not have.
    """
    owners, declared, made = dict(parameters), {slot.name: slot for slot in slots}, {}
    _settle(optimizer)
    home = _home(optimizer)
    for key, dtype in saved.items():
        slot, name = slot_and_parameter(key)
        if name not in owners:
            continue
        if slot not in declared:
            older = (
                ", or it was written by an older Shoal, whose SOAP kept other slots" if "turned_avg" in declared else ""
            )
            raise UsageError(
                f"the checkpoint holds optimizer state '{slot}', and this run's optimizer keeps "
                f"{', '.join(declared) or 'none'}: go on with the optimizer and the keys that wrote it{older}"
            )
        parameter = owners[name]
        own = tuple(parameter.shape)
        shape = optimizer.whole_shape(parameter) if isinstance(optimizer, KeepsWhole) else own
        if shape is not None or declared[slot].like_parameter or declared[slot].with_parts:
            elsewhere = None if home is None or not declared[slot].like_parameter else home.to_read(own, dtype)
            value = optimizer.state[parameter][slot] = (
                _empty_slot(declared[slot], parameter, shape or own, dtype) if elsewhere is None else elsewhere
            )
            made[key] = local(value)
    return made


def pack_slots(optimizer: torch.optim.Optimizer) -> None:
    """After everything was read: what the optimizer keeps in 8 bits is brought there."""
    if isinstance(optimizer, Packs):
        optimizer.pack()
    if (home := _home(optimizer)) is not None:
        home.put_away(optimizer.state)


def slot_and_parameter(key: str) -> tuple[str, str]:
    """The two parts of a name as `named_slots` makes it."""
    slot, _, name = key.partition("/")
    return slot, name


def local(tensor: Tensor) -> Tensor:
    """What of `tensor` lies on this rank, as a view."""
    # Asked for by name: importing DTensor costs every run's start what only a sharded one needs.
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore[reportAttributeAccessIssue]


def _empty_slot(slot: Slot, parameter: Parameter, shape: Dims, dtype: torch.dtype) -> Tensor:
    if slot.like_parameter:
        return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)
    return torch.zeros(slot.shape(shape), dtype=dtype, device=parameter.device)


def _as_tensor(value: Tensor | Quantised | int | float) -> Tensor:
    if isinstance(value, int | float):
        return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)
    return value.decoded() if isinstance(value, Quantised) else local(value)


def _home(optimizer: torch.optim.Optimizer) -> StateHome | None:
    return optimizer.home if isinstance(optimizer, FusedOptimizer) else None


def _settle(optimizer: torch.optim.Optimizer) -> None:
    home = _home(optimizer)
    if isinstance(home, Delays):
        home.settle(optimizer.state)


def _read(stored: StoredElsewhere) -> Tensor:
    return stored.read()
