"""One layer that is to be split: decided first, replaced later, so that a refusal leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from shoal.errors import UserCodeError
from shoal.parallel.tensor.cut import Cut

Cuts = Mapping[int, Cut]
"""By dim; the twins of the first are those of the parameter."""

Replacement = Callable[[nn.Parameter, nn.Parameter | None], nn.Module]


@dataclass(frozen=True)
class SplitLayer:
    """The layer's name, the cuts of its weight and bias, and what takes its place, made of the cut parameters."""

    name: str
    layer: nn.Linear | nn.Embedding
    weight: Cuts
    bias: Cuts
    replacement: Replacement

    def split_parameters(self) -> Iterator[tuple[str, Cuts]]:
        """The full name of each parameter that is split, and how."""
        yield f"{self.name}.weight", self.weight
        if self.own_bias is not None and self.bias:
            yield f"{self.name}.bias", self.bias

    @property
    def own_bias(self) -> nn.Parameter | None:
        """The whole layer's bias, where it has one."""
        return getattr(self.layer, "bias", None)


def replace(model: nn.Module, layers: Iterable[SplitLayer]) -> None:
    """Puts the parts in place of the whole layers; a parameter of several layers becomes one part for all of them."""
    parts: dict[Tensor, nn.Parameter] = {}
    for split in layers:
        weight, bias = split.layer.weight, split.own_bias
        if weight not in parts:
            parts[weight] = _part(weight, split.weight)
        if bias is not None and split.bias:
            bias = _part(bias, split.bias)
        parent, _, child = split.name.rpartition(".")
        setattr(model.get_submodule(parent), child, split.replacement(parts[weight], bias))


def check_ties(layers: Iterable[SplitLayer]) -> None:
    """Raises `UserCodeError` where a parameter belongs to layers that would cut it differently."""
    seen: dict[Tensor, SplitLayer] = {}
    for split in layers:
        other = seen.setdefault(split.layer.weight, split)
        if other.weight != split.weight:
            raise UserCodeError(
                f"'{other.name}' and '{split.name}' share their weight, but have roles that split it differently; give "
                f"them roles that cut alike, such as embedding and head, or weights of their own"
            )


def _part(parameter: Tensor, cuts: Cuts) -> nn.Parameter:
    own = parameter.detach()
    for dim, cut in cuts.items():
        own = own.narrow(dim, cut.offset, cut.length)
    return nn.Parameter(own.contiguous().clone(), requires_grad=parameter.requires_grad)
