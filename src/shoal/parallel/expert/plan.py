"""Expert parallelism of a model: each rank of `expert` keeps an equal share of every mixture's experts.

    blocks.3.feed_forward.experts.up    [experts, hidden, width]  ->  [experts / E, hidden, width]
    blocks.3.feed_forward.router.weight                               whole; each rank routes tokens of its own

Parameters stay plain tensors under the names of the unsplit model.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from shoal.errors import LayoutError
from shoal.models.mixture_exchange import SendsTokens
from shoal.parallel.expert.exchange import ExpertGroups, GroupExchange
from shoal.topology.refusal import nearest_divisors, nearest_multiples


@dataclass(frozen=True)
class ExpertPart:
    """What this rank holds of a stacked parameter of the unsplit model: `length` experts from `offset` along `dim`."""

    dim: int
    offset: int
    length: int


def split_experts(model: nn.Module, groups: ExpertGroups) -> dict[str, ExpertPart]:
    """Leaves in every mixture of `model`, in place, this rank's experts, and lets its tokens travel over `groups`.

    Call it wherever any of the groups has more than one rank, also with whole experts on each: the tokens that ranks
    along `tensor` share are then still routed once. Takes parameters of any device, "meta" too. Returns the part of
    every parameter with the role "expert"; empty for a model, or a stage of one, without mixtures.

    Raises:
        LayoutError: `expert` does not divide the experts; the model is left as it was.
    """
    senders = {name: module for name, module in model.named_modules() if isinstance(module, SendsTokens)}
    stacked = [f"{name}.{own}".lstrip(".") for name, module in senders.items() for own in module.stacked]
    parameters = {name: model.get_parameter(name) for name in stacked}
    for name, parameter in parameters.items():
        check_experts(parameter.shape[0], groups.expert.size, name=name)
    for module in senders.values():
        if module.stacked:
            module.exchange = GroupExchange(groups)
    return {name: _keep(model, name, parameter, groups) for name, parameter in parameters.items()}


def check_experts(experts: int, size: int, *, name: str) -> None:
    """Raises `LayoutError` unless `size` ranks can hold equally many of the `experts` stacked in `name`."""
    if experts % size:
        sizes = " or ".join(f"expert={n}" for n in nearest_divisors(experts, size))
        others = " or ".join(map(str, nearest_multiples(size, experts)))
        raise LayoutError(
            f"{name} has {experts} experts, which expert={size} does not divide; nearest: {sizes}, or {others} experts"
        )


def _keep(model: nn.Module, name: str, parameter: nn.Parameter, groups: ExpertGroups) -> ExpertPart:
    length = parameter.shape[0] // groups.expert.size
    part = ExpertPart(0, groups.expert.rank * length, length)
    own = parameter.detach().narrow(0, part.offset, length).clone()
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, nn.Parameter(own, requires_grad=parameter.requires_grad))
    return part
