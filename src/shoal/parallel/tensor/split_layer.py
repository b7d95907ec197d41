"""One layer that is to be split: decided first, replaced later, so that a refusal leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from shoal.errors import UserCodeError
from shoal.parallel.tensor.cut import Cut

Replacement = Callable[[nn.Parameter, nn.Parameter | None], nn.Module]


@dataclass(frozen=True)
class SplitLayer:
    """The layer's name, its weight's split dim and the cut, and what takes its place, made of the cut parameters."""

    name: str
    layer: nn.Linear | nn.Embedding
    dim: int
    cut: Cut
    replacement: Replacement

    @property
    def bias(self) -> nn.Parameter | None:
        return getattr(self.layer, "bias", None)

    def split_parameters(self) -> Iterator[tuple[str, int]]:
        """The full name and the split dim of each parameter that is split; the bias of a row layer is whole."""
        yield f"{self.name}.weight", self.dim
        if self.bias is not None and self.dim == 0:
            yield f"{self.name}.bias", 0


def replace(model: nn.Module, layers: Iterable[SplitLayer]) -> None:
    """Puts the parts in place of the whole layers; a parameter of several layers becomes one part for all of them."""
    cut: dict[Tensor, nn.Parameter] = {}
    for split in layers:
        weight, bias = split.layer.weight, split.bias
        if weight not in cut:
            cut[weight] = _part(weight, split.dim, split.cut)
        if bias is not None and split.dim == 0:
            bias = _part(bias, 0, split.cut)
        parent, _, child = split.name.rpartition(".")
        setattr(model.get_submodule(parent), child, split.replacement(cut[weight], bias))


def check_ties(layers: Iterable[SplitLayer]) -> None:
    """Raises `UserCodeError` where a parameter belongs to layers that would cut it differently."""
    seen: dict[Tensor, SplitLayer] = {}
    for split in layers:
        other = seen.setdefault(split.layer.weight, split)
        if (other.dim, other.cut) != (split.dim, split.cut):
            raise UserCodeError(
                f"'{other.name}' and '{split.name}' share their weight, but have roles that split it differently; give "
                f"them roles that cut alike, such as embedding and head, or weights of their own"
            )


def _part(parameter: Tensor, dim: int, cut: Cut) -> nn.Parameter:
    own = parameter.detach().narrow(dim, cut.offset, cut.length).contiguous().clone()
    return nn.Parameter(own, requires_grad=parameter.requires_grad)
