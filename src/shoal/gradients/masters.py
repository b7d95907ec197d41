"""Float32 master copies of weights that a model computes with in bfloat16 (arXiv:1710.03740, section 3.1).

    forward, backward     the model's parameters, in bfloat16
    `.grad`               float32 (`Tensor.grad_dtype`)
    sums over ranks       `precision.reduce_dtype`, float32 or bfloat16
    optimizer             masters, in float32
    after its step        parameter = bfloat16(master)

Where every rank has whole parameters, masters are whole too (`MasterWeights`). Under ZeRO-1 and -2 a rank has those of
its pieces, which is Megatron's distributed optimizer; under ZeRO-3 its pieces are the masters, and ranks gather them in
bfloat16, which is `fully_shard` with `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`. A checkpoint holds the masters
alone, as those of a float32 run.

Batch norms keep float32 parameters: PyTorch computes them so beside running statistics in float32.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.comm.collective import Collective
from shoal.gradients.bucket import FlatLayout, flat_layout
from shoal.gradients.gradients import OverReplica, Tuned, VisibleGradients
from shoal.gradients.reducer import OwnGradient
from shoal.gradients.script_writes import Placed, check_read_back, read_back_data, read_back_masters
from shoal.models.batch_norm import StepBatchNorm
from shoal.state import Owned, Trained


@dataclass(frozen=True)
class MixedPrecision:
    """As `torch.distributed.fsdp.MixedPrecisionPolicy`: what modules compute with, and what gradients are summed in."""

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype = torch.float32


def narrowed(model: nn.Module, trained: Sequence[Trained], mixed: MixedPrecision) -> list[Trained]:
    """`trained` with masters, and all float32 parameters of `model` but those of batch norms in `mixed.param_dtype`, in
    place.
    """
    kept = in_float32(model)
    found = [
        replace(t, master=t.parameter.data, reduce_dtype=mixed.reduce_dtype) if narrows(t.parameter, kept) else t
        for t in trained
    ]
    for parameter in model.parameters():
        if narrows(parameter, kept):
            parameter.data = _rounded(parameter.data, mixed.param_dtype)
            parameter.grad_dtype = torch.float32
    return found


def in_float32(model: nn.Module) -> frozenset[int]:
    """The parameters, by id, that stay in float32."""
    norms = (module for module in model.modules() if isinstance(module, _BatchNorm | StepBatchNorm))
    return frozenset(id(parameter) for norm in norms for parameter in nn.Module.parameters(norm, recurse=False))


def narrows(parameter: Tensor, kept: Collection[int]) -> bool:
    """Whether modules compute with it in fewer bits; `kept`: see `in_float32`."""
    return parameter.dtype == torch.float32 and id(parameter) not in kept


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter of ZeRO-3 whose numbers are elsewhere has one number of storage for all of them, and keeps that."""
    if tensor.untyped_storage().nbytes() < tensor.nbytes:
        return tensor.as_strided((), ()).to(dtype).expand(tensor.shape)
    return tensor.to(dtype)


@torch.no_grad()
def write_piece(piece: Tensor, numbers: Sequence[Tensor], layout: FlatLayout, rank: int) -> None:
    """What `rank` holds of parameters that have their `numbers`; the others are written to `piece` later."""
    for number, whole in enumerate(numbers):
        run = layout.run(number, rank)
        if run is not None and whole.untyped_storage().nbytes() >= whole.nbytes:
            piece[run.at : run.at + run.numel].copy_(whole.detach().reshape(-1)[run.start : run.stop])


class MasterWeights(OverReplica):
    """`gradients` of whole parameters, of which the optimizer steps the masters of `trained`. The norm adds up over
    `replica`.
    """

    def __init__(self, gradients: VisibleGradients, trained: Sequence[Trained], *, replica: Collective) -> None:
        self._gradients, self._replica = gradients, replica
        mixed = [(t.parameter, t.master) for t in trained if t.master is not None]
        self._masters, self._computed = _side_by_side(mixed)
        self._pairs = [(p, Parameter(m)) for (p, _), m in zip(mixed, self._masters.views, strict=True)]
        names = [t.holding.name for t in trained if t.master is not None]
        self._placed = [
            Placed(name, p, view) for name, (p, _), view in zip(names, mixed, self._computed.views, strict=True)
        ]
        masters = {id(parameter): master for parameter, master in self._pairs}
        self.owned: Sequence[Owned] = [
            replace(each, parameter=masters.get(id(each.parameter), each.parameter)) for each in gradients.owned
        ]
        self._device = self._masters.flat.device

    @property
    def own(self) -> OwnGradient:
        return self._gradients.own

    @property
    def tuned(self) -> Tuned | None:
        return self._gradients.tuned

    @property
    def used(self) -> frozenset[str]:
        return self._gradients.used

    @property
    def divided(self) -> bool:
        return self._gradients.divided

    def start(self) -> None:
        self._read_back()
        for _, master in self._pairs:
            master.grad = None
        self._gradients.start()

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        return self._gradients.backward(last=last)

    def schedule(self) -> AbstractContextManager[None]:
        return self._gradients.schedule()

    def reduce(self) -> Tensor:
        norm = self._gradients.reduce()
        self._show()
        return norm

    def expose(self, names: Collection[str]) -> None:
        self._gradients.expose(names)
        self._show()

    def accept(self) -> None:
        self._gradients.accept()
        self._show()

    def accept_weights(self) -> None:
        self._gradients.accept_weights()
        self._read_back()

    def gather(self) -> None:
        check_read_back(self._placed)
        self._computed.flat.copy_(self._masters.flat)
        self._gradients.gather()

    def settle(self) -> None:
        self._gradients.settle()
        self._read_back()

    def full_parameters(self, *, compares: bool = True) -> AbstractContextManager[None]:
        return self._gradients.full_parameters(compares=compares)

    def close(self) -> None:
        self._gradients.close()

    def _read_back(self) -> None:
        """See `script_writes`."""
        read_back_data(self._placed)
        read_back_masters(self._masters.flat, self._computed.flat)

    def _show(self) -> None:
        """Makes the agreed gradients what the optimizer sees."""
        for parameter, master in self._pairs:
            master.grad = parameter.grad


@dataclass(frozen=True)
class _Flat:
    """Tensors as `views` of one buffer."""

    flat: Tensor
    views: Sequence[Tensor]


def _side_by_side(mixed: Sequence[tuple[Parameter, Tensor]]) -> tuple[_Flat, _Flat]:
    """Masters and parameters, each in one buffer: one kernel then rounds all of them."""
    layout = flat_layout([master.numel() for _, master in mixed], 1)
    first, master = mixed[0]
    found = [torch.zeros(layout.numel, dtype=each.dtype, device=each.device) for each in (master, first)]
    both = [_Flat(flat, [flat[layout.slice(n)].view(m.shape) for n, (_, m) in enumerate(mixed)]) for flat in found]
    for (parameter, master), own, computed in zip(mixed, both[0].views, both[1].views, strict=True):
        own.copy_(master)
        computed.copy_(parameter.detach())
        parameter.data = computed
    return both[0], both[1]
