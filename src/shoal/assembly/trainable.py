"""Which parameters of a user's model can be trained at all, before anything is divided, summed or saved.

Numbers that two parameters share, or that one shows twice, have one place in memory and several gradients: each layout
would add, update and save them in another way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter, itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from shoal.errors import UserCodeError
from shoal.gradients.partial_gradient import PartialGradient
from shoal.models.adapters import adapt, is_adapter, quantise
from shoal.models.build import draw
from shoal.models.roles import roles_of
from shoal.runfile.run_file import RunFile
from shoal.sparsity.freezing import freeze
from shoal.state import same_objects


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
    for name, module in model.named_modules():
        _refuse_other_train(name, module)
    for one, other in _sharing(model):
        raise UserCodeError(
            f"the parameters {one} and {other} share some of their numbers, which two gradients would then change: "
            "assign one parameter to both places to tie them, or clone() the tensors that they are made of"
        )


def _refuse_other_train(name: str, module: nn.Module) -> None:
    if type(module).train is nn.Module.train:
        return
    try:
        inspect.signature(module.train).bind(True)
    except TypeError as error:
        raise UserCodeError(
            f"the module {name or type(module).__name__} has a method train() of its own, which cannot be called as "
            f"train(True) ({error}): PyTorch and Shoal call it to change a model between training and evaluation. Give "
            "the method another name"
        ) from error


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


# What a run file changes in a model before anything else is made of it: adapters, rounded weights, frozen layers.


def partly_trained(model: nn.Module, run_file: RunFile) -> nn.Module:
    """With the adapters of `[adapter]`, the rounding of `[quantisation]` and what `[freeze]` freezes, in place.

    Raises `ConfigError`.
    """
    if run_file.adapter is not None:
        adapt(model, run_file.adapter)
        _draw_adapters(model, seed=run_file.run.seed)
    if run_file.quantisation is not None:
        quantise(model, run_file.quantisation)
    if run_file.freeze is not None:
        freeze(model, run_file.freeze)
    return model


@torch.no_grad()
def _draw_adapters(model: nn.Module, *, seed: int) -> None:
    """The first values of adapters in a model that came with its own."""
    roles = roles_of(model)
    for name, parameter in model.named_parameters():
        law = roles[name].init
        if is_adapter(name) and law is not None and not parameter.is_meta:
            shape = tuple(parameter.shape)
            parameter.copy_(draw(law, name, seed=seed, global_shape=shape, offsets=(0,) * len(shape), shape=shape))


# `TrainedSet`: which parameters a script's own loop trains, while the loop may freeze them and let them go again.
#
# What is trained at all is decided at the start, with buckets, pieces and optimizer state for it. Of that,
# `requires_grad` says at every step what is trained now: a frozen parameter gets no gradient and the optimizer passes
# it by, as in plain PyTorch. The flags are saved and restored with the run, so that a resumed loop trains what it would
# have trained.
#
# What was not trained at the start has no bucket and no state: a parameter that is unfrozen or added later would be
# stepped by each rank with a gradient of its own. That is refused in the step in which it happens.


class FrozenParameters:
    """Which of `trained`, by name, are frozen now: saved with the run, and restored."""

    def __init__(self, trained: Mapping[str, Parameter]) -> None:
        self._trained = trained

    @property
    def names(self) -> list[str]:
        return [name for name, parameter in self._trained.items() if not parameter.requires_grad]

    def to_state(self) -> dict[str, Any]:
        return {"frozen": names} if (names := self.names) else {}

    def load(self, state: Mapping[str, Any]) -> None:
        for name, parameter in self._trained.items():
            parameter.requires_grad_(name not in state["frozen"])


_requires_grad, _params_of = attrgetter("requires_grad"), itemgetter("params")


class TrainedSet:
    """The parameters of `model`, of which `trained` (by name) are trained, by `optimizers`."""

    def __init__(
        self, model: nn.Module, trained: Mapping[str, Parameter], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._optimizers = optimizers
        own = {id(parameter) for parameter in trained.values()}
        self._others = {name: each for name, each in model.named_parameters() if id(each) not in own}
        self._frozen = list(self._others.values())
        self._model, self._groups = model, [self._listed(optimizer) for optimizer in optimizers]

    def check(self, step: int) -> None:
        """Raises `UserCodeError` where parameters are to be trained now that were not at the start."""
        if any(map(_requires_grad, self._frozen)):
            unfrozen = next(name for name, parameter in self._others.items() if parameter.requires_grad)
            raise UserCodeError(
                f"step {step}: {unfrozen} requires a gradient now, and did not when shoal.start was called, so this "
                f"run has no optimizer state for it. {REPAIR}"
            )
        for optimizer, groups in zip(self._optimizers, self._groups, strict=True):
            now = optimizer.param_groups
            if len(now) != len(groups) or not all(map(same_objects, map(_params_of, now), groups)):
                raise UserCodeError(
                    f"step {step}: the parameters of the optimizer's groups are not those of the start "
                    f"({self._added(optimizer, groups)}), so their gradients would not be summed over ranks. {REPAIR}"
                )

    @staticmethod
    def _listed(optimizer: torch.optim.Optimizer) -> list[list[Parameter]]:
        return [list(group["params"]) for group in optimizer.param_groups]

    def _added(self, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[Parameter]]) -> str:
        before = {id(parameter) for group in groups for parameter in group}
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        added = [id(each) for group in self._listed(optimizer) for each in group if id(each) not in before]
        if not added:
            return "some were taken out or moved"
        return "added: " + ", ".join(names.get(number, "one that is not in the model") for number in added)


REPAIR = (
    "Give the optimizer all parameters that it will ever train, unfrozen, before shoal.start; freeze those whose time "
    "has not come by requires_grad_(False) after it, and unfreeze them in the loop"
)


# Hooks that a script has put on parameters by `register_hook`, which a plain loop calls with the gradient of the batch.
#
# A backward would call them with the gradient of one rank's microbatch, several times a step. So they wait until ranks
# have agreed, and get the whole gradient of the global batch, once a step, on every rank: one that clamps, counts, or
# does something else from some step on then does what it does in a plain loop. A parameter without a gradient has no
# call.


Hook = Callable[[Tensor], Tensor | None]
"""From a gradient to another, or to None where it stays."""


_hooks_of = attrgetter("_backward_hooks")


class GradientHooks:
    """The hooks of the `trained` parameters, by name, those too that come while the loop runs."""

    def __init__(self, trained: Mapping[str, Parameter]) -> None:
        self._trained, self._parameters = trained, list(trained.values())

    @property
    def names(self) -> list[str]:
        """The parameters that have one now."""
        with torch._C.DisableTorchFunctionSubclass():  # a released parameter of ZeRO-3 answers slowly
            if not any(map(_hooks_of, self._parameters)):
                return []
            return [name for name, parameter in self._trained.items() if parameter._backward_hooks]

    def aside(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """Around a backward, which does not call those of `names`."""
        return self._aside(names) if names else nullcontext()

    @contextmanager
    def _aside(self, names: Sequence[str]) -> Iterator[None]:
        waiting = [(hooks, dict(hooks)) for hooks in map(self._of, names)]
        for hooks, _ in waiting:
            hooks.clear()
        try:
            yield
        finally:
            for hooks, own in waiting:
                hooks.update(own)

    @torch.no_grad()
    def call(self, names: Sequence[str], drawing: Callable[[str], AbstractContextManager[None]]) -> list[str]:
        """Calls those of `names` with what is in `.grad`, which becomes what they return; the parameters whose
        gradients changed. Every rank calls it where gradients are divided. `drawing` is around what the hooks of a
        parameter draw.

        Raises `UserCodeError` for a gradient of another shape.
        """
        changed = []
        for name in reversed(names):  # the order of a backward
            parameter = self._trained[name]
            if (before := parameter.grad) is None:
                continue
            with drawing(name):
                parameter.grad = _hooked(name, list(self._of(name).values()), before)
            if parameter.grad is not before:
                changed.append(name)
        return changed

    def _of(self, name: str) -> dict[int, Hook]:
        return cast(dict, self._trained[name]._backward_hooks)


def _hooked(name: str, hooks: Sequence[Hook], gradient: Tensor) -> Tensor:
    """What they make of it, by what they return or in place; the same object where they have only looked at it."""
    given = found = gradient.whole() if isinstance(gradient, PartialGradient) else gradient.clone()
    version = given._version
    for hook in hooks:
        answer = hook(found)
        found = found if answer is None else answer
    if found.shape != gradient.shape:
        raise UserCodeError(
            f"a hook of {name} returned a gradient of shape {list(found.shape)} in the place of {list(gradient.shape)}"
        )
    if found is given and given._version == version:
        return gradient
    return gradient.like(gradient.run_of(found).clone()) if isinstance(gradient, PartialGradient) else found
