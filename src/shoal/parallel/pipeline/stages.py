"""`Stages`: a model's chain, cut: what each stage runs, which parameters it has, and who holds copies of tied ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shoal.errors import UserCodeError
from shoal.models.roles import DeclaresParts, Part
from shoal.parallel.pipeline.cut import Cut


class Absent(nn.Module):
    """Stands where a module was that another rank holds, so that the names of the others stay as they were."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Raises `RuntimeError`: a stage runs its own parts only."""
        raise RuntimeError("this part of the model is on another rank of the pipeline: run the parts of a held stage")


@dataclass(frozen=True)
class Stages:
    """Made from the whole model by `staged`, on every rank alike; then `keep` drops what the rank does not hold.

    `names[stage]` are the stage's parameters, by all of their names; `placement[stage]` is the rank that holds it.
    """

    model: nn.Module
    parts: tuple[Part, ...]
    cut: Cut
    placement: tuple[int, ...]
    names: tuple[tuple[str, ...], ...]
    aliases: Mapping[str, str]

    def forward(self, stage: int, x: Tensor | None, context: Any) -> Tensor:
        """Runs the parts of a stage: the `forward` of a `Computation`."""
        for part in self.cut[stage]:
            x = self.parts[part].run(x, context)
        assert x is not None
        return x

    def weights(self, stage: int) -> list[nn.Parameter]:
        """The parameters of a held stage, each once."""
        return list({id(p): p for p in map(self.model.get_parameter, self.names[stage])}.values())

    def holders(self, name: str) -> tuple[int, ...]:
        """The ranks that hold a parameter, by any of its names; several where it is tied across stages."""
        wanted = self.aliases[name]
        stages = [s for s, names in enumerate(self.names) if any(self.aliases[n] == wanted for n in names)]
        return tuple(sorted({self.placement[stage] for stage in stages}))

    def tied_across(self, rank: int) -> dict[str, tuple[int, ...]]:
        """The parameters of `rank` that other ranks have a copy of: canonical name to holders."""
        found = {name: self.holders(name) for name in dict.fromkeys(self.aliases.values())}
        return {name: ranks for name, ranks in found.items() if len(ranks) > 1 and rank in ranks}

    def local_name(self, name: str, rank: int) -> str:
        """The first name under which `rank` holds the parameter whose canonical name in the whole model is `name`."""
        held = [n for s, names in enumerate(self.names) if self.placement[s] == rank for n in names]
        return next(n for n in self.aliases if n in held and self.aliases[n] == name)

    def keep(self, rank: int) -> None:
        """Takes the modules of the stages that `rank` does not hold out of the model."""
        for stage, holder in enumerate(self.placement):
            if holder != rank:
                drop_parts(self.model, [self.parts[part] for part in self.cut[stage]])


def staged(model: nn.Module, cut: Cut, placement: Sequence[int]) -> Stages:
    """Raises `UserCodeError` where the model is no chain, or a parameter belongs to no part or to two."""
    if not isinstance(model, DeclaresParts):
        raise UserCodeError(
            f"{type(model).__name__} does not say which chain it is, so it cannot be cut into stages: give it "
            f"context() and parts() (see shoal.models.roles), or set layout.pipeline=1"
        )
    parts = tuple(model.parts())
    owners = {name: _owner(name, parts) for name, _ in model.named_parameters(remove_duplicate=False)}
    names = tuple(tuple(name for name, owner in owners.items() if owner in stage) for stage in cut)
    return Stages(model, parts, cut, tuple(placement), names, _aliases(model))


def drop_parts(model: nn.Module, absent: Sequence[Part]) -> None:
    """Puts `Absent` in the place of these parts' modules. Parameters that a kept part is tied to stay there."""
    for part in absent:
        for name in part.modules:
            path, _, last = name.rpartition(".")
            parent = model.get_submodule(path)
            if last in dict(parent.named_parameters(recurse=False)):
                parent.register_parameter(last, None)
            else:
                setattr(parent, last, Absent())


def _owner(name: str, parts: Sequence[Part]) -> int:
    owners = [i for i, part in enumerate(parts) if any(f"{name}.".startswith(f"{module}.") for module in part.modules)]
    if len(owners) != 1:
        found = "no part" if not owners else f"the parts {', '.join(parts[i].name for i in owners)}"
        raise UserCodeError(
            f"the parameter {name!r} belongs to {found}; each belongs to one: name its module in one Part of parts()"
        )
    return owners[0]


def _aliases(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter to its first one."""
    firsts: dict[int, str] = {}
    named = list(model.named_parameters(remove_duplicate=False))
    return {name: firsts.setdefault(id(parameter), name) for name, parameter in named}
