"""Blocks that are alike are traced once: what one of them does, all do.

    rehearsal   one block runs by itself (`planner.trace.rehearsal`)
    replay      where the model calls a block like it, a node of autograd says the same in that block's name, once in
                the forward and once in the backward

The model's own code runs as it is, so that a block gets the inputs, the masks and the caches that it would get. Blocks
are alike if their modules, the shapes of their parameters and their attributes are; of numbers that say which block it
is, and of rates of dropout between 0 and 1, it does not matter how large they are. A block is called as another one
was if its tensors have the same shapes and everything else is equal. Where a block cannot be rehearsed (it leaves
tensors behind, as where its router's logits are collected, writes into what it is given, changes its own attributes,
looks at its own number, or is called twice), `Unlike` is raised, and the model is traced whole.
"""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shoal.planner.trace.operator import Operator
from shoal.planner.trace.recorder import NAMELESS, Recorder
from shoal.planner.trace.rehearsal import PLAIN, Event, Given, Made, Rehearsal, Script, Unlike, is_number_of_block

# Which modules are alike.


_INTERNAL = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Likeness:
    """What of a module decides which operators it runs, as something to compare."""

    def __init__(self, root: nn.Module) -> None:
        self._inside = {id(module): path for path, module in root.named_modules()}
        self._open: set[int] = set()
        self.key = tuple(self._module(path, module) for path, module in root.named_modules())

    def _module(self, path: str, module: nn.Module) -> Hashable:
        own = {name: value for name, value in vars(module).items() if name not in _INTERNAL}
        tensors = {**module._parameters, **module._buffers}
        hooks = [hook for name in _HOOKS for hook in getattr(module, name).values()]
        return path, type(module), module.training, self._named(tensors), self._unnumbered(own), self._of(hooks)

    def _named(self, values: Mapping[Any, Any]) -> Hashable:
        return tuple(
            (name, self._rate(value) if _is_rate(name) and isinstance(value, float) else self._of(value))
            for name, value in values.items()
        )

    def _unnumbered(self, attributes: Mapping[str, Any]) -> Hashable:
        """What a rehearsal would notice (`planner.trace.rehearsal`), and the numbers in objects of our own."""
        return self._named({n: value for n, value in attributes.items() if not is_number_of_block(n, value)})

    @staticmethod
    def _rate(value: float) -> Hashable:
        return value if value in (0.0, 1.0) else "a rate"

    def _of(self, value: Any) -> Hashable:
        if isinstance(value, PLAIN):
            return type(value), value
        if isinstance(value, Tensor):
            return type(value), tuple(value.shape), value.dtype, value.requires_grad
        if isinstance(value, nn.Module):
            return "module", self._inside.get(id(value), id(value))
        if id(value) in self._open:
            return "itself"
        self._open.add(id(value))
        try:
            return type(value), self._inner(value)
        finally:
            self._open.discard(id(value))

    def _inner(self, value: Any) -> Hashable:
        if isinstance(value, Mapping):
            return self._named(value)
        if isinstance(value, list | tuple | set | frozenset):
            return tuple(map(self._of, value))
        if isinstance(value, functools.partial):
            return self._of(value.func), self._of(value.args), self._named(value.keywords)
        if isinstance(value, types.MethodType):
            return value.__func__, self._of(value.__self__)
        if isinstance(value, types.FunctionType):
            cells = [_held(cell) for cell in value.__closure__ or ()]
            return value.__code__, self._of(value.__defaults__), self._of(value.__kwdefaults__), self._of(cells)
        is_ours = type(value).__module__.startswith("shoal.") and not isinstance(value, _Calls | Recorder)
        if is_ours and hasattr(value, "__dict__"):
            return self._unnumbered(vars(value))
        return id(value)


def _held(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


def _is_rate(name: Any) -> bool:
    return isinstance(name, str) and (name == "p" or "drop" in name)


# A block that says what another one did.


class _Replay:
    """One call of a block like the one of `script`."""

    def __init__(self, script: Script, recorder: Recorder, path: str, block: nn.Module) -> None:
        self._script, self._recorder, self._path = script, recorder, path
        self._unit = recorder.units.holding(path)
        self._names = {name: recorder.names[id(block.get_parameter(own))] for name, own in script.names.items()}
        self._tokens: dict[int, int] = {}
        self._held: dict[tuple[str, int], Tensor] = {}

    def forward(self, inputs: Mapping[int, Tensor]) -> list[Tensor]:
        """The outputs that the block makes."""
        script, made = self._script, {output.number: output for output in self._script.made}
        kept, outputs = script.kept, dict[int, Tensor]()
        self._held |= {("input", place): x.detach() for place, x in inputs.items() if place in kept["input"]}
        for event in script.forward:
            if event.kind == "begin" and event.number in made:
                outputs[event.number] = self._tensor(made[event.number], event)
            else:
                self._play(event)
        self._held |= {("end", number): x.detach() for number, x in outputs.items() if number in kept["end"]}
        self._say(("forward",))
        return [outputs[number] for number in made]

    def backward(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the inputs. Raises `Unlike` for gradients of outputs that are not those of the rehearsal"""
        self._check(given)
        script, found = self._script, dict[int, Tensor]()
        made = {one.number: one for one in script.gradients if isinstance(one, Made)}
        for event in script.backward:
            if event.kind == "begin" and event.number in made:
                found[event.number] = self._tensor(made[event.number], event)
            elif event.kind == "gradient":
                gradient = given[event.number]
                assert gradient is not None  # `_check`
                self._recorder.alive.end(gradient.untyped_storage()._cdata)
            elif event.number not in found:
                self._play(event)
        self._say(("recompute", "backward"))
        return [
            given[one.number] if isinstance(one, Given) else None if one is None else found[one.number]
            for one in script.gradients
        ]

    def _check(self, given: Sequence[Tensor | None]) -> None:
        for made, gradient in zip(self._script.made, given, strict=True):
            if made.trained != (gradient is not None):
                raise Unlike
            if gradient is not None and gradient.stride() != made.again().stride():
                raise Unlike

    def _tensor(self, made: Made, event: Event) -> Tensor:
        with self._recorder.silent():
            tensor = made.again()
            self._recorder.alive.see(tensor, self._of_this(event.unit))
            return tensor

    def _play(self, event: Event) -> None:
        alive = self._recorder.alive
        if event.kind == "begin":
            self._tokens[event.number] = next(NAMELESS)
            alive.begin(self._tokens[event.number], event.size, self._of_this(event.unit))
        elif event.kind == "fill":
            alive.fill(self._names.get(event.name, event.name), event.size)
        elif (event.kind, event.number) in self._held:
            with self._recorder.silent():
                del self._held[event.kind, event.number]
        elif event.kind == "later":
            self._recorder.ends_with_forward.append(self._tokens.pop(event.number))
        elif event.kind == "end" and event.number in self._tokens:
            alive.end(self._tokens.pop(event.number))

    def _of_this(self, unit: int | None) -> int | None:
        return self._unit if unit == self._script.unit else unit

    def _say(self, phases: Sequence[str]) -> None:
        script, recorder = self._script, self._recorder
        recorder.operators += [self._renamed(one) for one in script.operators if one.phase in phases]
        recorder.messages += [
            replace(one, unit=self._of_this(one.unit)) for one in script.messages if one.phase in phases
        ]

    def _renamed(self, one: Operator) -> Operator:
        theirs = self._script.path
        inside = one.module == theirs or one.module.startswith(f"{theirs}.")
        module = self._path + one.module[len(theirs) :] if inside else one.module
        return replace(one, module=module, unit=self._of_this(one.unit))


class _StandIn(torch.autograd.Function):
    """A block in the model's graph."""

    @staticmethod
    def forward(ctx: Any, replay: _Replay, made: Sequence[Made], places: Sequence[int], *tensors: Tensor) -> Any:
        ctx.replay = replay
        ctx.set_materialize_grads(False)
        outputs = replay.forward(dict(zip(places, tensors[1:], strict=True)))
        ctx.mark_non_differentiable(*(x for x, one in zip(outputs, made, strict=True) if not one.trained))
        ctx.places = places
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        gradients = ctx.replay.backward(given)
        return None, None, None, None, *(gradients[place] for place in ctx.places)


@contextmanager
def standing_in(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Inside, blocks of `model` that are like others say to `recorder` what one of them did."""
    paths = [path for path, unit in recorder.units.of_module.items() if unit in recorder.units.blocks]
    likeness = {path: _Likeness(model.get_submodule(path)).key for path in paths}
    seen, calls, shared = Counter(likeness.values()), _Calls(recorder), _shared(model)
    blocks = {path: model.get_submodule(path) for path in paths if seen[likeness[path]] > 1}
    alike = {path: block for path, block in blocks.items() if shared.isdisjoint(map(id, block.parameters()))}
    before = {path: vars(block).get("forward") for path, block in alike.items()}
    for path, block in alike.items():
        block.forward = functools.partial(calls, path, block, likeness[path], block.forward)
    try:
        yield
    finally:
        for path, block in alike.items():
            del block.forward
            if (own := before[path]) is not None:
                block.forward = own


def _shared(model: nn.Module) -> set[int]:
    """Parameters in several places of `model`: their gradients are summed before they are added."""
    places = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return {key for key, times in places.items() if times > 1}


class _Calls:
    """Calls of blocks, by what they are like and how they are called. A block that is called again is `Unlike` itself:
    the gradients of both calls are summed before they are added.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._scripts, self._paths = recorder, dict[Hashable, Script](), set[str]()

    def __call__(self, path: str, block: nn.Module, like: Hashable, forward: Any, *args: Any, **kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        called = None if self._is_inside() else _called(leaves, form)
        if called is None:
            return forward(*args, **kwargs)
        if path in self._paths:
            raise Unlike
        self._paths.add(path)
        if (like, called) not in self._scripts:
            before, rehearsal = _Likeness(block).key, Rehearsal(self._recorder, path, block)
            self._scripts[like, called] = rehearsal(forward, leaves, form)
            if _Likeness(block).key != before:
                raise Unlike
        script = self._scripts[like, called]
        return self._stand_in(script, _Replay(script, self._recorder, path, block), leaves)

    def _is_inside(self) -> bool:
        """Inside of what is computed again, or of what records no gradient, a block is no node of the graph."""
        autograd: Any = vars(torch._C)["_autograd"]
        hooks = autograd._top_saved_tensors_default_hooks(True)
        return self._recorder.in_backward or not torch.is_grad_enabled() or hooks is not None

    def _stand_in(self, script: Script, replay: _Replay, leaves: Sequence[Any]) -> Any:
        places = {id(leaf): place for place, leaf in reversed([*enumerate(leaves)]) if isinstance(leaf, Tensor)}
        inputs = {place: leaves[place] for place in places.values()}
        if any(made.trained for made in script.made):
            with self._recorder.silent():
                seed = torch.empty(0, requires_grad=True)
            outputs = iter(_StandIn.apply(replay, script.made, [*inputs], seed, *inputs.values()))
        else:
            outputs = iter(replay.forward(inputs))
        found = [
            next(outputs) if isinstance(one, Made) else leaves[one.number] if isinstance(one, Given) else one
            for one in script.outputs
        ]
        return tree_unflatten(found, script.form)


def _called(leaves: Sequence[Any], form: TreeSpec) -> Hashable | None:
    """How a block is called, as something to compare; None where more than shapes may matter."""
    first = {id(leaf): place for place, leaf in reversed([*enumerate(leaves)])}
    found: list[Hashable] = [str(form), torch.is_autocast_enabled("cpu")]
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter):
            shape, stride = tuple(leaf.shape), leaf.stride()
            found.append((shape, stride, leaf.dtype, leaf.requires_grad, first[id(leaf)]))
        elif isinstance(leaf, PLAIN):
            found.append((type(leaf), leaf))
        else:
            return None
    return tuple(found)
