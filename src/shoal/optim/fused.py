"""The base class of optimizers that treat each number alone (`FusedOptimizer`), and AdamW and SGD of the run file:
PyTorch's fused kernels, called directly.

`torch.optim.AdamW(fused=True)` and `torch.optim.SGD(fused=True)` call the same kernels on the same state, and so give
the same bits (but for SGD with parameters in half precision on a CPU: see `HALVES`). Making the first of those imports
`torch._dynamo` and with it sympy, which takes longer than importing torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.optim.adam_kernel import KnownMoments, Moments, kind_of
from shoal.optim.declared import Slot
from shoal.state import UpdatePart, complete, gradients_of


class GroupTensors(NamedTuple):
    """Parameters of one group, device and dtype, and their gradients."""

    group: dict[str, Any]
    parameters: list[Parameter]
    gradients: list[Tensor]


class StateHome(Protocol):
    """Where the state of an optimizer lives between updates, if not on the device as it is. Parts have `part_bytes` of
    parameters, or one that is larger.
    """

    part_bytes: int

    def to_read(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Zeros that a slot of a checkpoint is read into, before `put_away`; None: they are on the device."""
        ...

    def stream(self, parts: Sequence[UpdatePart], state: Any) -> None:
        """Runs all updates in order, each with its state on the device."""
        ...

    def put_away(self, state: Any) -> None:
        """Takes all of the state out, as after a checkpoint was read into it."""
        ...


@runtime_checkable
class Delays(Protocol):
    """A home where updates go on after `stream` has returned, when what an optimizer is told of one step is gone."""

    def settle(self, state: Any) -> None:
        """Returns when the last update is made, and `state` is that after it."""
        ...


class FusedOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` whose step is one kernel for all tensors of a device and dtype.

    Two tensors on the device, of the names that PyTorch's own fused optimizers have for them, hold for the next step
    alone. `grad_scale`: gradients are divided by it, so that clipping costs no pass over memory of its own; set it
    where the optimizer `takes_scale`. `found_inf`: nothing is updated where it is 1, which the host need not know when
    it launches the step; set it where the optimizer `takes_vote`. Both are float32.
    """

    grad_scale: Tensor | None = None  # of the class: a copy of an optimizer has none of its attributes
    found_inf: Tensor | None = None
    home: StateHome | None = None
    """Set it before the first step, where the optimizer `takes_home`."""
    others: Mapping[str, FusedOptimizer] = MappingProxyType({})
    """Those that update the groups of this one that say another `kind`; they share its state."""

    def __init__(self, groups: Iterable[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, options)  # pyright: ignore[reportArgumentType]

    @property
    def takes_scale(self) -> bool:
        """Whether its kernel does. One that does says so: what a kernel ignored would be lost in silence."""
        return False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds `param_group`: a dictionary with `params`, a tensor, tensors, or pairs of a name and a tensor, and any
        options of its own. Raises `ValueError` for a parameter that is there already, and for a tensor that follows
        from others, which would get no gradient; `TypeError` for a set, whose order no checkpoint has.
        """
        given = param_group["params"]
        if isinstance(given, set):
            raise TypeError(
                "an optimizer was given a set of parameters, which has another order in each run: give a list"
            )
        params = [given] if isinstance(given, Tensor) else list(given)
        named = [p for p in params if isinstance(p, tuple)]
        names = {"param_names": [name for name, _ in named]} if named else {}
        params = [p for _, p in named] if named else params
        stepped = [*(id(p) for group in self.param_groups for p in group["params"]), *map(id, params)]
        if len(set(stepped)) < len(stepped):
            raise ValueError("a parameter is twice in the groups of an optimizer: leave it out of one of them")
        if not all(p.is_leaf or p.retains_grad for p in params):
            raise ValueError("an optimizer steps parameters, and was given a tensor that was computed from others")
        self.param_groups.append({**self.defaults, **param_group, **names, "params": params})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """PyTorch's, which gives all of the state the parameters' type: what has not their shape keeps its own."""
        super().load_state_dict(state_dict)
        slots: Sequence[Slot] = getattr(self, "slots", ())
        kept = {slot.name for slot in slots if not slot.like_parameter}
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            saved, own = state_dict["state"].get(number, {}), self.state.get(parameter, {})
            for name in kept & own.keys():
                if isinstance(own[name], Tensor):
                    own[name] = saved[name].to(own[name].device, copy=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, or fills them with zeros."""
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates every parameter that has a gradient. Returns what `closure`, called first, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [work for group in self.param_groups for work in _work_of(group)]
        by_kind: dict[str | None, list[GroupTensors]] = {None: []}
        for one in work:
            by_kind.setdefault(one.group.get("kind"), []).append(one)
        for kind, own in by_kind.items():
            (self if kind is None else self.others[kind]).update_all(own)
        self.grad_scale = self.found_inf = None
        return loss

    @property
    def takes_vote(self) -> bool:
        """Whether the kernels do, and leave the state as it is."""
        return self.takes_scale

    @property
    def takes_home(self) -> bool:
        """Whether some parameters are updated as all are, with nothing but their own state."""
        return type(self).update_all is FusedOptimizer.update_all and not self.others

    def update_all(self, work: list[GroupTensors]) -> None:
        """Updates everything that has a gradient."""
        if self.home is None:
            for one in work:
                self.update(*one)
        else:
            parts = [part for one in work for part in _parts(one, self.home.part_bytes)]
            kernels = [partial(self.update, dict(part.group)) for part in parts]
            self.home.stream(
                [UpdatePart(p.parameters, p.gradients, k) for p, k in zip(parts, kernels, strict=True)], self.state
            )

    def update(self, group: dict[str, Any], parameters: list[Parameter], gradients: list[Tensor]) -> None:
        """Updates these parameters, which have one device and dtype, with the options of their group."""
        raise NotImplementedError


def counted(state: dict[str, Any], name: str = "step", *, by: float = 1.0) -> float:
    """The number `name` of a parameter's state, which has grown by `by`. It is kept on the host, so that nobody waits
    for a device to read it; what a checkpoint was read into may have been on the device.
    """
    number = state[name] = state[name].cpu().add_(by)
    return float(number)


def _kernels_scale(optimizer: FusedOptimizer) -> bool:
    """Whether PyTorch's kernels step all: a scale is too coarse for float64, sparse gradients have no kernel, and a
    delayed update comes when the scale of its step is gone.
    """
    if isinstance(optimizer.home, Delays):
        return False
    fused = all(group.get("fused", True) for group in optimizer.param_groups)
    return fused and all(p.dtype == torch.float32 for group in optimizer.param_groups for p in group["params"])


class FusedAdamW(FusedOptimizer):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101). Its state is that of `torch.optim.AdamW`.

    Args:
        groups: Dictionaries with `params` and their options, such as `weight_decay`.
        lr: The learning rate.
        betas: The decay rates of both moments.
        eps: Added to the denominator.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=0.0)

    _known: KnownMoments | None = None

    @property
    def takes_scale(self) -> bool:
        """Its subclasses update in ways of their own."""
        return type(self) is FusedAdamW and not self.others and _kernels_scale(self)

    def update(self, group: dict[str, Any], parameters: list[Parameter], gradients: list[Tensor]) -> None:
        """One step of the kernel. States that are not there yet begin at zero."""
        moments = self._found(parameters)
        if moments is None:
            for parameter in parameters:
                self.state[parameter] = self.state[parameter] or _first_state(parameter)
            moments = self._found(parameters)
        assert moments is not None, "every parameter has its state"
        moments.count(1 if self.found_inf is None else 1 - self.found_inf)
        moments.step(group, gradients, grad_scale=self.grad_scale, found_inf=self.found_inf)

    def _found(self, parameters: list[Parameter]) -> Moments | None:
        if self.home is not None:  # which replaces the tensors of the state around every update
            return Moments.found(parameters, self.state)
        if self._known is None:
            self._known = KnownMoments()
        return self._known.of(parameters, self.state)


def _first_state(parameter: Parameter) -> dict[str, Tensor]:
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
    }


class FusedSGD(FusedOptimizer):
    """Stochastic gradient descent with momentum. Its state is that of `torch.optim.SGD`.

    Args:
        groups: Dictionaries with `params` and their options, such as `weight_decay`.
        lr: The learning rate.
        momentum: The share of the buffer that is kept; at 0 there is none.
        nesterov: Whether the step looks ahead by the momentum.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, momentum: float, nesterov: bool) -> None:
        super().__init__(groups, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=0.0)

    @property
    def takes_scale(self) -> bool:
        """Its subclasses update in ways of their own."""
        return type(self) is FusedSGD and not self.others and _kernels_scale(self)

    @property
    def takes_vote(self) -> bool:
        """A buffer begins as the first gradient, which the kernel writes only where it updates."""
        return self.takes_scale and all(group["momentum"] == 0 for group in self.param_groups)

    def update(self, group: dict[str, Any], parameters: list[Parameter], gradients: list[Tensor]) -> None:
        """One step of the kernel. The first gradient of a parameter becomes its buffer."""
        plain = parameters[0].device.type == "cpu" and parameters[0].dtype in HALVES
        kernel = partial(_fused_step, grad_scale=self.grad_scale, found_inf=self.found_inf)
        step = _plain_step if plain or not group.get("fused", True) else kernel  # sparse ones have no kernel
        if group["momentum"] == 0:
            step(group, parameters, gradients, [], is_first_step=False)
            return
        for is_first_step in (False, True):
            chosen = [i for i, p in enumerate(parameters) if ("momentum_buffer" not in self.state[p]) is is_first_step]
            if not chosen:
                continue
            for i in chosen if is_first_step else ():
                self.state[parameters[i]]["momentum_buffer"] = torch.empty_like(gradients[i])
            buffers = [self.state[parameters[i]]["momentum_buffer"] for i in chosen]
            held, given = [parameters[i] for i in chosen], [gradients[i] for i in chosen]
            step(group, held, given, buffers, is_first_step=is_first_step)


HALVES = (torch.float16, torch.bfloat16)
"""Types for which the CPU's fused SGD of PyTorch 2.13 leaves most parameters as they are (pytorch/pytorch#191763)."""


def _fused_step(
    group: dict[str, Any],
    parameters: Sequence[Tensor],
    gradients: list[Tensor],
    buffers: list[Tensor],
    *,
    is_first_step: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    torch._fused_sgd_(  # pyright: ignore[reportPrivateImportUsage]
        list(parameters),
        gradients,
        buffers,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=0.0,
        nesterov=group["nesterov"],
        maximize=False,
        is_first_step=is_first_step,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )


def _plain_step(
    group: dict[str, Any],
    parameters: Sequence[Tensor],
    gradients: list[Tensor],
    buffers: list[Tensor],
    *,
    is_first_step: bool,
) -> None:
    for i, parameter in enumerate(parameters):
        update = gradients[i].add(parameter, alpha=group["weight_decay"]) if group["weight_decay"] else gradients[i]
        if buffers:
            kept = buffers[i].copy_(update) if is_first_step else buffers[i].mul_(group["momentum"]).add_(update)
            update = update.add(kept, alpha=group["momentum"]) if group["nesterov"] else kept
        parameter.add_(update, alpha=-group["lr"])


def _parts(work: GroupTensors, part_bytes: int) -> Iterator[GroupTensors]:
    """The same in order, a part at a time."""
    start = size_bytes = 0
    for number, parameter in enumerate(work.parameters):
        if number > start and size_bytes + parameter.nbytes > part_bytes:
            yield GroupTensors(work.group, work.parameters[start:number], work.gradients[start:number])
            start, size_bytes = number, 0
        size_bytes += parameter.nbytes
    yield GroupTensors(work.group, work.parameters[start:], work.gradients[start:])


def _work_of(group: dict[str, Any]) -> list[GroupTensors]:
    """The parameters of `group` that have a gradient, by device and dtype."""
    parameters, gradients = list(group["params"]), gradients_of(group["params"])
    if not complete(gradients):
        both = [(p, gradient) for p, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
        parameters, gradients = [parameter for parameter, _ in both], [gradient for _, gradient in both]
    kinds = list(map(kind_of, parameters))
    if len(set(kinds)) == 1:
        return [GroupTensors(group, parameters, gradients)]
    found: dict[tuple[torch.device, torch.dtype], GroupTensors] = {}
    for parameter, gradient, kind in zip(parameters, gradients, kinds, strict=True):
        own = found.setdefault(kind, GroupTensors(group, [], []))
        own.parameters.append(parameter)
        own.gradients.append(gradient)
    return list(found.values())
