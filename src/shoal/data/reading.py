"""The keys that every kind of `[data]` has. Imports neither torch nor numpy."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shoal.config.table import Table, says

ReaderKind = Literal["threads", "processes"]


class Reading(Table, frozen=True):
    """What every kind of data has: the order of its samples, and how far ahead they are read."""

    shuffle: Annotated[bool, says("Draw a new order of the samples in each epoch.")] = True
    shuffle_window: Annotated[
        Annotated[int, msgspec.Meta(ge=16)] | None,
        says(
            "Shuffle locally: this many positions in a row draw from 16 runs of neighbours in the files. Default: "
            "shuffle over all samples."
        ),
    ] = None
    stratify: Annotated[
        str | None,
        says(
            "Give every stretch of the run each class in its proportion: the classes are the data set's attribute "
            '"targets", or what package.module:function returns for data=the training data, one for each sample.'
        ),
    ] = None
    prefetch_steps: Annotated[int, says("Steps that are read ahead of the one that trains.", ge=1, le=1024)] = 2
    readers: Annotated[int, says("Threads or processes in each rank that read samples.", ge=1, le=256)] = 1
    reader_kind: Annotated[
        ReaderKind, says("Read in threads, or in processes of their own where decoding is Python's own work.")
    ] = "threads"
    augment: Annotated[
        list[str],
        says(
            'What changes the training samples, in order: "flip", "crop", or package.module:function, called with '
            "(sample, generator)."
        ),
    ] = msgspec.field(default_factory=list)
    crop_padding: Annotated[int, says('Pixels of zeros around an image that "crop" cuts from.', ge=1, le=4096)] = 4

    def __post_init__(self) -> None:
        if self.stratify is not None:
            if self.stratify != "targets" and ":" not in self.stratify:
                raise ValueError(
                    f'stratify is {self.stratify!r}: it takes "targets" or a function, as package.module:function'
                )
            if not self.shuffle or self.shuffle_window is not None:
                raise ValueError(
                    "stratify draws an order of its own over all samples: leave out shuffle and shuffle_window"
                )
        for name in self.augment:
            if name not in ("flip", "crop") and ":" not in name:
                raise ValueError(
                    f'augment names {name!r}: it takes "flip", "crop" or a function, as package.module:function'
                )


class Sampling(Reading, frozen=True):
    """What data with a known number of samples has beside: which of its samples are trained on, and how often."""

    subset: Annotated[
        str | float | None,
        says(
            "Train on some of the samples: a share above 0 and below 1, drawn from run.seed, or "
            "package.module:function, which returns their numbers for data=the training data."
        ),
    ] = None
    weights: Annotated[
        str | None,
        says(
            "Draw each sample with replacement, in proportion to its weight: package.module:function returns one for "
            'each sample for data=the training data; "balanced" draws each class of the attribute "targets" as often.'
        ),
    ] = None
    draws: Annotated[
        Annotated[int, msgspec.Meta(ge=1)] | None,
        says("Draws of an epoch by weights. Default: as many as there are samples."),
    ] = None
    group_by_length: Annotated[
        str | None,
        says(
            "Put samples of like length into one step, so that little is padded: package.module:function returns the "
            "length of each sample for data=the training data."
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("subset", "weights", "group_by_length"):
            value = getattr(self, key)
            if isinstance(value, str) and ":" not in value and not (key == "weights" and value == "balanced"):
                raise ValueError(f"{key} is {value!r}: it names a function, as package.module:function")
        if isinstance(self.subset, float) and not 0 < self.subset < 1:
            raise ValueError(f"subset is {self.subset}: a share lies above 0 and below 1; leave it out to train on all")
        if self.draws is not None and self.weights is None:
            raise ValueError("draws says how often an epoch draws by weights, and there are none: leave it out")
        orders = [key for key in ("stratify", "weights", "group_by_length") if getattr(self, key) is not None]
        if len(orders) > 1:
            raise ValueError(f"{orders[0]} and {orders[1]} each draw an order of their own: leave one of them out")
        if orders and (not self.shuffle or self.shuffle_window is not None):
            raise ValueError(f"{orders[0]} draws an order of its own: leave out shuffle and shuffle_window")
