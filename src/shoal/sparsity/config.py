"""Table `[sparsity]`. Imports no torch: a density or pattern that cannot be is refused before any process starts."""

from __future__ import annotations

import difflib
import json
import re
from typing import Annotated, ClassVar, Literal

import msgspec

from shoal.config.check import Positive, Table, says
from shoal.units import MEMORY_SIZE

PATTERNS = ("unstructured", "rows", "columns", "features", "heads", "block")
"""And "N:M"."""
Size = Annotated[str, msgspec.Meta(pattern=MEMORY_SIZE)]


class MaskSchedule(Table, frozen=True):
    """When masks change."""

    shape: Annotated[
        Literal["cubic", "linear", "one_shot"],
        says(
            "How a pruned model's density falls from 1: fast at first (arXiv:1710.01878), evenly, or at once at "
            "`begin`. Kinds that train a sparse model from the start have their density from the first step."
        ),
    ] = "cubic"
    begin: Annotated[int, says("The first step at which masks may change.", ge=1)] = 1
    end: Annotated[Positive | None, says("The last one; default: three quarters of `run.steps`.")] = None
    every: Annotated[int, says("Every so many steps masks change.", ge=1)] = 100

    def __post_init__(self) -> None:
        if self.end is not None and self.end < self.begin:
            raise ValueError(f"end = {self.end} is before begin = {self.begin}: raise end, or leave it out")


class Sparse(Table, frozen=True, kw_only=True):
    """The keys of every kind."""

    starts_sparse: ClassVar[bool] = False
    """Whether the first step has its density already."""
    reads_gradient: ClassVar[bool] = False
    """Whether a step that changes masks uses the gradient of weights that are masked."""
    sends_all: ClassVar[bool] = False
    """Whether weights that are masked have a gradient in every step."""
    grows: ClassVar[bool] = False
    """Whether a change of masks brings weights back."""

    masks: ClassVar[int] = 1
    """Masks that are held of a layer."""
    numbers: ClassVar[int] = 0
    """Numbers that are kept of a weight beside them."""

    density: Annotated[
        Annotated[float, says("", gt=0, lt=1)] | None,
        says('Share of the weights of all masked layers that stays; required, but for a pattern such as "2:4".'),
    ] = None
    pattern: Annotated[
        str,
        says(
            'What is kept or masked together: "unstructured" (single weights), "rows" (output features), "columns" '
            '(input features), "features" (hidden ones) or "heads" (of attention), over all layers that make or read '
            'them, so that `shoal checkpoint shrink` can take them out, "block" (see `block`), or "N:M", such as '
            '"2:4": N of every M neighbours of a row.'
        ),
    ] = "unstructured"
    block: Annotated[tuple[Positive, Positive], says('Rows and columns of the blocks of `pattern = "block"`.')] = (4, 4)
    layers: (
        Annotated[
            tuple[str, ...],
            says(
                "Patterns of parameter names (`blocks.*.weight`) that are masked; default: every weight of two "
                "dimensions or more that the pattern divides, but embeddings, output heads, routers and norms.",
                min_length=1,
            ),
        ]
        | None
    ) = None
    distribution: Annotated[
        Literal["uniform", "erk", "global"],
        says(
            "The density of each layer: the same, larger for small layers (Erdős–Rényi kernel, arXiv:1911.11134), or "
            "whatever the scores of all layers together say."
        ),
    ] = "uniform"
    schedule: MaskSchedule = MaskSchedule()
    packed: Annotated[bool, says("Replicas send the gradients of unmasked weights alone; false: all, with zeros.")] = (
        True
    )
    packed_state: Annotated[
        bool,
        says(
            "The optimizer holds its state of unmasked weights alone, and brings a part of it at a time into the shape "
            "of its parameters to update them; checkpoints hold it as ever."
        ),
    ] = False

    transposable: Annotated[
        bool,
        says(
            'With pattern = "N:4": N of every four neighbours of a column, too, so that the backward computes with as '
            "few (arXiv:2102.08124)."
        ),
    ] = False
    products: Annotated[
        Literal["dense", "semi_structured"],
        says(
            'semi_structured: with pattern = "2:4" on GPUs from the A100 on, linear layers compute with the kept half '
            "of their weights in training, in 16 bits; the gradient of their input as well if `transposable`."
        ),
    ] = "dense"

    def __post_init__(self) -> None:
        if self.pattern not in PATTERNS and not re.fullmatch(r"[1-9]\d{0,2}:[1-9]\d{0,2}", self.pattern):
            near = difflib.get_close_matches(self.pattern.lower(), PATTERNS, n=1)
            hint = f", did you mean {json.dumps(near[0])}?" if near else ""
            raise ValueError(
                f"pattern = {json.dumps(self.pattern)}{hint}; it is one of {', '.join(PATTERNS)}, or N of every M "
                'neighbours, such as "2:4"'
            )
        kept = self.kept_of
        if self.transposable and (kept is None or kept[1] != 4):
            raise ValueError(
                f'transposable with pattern = "{self.pattern}": it is for N of every 4, such as "2:4"; leave it out'
            )
        if self.products != "dense" and kept != (2, 4):
            raise ValueError(
                f'products = "{self.products}" with pattern = "{self.pattern}": devices compute so with two of every '
                'four; use pattern = "2:4", or leave products out'
            )
        if kept is None and self.density is None:
            raise ValueError('density is missing: give the share of weights that stays, or pattern = "2:4"')
        if kept is not None and kept[0] >= kept[1]:
            raise ValueError(f'pattern = "{self.pattern}" masks nothing: keep fewer than {kept[1]} of {kept[1]}')
        if kept is not None and self.density not in (None, kept[0] / kept[1]):
            raise ValueError(
                f'density = {self.density} with pattern = "{self.pattern}", which keeps {kept[0]} of {kept[1]}: leave '
                "density out"
            )
        if kept is not None and self.distribution != "uniform":
            raise ValueError(
                f'distribution = "{self.distribution}" with pattern = "{self.pattern}", which keeps the same share of '
                "every layer: leave distribution out"
            )
        if kept is not None and self.grows:
            raise ValueError(
                f'pattern = "{self.pattern}" with kind = "{self.variant}", which moves weights anywhere in a layer: '
                'use kind = "magnitude", or another pattern'
            )
        if self.removes and (self.grows or self.sends_all or self.distribution != "uniform"):
            raise ValueError(
                f'pattern = "{self.pattern}" with kind = "{self.variant}" and distribution = "{self.distribution}": a '
                f'model that shrinks keeps as many {self.pattern} in every block; use kind = "magnitude" and leave '
                "distribution out"
            )
        if self.grows and self.distribution == "global":
            raise ValueError(
                f'distribution = "global" with kind = "{self.variant}", whose layers keep their densities: use '
                '"uniform" or "erk"'
            )

    @property
    def kept_of(self) -> tuple[int, int] | None:
        """(N, M) of a pattern "N:M"; None for the others."""
        kept, colon, of = self.pattern.partition(":")
        return (int(kept), int(of)) if colon else None

    @property
    def removes(self) -> bool:
        """Whether what is masked can be taken out of the model."""
        return self.pattern in ("features", "heads")

    @property
    def first_trained(self) -> float:
        """The share of weights that the first update trains, which no later one exceeds."""
        at_once = self.schedule.shape == "one_shot" and self.schedule.begin == 1
        return self.final_density if self.starts_sparse or at_once else 1.0

    @property
    def final_density(self) -> float:
        """The share of weights that stays in the end."""
        kept = self.kept_of
        if kept is not None:
            return kept[0] / kept[1]
        assert self.density is not None, "it is required then"
        return self.density


class Magnitude(Sparse, frozen=True, tag_field="kind", tag="magnitude"):
    """Keeps the largest weights (Han et al., arXiv:1506.02626)."""


class RandomPruning(Sparse, frozen=True, tag_field="kind", tag="random"):
    """Keeps weights at random: what every other criterion has to beat."""


class Snip(Sparse, frozen=True, tag_field="kind", tag="snip"):
    """Keeps the weights of the largest |gradient x weight| of one step (SNIP, arXiv:1810.02340)."""

    reads_gradient = True


class Grasp(Sparse, frozen=True, tag_field="kind", tag="grasp"):
    """Keeps the weights without which the gradient of one step would shrink most (GraSP, arXiv:2002.07376)."""

    reads_gradient = True


class Movement(Sparse, frozen=True, tag_field="kind", tag="movement"):
    """Keeps the weights that move away from zero: the largest sums of -gradient x weight (arXiv:2005.07683)."""

    numbers = 1


class L0(Sparse, frozen=True, tag_field="kind", tag="l0"):
    """Trains a gate for each weight, which is open or shut with a probability (arXiv:1712.01312).

    From `schedule.begin` to `end`, when the gates that are most likely open become the mask.
    """

    masks = 0
    """Gates are gone when there is one."""
    numbers = 4

    @property
    def first_trained(self) -> float:
        """All: gates are there until the end."""
        return 1.0

    gate_lr: Annotated[float, says("The learning rate of the gates.", gt=0)] = 0.1


class Regrowing(Sparse, frozen=True):
    """Sparse from the start: drops the smallest weights, and grows as many others."""

    starts_sparse = True
    reads_gradient = True
    grows = True
    drop: Annotated[
        float, says("Share of the kept weights that the first change moves; it falls to 0 by a cosine.", gt=0, lt=1)
    ] = 0.3


class SET(Regrowing, frozen=True, tag_field="kind", tag="set"):
    """Sparse from the start: drops the smallest weights, and grows as many at random (arXiv:1707.04780)."""


class RigL(Regrowing, frozen=True, tag_field="kind", tag="rigl"):
    """Sparse from the start: drops the smallest weights, and grows those of the largest gradient (arXiv:1911.11134)."""


class TopKAST(Sparse, frozen=True, tag_field="kind", tag="top_kast"):
    """Computes with the largest weights, and trains more of them (Top-KAST, arXiv:2106.03517)."""

    starts_sparse = True
    sends_all = True
    masks = 2
    numbers = 1
    trained: Annotated[
        float, says("Share of the weights that is trained; those that are not computed with wait.", gt=0, le=1)
    ] = 0.5

    @property
    def first_trained(self) -> float:
        """`trained`."""
        return self.trained

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trained < self.final_density:
            raise ValueError(
                f"trained = {self.trained} with density = {self.final_density}: weights that are computed with are "
                "trained, so trained is at least density"
            )


class Lottery(Sparse, frozen=True, tag_field="kind", tag="lottery"):
    """A lottery ticket: the mask of the largest weights of a trained run, from the first step (arXiv:1803.03635).

    The weights come from the seed, or by `run.warm_start` from an early checkpoint of that run (arXiv:1912.05671).
    """

    starts_sparse = True
    ticket: Annotated[str, says("The run directory or checkpoint whose weights say which to keep.")]


SparsityConfig = Magnitude | RandomPruning | Snip | Grasp | Movement | L0 | SET | RigL | TopKAST | Lottery


# Table `[freeze]`. Imports no torch.


class FreezeLater(Table, frozen=True, kw_only=True):
    """Layers that are frozen for a part of the run."""

    layers: Annotated[tuple[str, ...], says("Patterns of names, as in `freeze.layers`.", min_length=1)]
    at: Annotated[int, says("The first step in which they are frozen.", ge=1)]
    until: Annotated[Positive | None, says("The step in which they are trained again; default: never.")] = None

    def __post_init__(self) -> None:
        if self.until is not None and self.until <= self.at:
            raise ValueError(f"until = {self.until} is not after at = {self.at}: raise it, or leave it out")


class FreezeByProgress(Table, frozen=True, kw_only=True):
    """Blocks are frozen from the front when they hardly change any more."""

    criterion: Annotated[
        Literal["movement", "gradient", "activations"],
        says(
            "What says that a block has settled: how far its weights move, how much the norm of its gradient changes "
            "(AutoFreeze, arXiv:2102.01386), or how far what it gives is from what a reference gives, a copy of the "
            "model of 8 bits that is `every` steps old (Egeria, arXiv:2201.06227)."
        ),
    ] = "movement"
    every: Annotated[
        Positive | None,
        says(
            "Every so many steps blocks are compared with what they were; default: as many as let nothing be frozen "
            "in the first third of `run.steps`, at most 100."
        ),
    ] = None
    below: Annotated[
        Annotated[float, says("", gt=0, lt=1)] | None,
        says(
            "movement: a block has settled when it moves less, for its size and the learning rate, than this share of "
            "the most that it ever did; default 0.2. gradient: when its norm changes less than that of all but this "
            "share of the trained blocks; default 0.5. activations: when the slope of that distance is less than this "
            "share of the largest that it ever had, or than its standard error; default 0.2."
        ),
    ] = None
    window: Annotated[int, says("activations: the last comparisons, to whose distances a line is fitted.", ge=3)] = 8
    patience: Annotated[int, says("Comparisons in a row after which a settled block is frozen.", ge=1)] = 3
    most: Annotated[float, says("Share of the blocks that may be frozen.", gt=0, lt=1)] = 0.75
    thaw: Annotated[
        float, says("Frozen blocks are trained again when the learning rate has fallen by this factor.", gt=1)
    ] = 10.0

    @property
    def share(self) -> float:
        """`below`, the default resolved."""
        return self.below or (0.5 if self.criterion == "gradient" else 0.2)

    def interval(self, steps: int) -> int:
        """`every`, the default resolved, of a run of `steps`."""
        return self.every or min(100, max(1, steps // (3 * self._intervals)))

    def first(self, steps: int) -> int:
        """The step after which a block can be frozen at the earliest."""
        return self._intervals * self.interval(steps)

    @property
    def _intervals(self) -> int:
        """Those before the first block can be frozen."""
        return self.patience + {"movement": 2, "gradient": 1, "activations": self.window}[self.criterion]


class FreezeConfig(Table, frozen=True, kw_only=True):
    """Layers that are not trained: no gradient is computed, sent or kept for them, and no optimizer state."""

    layers: Annotated[
        tuple[str, ...],
        says("Patterns of names of parameters or modules (`embedding`, `blocks.0`) that are never trained."),
    ] = ()
    train: Annotated[tuple[str, ...], says("Patterns of what is trained though `layers` matches it.")] = ()
    later: Annotated[tuple[FreezeLater, ...], says("Layers that are frozen for a part of the run.")] = ()
    progress: Annotated[
        FreezeByProgress | None, says("Freezes blocks from the front when they hardly change any more.")
    ] = None

    cache: Annotated[
        Size | None,
        says(
            'What each rank may keep, such as "4 GiB", of what the frozen blocks at the front of a model give for a '
            "sample, so that an epoch after the first does not compute them; ranks fetch it from each other. It may "
            "depend on the sample alone."
        ),
    ] = None

    def __post_init__(self) -> None:
        if not (self.layers or self.later or self.progress):
            raise ValueError("nothing is frozen: give layers, later or progress, or leave the table out")
        if self.cache is not None and self.changes:
            raise ValueError("cache with later or progress, which change what is frozen: leave one of the two out")

    def resolved(self, steps: int) -> FreezeConfig:
        """With the interval of comparisons that a run of `steps` has."""
        if self.progress is None:
            return self
        progress = msgspec.structs.replace(self.progress, every=self.progress.interval(steps))
        return msgspec.structs.replace(self, progress=progress)

    @property
    def changes(self) -> bool:
        """Whether what is frozen changes in the run."""
        return bool(self.later) or self.progress is not None
