"""Units of ZeRO-3: parameters that are gathered and released together, and the hooks that do it.

    before the forward of a block    gather it, and begin to gather the next
    after it                         release it
    before its backward              gather it, and begin to gather the one before     (hook: gradient of its output)
    after it                         release it                                        (hook: gradients of its inputs)

What belongs to no block, or to several, is gathered before the first module that uses it and stays until the backward
is over. The order of gathers follows from the model's control flow, which must be the same on all ranks of `shard`.

Note: recompute
---------------
A block that recomputes its forward in the backward runs its hooks again. It is already gathered and must not be
released before its own backward, so a forward inside a backward releases nothing.

Note: a block that is called twice
----------------------------------
The inputs of its second call may be the outputs of its first: their gradient ends one backward and begins another, in
this order of hooks: begin, end. So a unit is released when as many backwards have ended as have begun.

Note: a view that is changed in place
-------------------------------------
Autograd then makes a new graph of the view, in which hooks of the old one are never called. Those of its base are: the
base's gradient is known before the block's backward begins (of an output), or not before it has ended (of an input).

Note: schedules
---------------
In a pipeline's schedule a unit stays gathered from its first use to the end. Otherwise it would be gathered twice a
microbatch, and a schedule that computes weight gradients separately needs it again after its hooks have run.

Note: what autograd has saved
-----------------------------
The backward of a product reads the weight that the forward saved, often as a view. The buffer is therefore one storage
that is emptied and filled again, not a new tensor: a saved view sees the numbers of the next `gather`, which are the
same ones, as nothing updates a piece between forward and backward.

Note: weights that a forward writes
-----------------------------------
`self.weight.data.mul_(self.mask)` in a forward, or a weight that is clipped there, is an update like any other, and is
to be there in the next step. So what stands in the whole goes back into the piece behind each forward of a unit: a copy
of one piece, beside the gather of all. Where pieces are coded on their way, or live on the host, they cannot be had
back from the whole, or not for as little. There such a forward is refused: in the first forwards of a unit, and then
now and then, the whole is compared with what it was before, by a fingerprint of 63 bits.

Note: a parameter that is read while it is released
---------------------------------------------------
Its numbers are in pieces, so that what reads them (a moving average between two steps, a weight that a loss penalises,
a block that uses the weight of another) would compute with something else. While it is released a parameter is
therefore a `ReleasedParameter`: the same object, of a class whose operators raise. That costs nothing where nobody
reads. What reads memory behind PyTorch's back sees NaN.

Note: gradients that are differentiated again
---------------------------------------------
The backward of a backward (`create_graph`) needs the weights when the hooks of the block are over. A unit through
which such a backward has gone stays until the run's own backward has ended. An input that is a leaf has no node whose
backward could end the block's; then, too, it stays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from shoal.comm.collective import Collective, Handle
from shoal.comm.exchanges.exchange import PieceCodecs
from shoal.errors import UserCodeError
from shoal.gradients.bucket import FlatLayout
from shoal.gradients.masters import write_piece
from shoal.gradients.script_writes import Placed, WrittenAlike, compared, read_back_masters, replaced
from shoal.gradients.sharded import flattened
from shoal.maths.fingerprint import fingerprint


class ShardedParameters:
    """The `parameters` of one unit and kind, and their `names`. They begin released. `codecs` code what ranks gather of
    them; `read` has for each the sentence that is raised where it is read while it is released. `masters`: their
    numbers in the type of the piece, where that is not their own.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        layout: FlatLayout,
        shard: Collective,
        *,
        names: Sequence[str],
        read: Sequence[str],
        codecs: PieceCodecs = PieceCodecs(),
        masters: Sequence[Tensor] | None = None,
    ) -> None:
        self._names = names
        self._parameters, self._layout, self._shard, self._codecs = parameters, layout, shard, codecs
        self._whole = parameters[0].new_empty(layout.numel)  # released below, and never touched before a gather
        numbers = parameters if masters is None else masters
        self.piece = codecs.zeros(layout.piece, dtype=numbers[0].dtype, device=self._whole.device)
        write_piece(self.piece, numbers, layout, shard.rank)
        self._placed = self._places()
        nothing = torch.full((), math.nan, dtype=self._whole.dtype, device=self._whole.device)
        self._released = [nothing.expand(p.shape) for p in parameters]
        self._kinds, self._read = [type(p) for p in parameters], read
        self._bytes = self._whole.untyped_storage().nbytes()
        self._handle: Handle | None = None
        self._forwards, self._gathered = 0, None
        self._alike = WrittenAlike(shard)
        self._updated: Tensor | None = None
        self.here = True
        self.release()

    @property
    def whole(self) -> Tensor:
        """The buffer that it is gathered into."""
        return self._whole

    def start_gather(self, *, exact: bool = False) -> None:
        """Begins to bring the pieces of all ranks; `exact`: as they are, and not coded."""
        if self.here or self._handle is not None:
            return
        self._whole.untyped_storage().resize_(self._bytes)
        codecs = self._codecs.exact() if exact else self._codecs
        self._handle = codecs.gather(self._shard, self._whole, self.piece)

    def gather(self, *, exact: bool = False) -> None:
        """Returns when the parameters are whole."""
        if self.here:
            return
        self.start_gather(exact=exact)
        assert self._handle is not None
        self._handle.wait()
        self._handle, self.here = None, True
        for (_, parameter, place), kind in zip(self._placed, self._kinds, strict=True):
            parameter.__class__ = kind
            parameter.data = place

    def release(self) -> None:
        """The parameters are gone, but for this rank's piece."""
        if self._handle is not None:  # begun for a use that did not come
            self._handle.wait()
            self._handle = None
            self._whole.untyped_storage().resize_(0)
        if not self.here:
            return
        self.here, self._gathered = False, None
        for parameter, kind, nothing, read in zip(
            self._parameters, self._kinds, self._released, self._read, strict=True
        ):
            parameter.data = nothing
            parameter.__class__ = released(kind)
            assert isinstance(parameter, ReleasedParameter)
            parameter.read = read
        self._whole.untyped_storage().resize_(0)

    def read_back(self, *, for_a_while: bool = False) -> None:
        """What a script has written into the whole parameters is in the piece, too. `for_a_while`: the masters that it
        replaces are kept until `updated`. See `script_writes`.
        """
        if replaced(self._placed):
            self._renew()
        own = self._whole[self._layout.mine(self._shard.rank)]
        masters = self.piece.dtype != own.dtype
        if for_a_while and masters and self._updated is None and not torch.equal(self.piece.to(own), own):
            self._updated = self.piece.clone()
        read_back_masters(self.piece, own, before=self._updated)

    def compare(self, *, always: bool = False) -> None:
        """Behind a time in which a script could write into the whole: see `WrittenAlike`."""
        self._alike.compare(self._placed, always=always)

    def updated(self) -> None:
        """The optimizer has made its update."""
        self._updated = None

    def before_forward(self) -> None:
        """The whole parameters are about to be used."""
        if self._codecs == PieceCodecs() or self._gathered is not None:
            return
        self._forwards += 1
        if compared(self._forwards):
            self._gathered = self._fingerprint()

    def read_back_forward(self, *, compares: bool) -> None:
        """What a forward has written into the whole is in the piece, too, or raises `UserCodeError`. See the note on
        weights that a forward writes.
        """
        if not self.here:
            return
        if self._codecs == PieceCodecs():
            self.read_back()
            if compares:
                self.compare()
        elif replaced(self._placed) or (self._gathered is not None and self._gathered != self._fingerprint()):
            raise UserCodeError(
                f"a forward wrote into its own weights ({self._names[0]} or one beside it), which ZeRO-3 cannot keep "
                "where pieces are coded or live on the host: write them inside run.full_parameters(), or set "
                "memory.zero = 2"
            )

    def _fingerprint(self) -> int:
        return fingerprint({"": self._whole})

    def _places(self) -> list[Placed]:
        views = [self._whole[self._layout.slice(n)].view(p.shape) for n, p in enumerate(self._parameters)]
        return list(map(Placed, self._names, self._parameters, views))

    def _renew(self) -> None:
        """Another buffer with what the parameters hold; whoever has views of the old one keeps its numbers."""
        self._whole.data = flattened(self._parameters, self._layout)
        self._placed = self._places()
        for _, parameter, place in self._placed:
            parameter.data = place


@dataclass
class _Call:
    """One call of a block. `begun`: its backward is under way; `inputs`: ids of those whose gradients will end it."""

    inputs: frozenset[int]
    begun: bool = False


@dataclass
class Unit:
    """`parts`: its parameters, by kind. `passes`: is it released after each forward and backward? `stays`: not now;
    `kept`: not before the run's own backward has ended.
    """

    parts: Sequence[ShardedParameters]
    passes: bool
    stays: bool = False
    kept: bool = False
    following: Unit | None = None
    preceding: Unit | None = None
    _calls: list[_Call] = field(default_factory=list, init=False)
    _backwards: int = field(default=0, init=False)

    def start_gather(self, *, exact: bool = False) -> None:
        """Begins to bring its parameters; `exact`: as they are, and not coded."""
        for part in self.parts:
            part.start_gather(exact=exact)

    def gather(self, *, exact: bool = False) -> None:
        """Returns when its parameters are whole."""
        self.start_gather(exact=exact)
        for part in self.parts:
            part.gather(exact=exact)

    def release(self) -> None:
        """Its parameters are gone."""
        self._backwards, self.kept = 0, False
        for part in self.parts:
            part.release()

    def read_back(self, *, compares: bool) -> None:
        """Takes what was written into its whole parameters into the pieces, until the next update at least. `compares`:
        all ranks come here.
        """
        for part in self.parts:
            part.read_back(for_a_while=True)
            if compares:
                part.compare(always=True)

    def read_back_forward(self, *, compares: bool = True) -> None:
        """The same behind a forward; inside of `full_parameters` or a schedule not before their end. `compares`: all
        ranks come here with it whole.
        """
        if not self.stays:
            for part in self.parts:
                part.read_back_forward(compares=compares)

    def updated(self) -> None:
        """The optimizer has made its update."""
        for part in self.parts:
            part.updated()

    def watch(self, module: nn.Module) -> list[RemovableHandle]:
        """Gathers it before `module` computes; where it passes, also releases it behind that, and in the backward."""
        handles = []
        if module._forward_pre_hooks:  # that read its parameters, as those of spectral_norm and pruning do
            handles.append(module.register_forward_pre_hook(self._before_other_hooks, prepend=True))
        handles.append(module.register_forward_pre_hook(self._before_forward, with_kwargs=True))
        if self.passes:
            handles.append(module.register_forward_hook(self._after_forward))
        return handles

    def __deepcopy__(self, memo: Any) -> Unit:
        """What the hooks of a copied module belong to: a unit of nothing. The copy has parameters of its own."""
        return Unit((), self.passes)

    @property
    def here(self) -> bool:
        """Are its parameters whole?"""
        return all(part.here for part in self.parts)

    def _gather_for(self, module: nn.Module) -> None:
        if not self.here and peek_interpreter_stack() is not None:
            raise UserCodeError(
                f"a transform of torch.func calls a {type(module).__name__} under ZeRO-3, which cannot gather its "
                "weights there: compute inside run.full_parameters(), backward included, or set memory.zero = 2"
            )
        self.gather()

    def _before_other_hooks(self, module: nn.Module, args: Any) -> None:  # a method, for `__deepcopy__`
        self._gather_for(module)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._gather_for(module)
        if _in_backward():
            return
        for part in self.parts:
            part.before_forward()
        if not self.passes:
            return
        if self.following is not None:
            self.following.start_gather()
        follows = torch.is_grad_enabled() and not self.stays
        inputs = [_base_of(tensor) for tensor in _differentiable((args, kwargs))] if follows else []
        if any(tensor.grad_fn is None for tensor in inputs):  # see the note on gradients that are differentiated again
            inputs, self.kept = [], True
        call = _Call(frozenset(map(id, inputs)))
        self._calls.append(call)
        if inputs:
            register_multi_grad_hook(inputs, lambda gradients: self._after_backward(call))

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if _in_backward():
            return
        call = self._calls.pop()
        if torch.is_grad_enabled() and not self.stays:
            for tensor in _differentiable(output):
                tensor.register_hook(lambda gradient: self._before_backward(call))
                if (base := _base_of(tensor)) is not tensor and id(base) not in call.inputs:
                    base.register_hook(lambda gradient: self._before_backward(call))
        self.read_back_forward()
        self._pass_on()

    def _pass_on(self) -> None:
        if not self.stays and not self.kept:
            self.release()

    def _before_backward(self, call: _Call) -> None:
        self.kept = self.kept or torch.is_grad_enabled()
        if call.inputs and not call.begun:
            call.begun = True
            self._backwards += 1
        self.gather()
        if self.preceding is not None:
            self.preceding.start_gather()

    def _after_backward(self, call: _Call) -> None:
        if call.begun:
            call.begun = False
            self._backwards -= 1
        if self._backwards <= 0:
            self._pass_on()


_SHAPE = ("size", "dim", "numel", "nelement", "stride", "element_size", "storage_offset", "data_ptr", "untyped_storage")
_HARMLESS = frozenset(
    {*_SHAPE, "is_floating_point", "is_complex", "is_contiguous", "get_device", "requires_grad_", "retain_grad"}
    | {"new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "full_like", "empty_like"}
    | {"register_hook", "register_post_accumulate_grad_hook", "__hash__", "backward", "grad"}
)
"""What may be asked of a parameter whose numbers are not there: its shape and type, in new tensors too. The last two
compute gradients, and have it among their `inputs`.
"""

_READING_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})


class ReleasedParameter(Parameter):
    """A parameter that is in pieces: what asks for its numbers raises `read`, a sentence; what asks for its gradient by
    itself raises `differentiated`, where the graph of a loss has other tensors in its place.
    """

    read: str
    differentiated: str | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _reads(func) or func is torch.autograd.grad:
            found = next(each for each in tensors_in((args, kwargs or {})) if isinstance(each, ReleasedParameter))
            if (refusal := found.read if _reads(func) else found.differentiated) is not None:
                raise UserCodeError(refusal)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@cache
def released(kind: type[Parameter]) -> type[ReleasedParameter]:
    """The class of a released parameter of class `kind`."""
    return ReleasedParameter if kind is Parameter else type(f"Released{kind.__name__}", (ReleasedParameter, kind), {})


def read_outside(name: str, block: str | None) -> str:
    """The sentence about a parameter that is read while it is released; `block` holds it, None: no block does."""
    where = "where no module that uses it is computing" if block is None else f"outside of {block}, the block it is in"
    return (
        f"the parameter {name} was read {where}; there ZeRO-3 has it in pieces. Call the module that has it, read and "
        "write it inside run.full_parameters(), or set memory.zero = 2"
    )


def _reads(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):  # of an attribute, such as Tensor.shape
        return getattr(func.__self__, "__name__", "") in _READING_ATTRIBUTES
    return name not in _HARMLESS


def chained(units: Sequence[Unit]) -> None:
    """Tells each unit its neighbours in the order of the forward."""
    for first, second in pairwise(units):
        first.following, second.preceding = second, first


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _differentiable(tree: Any) -> Iterator[Tensor]:
    """Those of `tensors_in` that autograd follows."""
    return (tensor for tensor in tensors_in(tree) if tensor.requires_grad)


def _base_of(tensor: Tensor) -> Tensor:
    """What it is a view of, where autograd follows that; else itself."""
    base = tensor._base
    return tensor if base is None or not base.requires_grad else base


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors of a tree of tuples, lists, dictionaries and dataclasses."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for branch in tree.values():
            yield from tensors_in(branch)
    elif isinstance(tree, tuple | list):
        for branch in tree:
            yield from tensors_in(branch)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for own in dataclasses.fields(tree):
            yield from tensors_in(getattr(tree, own.name))
