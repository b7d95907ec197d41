"""The table `[schedule]`: the learning rate over the run. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from shoal.config.table import Positive, PositiveFloat, Table, says

Shape = Literal["cosine", "linear", "constant", "stable", "one_cycle", "polynomial", "step", "inverse_sqrt", "chained"]
_OWN_KEYS = {
    "decay_fraction": "stable",
    "power": "polynomial",
    "milestones": "step",
    "factor": "step",
    "initial_fraction": "one_cycle",
    "phases": "chained",
}


class Phase(Table, frozen=True):
    """A part of a chained schedule: from the rate at which the one before ends to `final_fraction` of the peak."""

    kind: Annotated[Literal["constant", "linear", "cosine"], says("The shape from its first rate to its last.")]
    final_fraction: Annotated[
        float | None, says("The rate at its end, as a fraction of the peak; without it, the rate at its start.")
    ] = None
    steps: Annotated[Positive | None, says("Its steps; without it, all that are left. The last has none.")] = None

    def __post_init__(self) -> None:
        if (self.final_fraction is None) != (self.kind == "constant"):
            raise ValueError(
                f'a phase of kind = "{self.kind}" {"with" if self.kind == "constant" else "without"} final_fraction; '
                "a constant one has none, the others need it"
            )
        if self.final_fraction is not None and not 0 <= self.final_fraction <= 1:
            raise ValueError(f"final_fraction = {self.final_fraction:g} of a phase must be from 0 to 1")


class Schedule(Table, frozen=True):
    """The learning rate over the run: a linear warm-up, then a decay to `final_fraction` of the peak."""

    kind: Annotated[Shape, says("The shape after the warm-up.")] = "cosine"
    warmup_steps: Annotated[int, says("Steps in which the rate rises from near 0 to its peak.", ge=0)] = 0
    final_fraction: Annotated[float, says("The rate at the last step, as a fraction of the peak.", ge=0, le=1)] = 0.1
    decay_fraction: Annotated[
        float, says('"stable": the share of the steps, at the end, in which the rate falls linearly.', gt=0, le=1)
    ] = 0.2
    power: Annotated[PositiveFloat, says('"polynomial": the power of the share of steps that are left.')] = 2.0
    milestones: Annotated[
        tuple[Positive, ...], says('"step": after each of these steps the rate is multiplied by `factor`.')
    ] = ()
    factor: Annotated[float, says('"step": what the rate is multiplied by.', gt=0, le=1)] = 0.1
    initial_fraction: Annotated[
        float, says('"one_cycle": the rate before the first step, as a fraction of the peak.', ge=0, le=1)
    ] = 0.04
    phases: Annotated[tuple[Phase, ...], says('"chained": what follows the warm-up, one after the other.')] = ()

    def __post_init__(self) -> None:
        defaults = _defaults()
        for key, kind in _OWN_KEYS.items():
            if self.kind != kind and getattr(self, key) != defaults[key]:
                raise ValueError(f'{key} with kind = "{self.kind}"; it belongs to kind = "{kind}": leave it out')
        if self.kind == "step" and (not self.milestones or list(self.milestones) != sorted(set(self.milestones))):
            raise ValueError(
                f'kind = "step" with milestones = {list(self.milestones)}; give the steps after which the rate falls, '
                "ascending, such as [1000, 2000]"
            )
        if self.kind == "chained" and not self.phases:
            raise ValueError('kind = "chained" without phases; give [[schedule.phases]] with kind and steps')
        open_ended = [number for number, phase in enumerate(self.phases, start=1) if phase.steps is None]
        if self.phases and open_ended != [len(self.phases)]:
            raise ValueError(
                "every phase of a chained schedule but the last has steps, and the last has none: it takes what is left"
            )


def _defaults() -> dict[str, Any]:
    names, values = Schedule.__struct_fields__, Schedule.__struct_defaults__
    return dict(zip(names[-len(values) :], values, strict=True))
