"""PyTorch's fused kernel of AdamW (Loshchilov and Hutter, arXiv:1711.05101) and Adam, and the tensors that it takes.

In a step whose kernels take no time, PyTorch's classes cost a tenth of it: they look at each parameter, which is hashed
by a function of Python, and count its steps in a tensor of its own, to each of which a CPU adds by a call. Here the
tensors are looked up once and used for as long as the state holds them, and the counts are views of one tensor. Names,
shapes and bits of the state are those of PyTorch.

    FusedAdamW    of a run file (`shoal.optim.fused`)
    DirectAdam    makes the step of a script's own `torch.optim.AdamW(fused=True)`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.state import complete, gradients_of, same_objects

State = Mapping[Any, Any]
"""Of an optimizer: a dictionary by name for each parameter."""

kind_of = attrgetter("device", "dtype")
_step_of, _mean_of, _square_of = map(itemgetter, ("step", "exp_avg", "exp_avg_sq"))


class Moments:
    """Counts of steps and moments of `parameters`; `own` is their state. The kernel takes those of one device and dtype
    (`is_of_one_kind`).
    """

    def __init__(self, parameters: Sequence[Parameter], own: Sequence[dict[str, Any]]) -> None:
        self._parameters, self._own = list(parameters), list(own)
        self._steps = list(map(_step_of, own))
        self._means, self._squares = list(map(_mean_of, own)), list(map(_square_of, own))
        self._all: tuple[list[Any], list[Any]] | None = None
        self._count: Tensor | None = None
        self._places: list[int] = []
        self.is_of_one_kind = len(set(map(kind_of, parameters))) == 1

    @classmethod
    def found(cls, parameters: Sequence[Parameter], state: State) -> Moments | None:
        """Those in `state`; None where it does not have all of them."""
        own = list(map(state.get, parameters))
        return cls(parameters, cast(list[dict[str, Any]], own)) if all(own) else None

    @property
    def first(self) -> Parameter:
        """The first of their parameters."""
        return self._parameters[0]

    def are_of(self, parameters: Sequence[Parameter], state: State) -> bool:
        """Whether `state` still holds these of `parameters`."""
        return (
            same_objects(parameters, self._parameters)
            and self._is_theirs(state)
            and all(self._own)
            and same_objects(map(_step_of, self._own), self._steps)
            and same_objects(map(_mean_of, self._own), self._means)
            and same_objects(map(_square_of, self._own), self._squares)
            and self._counts_are_joined()
        )

    def _is_theirs(self, state: State) -> bool:
        """Whether `state` has what it had of each. Their hashes take longer than a look at all that it has, unless that
        is much more.
        """
        looks = len(state) <= 4 * len(self._own)
        if looks and self._all is not None and all(map(same_objects, (state.keys(), state.values()), self._all)):
            return True
        theirs = same_objects(map(state.get, self._parameters), self._own)
        self._all = (list(state.keys()), list(state.values())) if looks and theirs else None
        return theirs

    def _counts_are_joined(self) -> bool:
        """Whether each count, if they were joined, still lies where it was put: scripts give tensors of the state other
        memory (`t.data = t.data.to(device)`).
        """
        return self._count is None or list(map(Tensor.data_ptr, self._steps)) == self._places

    def join_counts(self) -> None:
        """Makes the counts views of one tensor, where they are of one kind."""
        if self._count is not None or len({(step.shape, *kind_of(step)) for step in self._steps}) != 1:
            return
        self._count = torch.stack(self._steps)
        self._steps = list(self._count.unbind())
        self._places = list(map(Tensor.data_ptr, self._steps))
        for own, step in zip(self._own, self._steps, strict=True):
            own["step"] = step

    def count(self, made: int | Tensor) -> None:
        """One more step of each; `made` 0: none."""
        if self._count is None:  # a tensor without `alpha` would be read as a number, for which the host waits
            more = {"alpha": 1} if isinstance(made, Tensor) else {}
            torch._foreach_add_(self._steps, made, **more)  # pyright: ignore[reportPrivateImportUsage, reportArgumentType, reportCallIssue]
        else:
            self._count.add_(made)

    def step(
        self,
        group: Mapping[str, Any],
        gradients: list[Tensor],
        *,
        decoupled: bool = True,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """The update of the parameters, with the options of `group`. `decoupled`: that of AdamW, else of Adam."""
        kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_  # pyright: ignore[reportPrivateImportUsage]
        beta1, beta2 = group["betas"]
        kernel(
            cast(list[Tensor], self._parameters),
            gradients,
            self._means,
            self._squares,
            [],
            self._steps,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )


class KnownMoments:
    """The moments of the last step, by the first of their parameters."""

    def __init__(self) -> None:
        self._known: dict[int, Moments] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> KnownMoments:
        return KnownMoments()  # a copy of an optimizer has tensors of its own

    def of(self, parameters: Sequence[Parameter], state: State) -> Moments | None:
        """Those of `parameters` in `state`; None where it does not have all of them. Counts are joined when the same
        parameters are stepped again: those that are not always used would be joined in every step.
        """
        known = self._known.get(key := id(parameters[0]))
        if known is not None and known.are_of(parameters, state):
            known.join_counts()
            return known
        if known is None:  # as at the start, and where a parameter has come in the place of another
            self._known = {number: each for number, each in self._known.items() if each.first in state}
        self._known.pop(key, None)
        if (found := Moments.found(parameters, state)) is not None:
            self._known[key] = found
        return found


_options_of = itemgetter("fused", "amsgrad", "maximize", "capturable", "differentiable")
SIMPLE = (True, False, False, False, False)
"""The options with which a step is nothing but a call of the kernel."""


def is_of_pytorch(step: Any) -> bool:
    """Whether a function, and what it wraps, stands in `torch.optim`. `__module__` does not say: wrappers copy it."""
    while step is not None:
        if not getattr(step, "__globals__", {}).get("__name__", "").startswith("torch.optim."):
            return False
        step = getattr(step, "__wrapped__", None)
    return True


class DirectAdam:
    """Makes the update of `optimizer` where that is `torch.optim.AdamW(fused=True)` or `Adam(fused=True)`, by the
    kernel that its `step` would call.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._known = optimizer, KnownMoments()
        self._is_adam = type(optimizer) in (torch.optim.AdamW, torch.optim.Adam)
        self._step_of_class: Any = None

    def step(self) -> bool:
        """Whether the update is made. Else nothing has changed, and the optimizer has to make it: a first step, which
        makes the state; one in which a parameter has no gradient; and one with options that only its class knows.
        """
        scaled = any(getattr(self._optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
        groups = self._optimizer.param_groups if self.is_plain and not scaled else ()
        work = [(group, gradients_of(group["params"]), self._moments_in(group)) for group in groups]
        if not work or not all(moments is not None and complete(gradients) for _, gradients, moments in work):
            return False
        with torch.no_grad():
            for group, gradients, moments in work:
                assert moments is not None, "every group has them"
                moments.count(1)
                moments.step(group, gradients, decoupled=group["decoupled_weight_decay"])
        return True

    @property
    def is_plain(self) -> bool:
        """Whether its step is that of PyTorch, which a script may replace for all of a class at any time."""
        if self._is_adam and (now := type(self._optimizer).step) is not self._step_of_class:
            self._is_adam, self._step_of_class = is_of_pytorch(now), now
        return self._is_adam

    def _moments_in(self, group: Mapping[str, Any]) -> Moments | None:
        """None where they are not there, or where the step is more than a call of the kernel."""
        parameters, numbers = group["params"], (group["lr"], *group["betas"])
        simple = same_objects(_options_of(group), SIMPLE)
        if not (parameters and simple and all(isinstance(number, float | int) for number in numbers)):
            return None
        found = self._known.of(parameters, self._optimizer.state)
        return found if found is not None and found.is_of_one_kind else None
