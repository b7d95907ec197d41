"""Augmentation whose random numbers belong to a sample, not to a reader.

Each reading of a sample draws from a generator of its own, Philox keyed with blake2b(seed, epoch, sample id), so a
sample is changed in the same way whichever rank, thread or process reads it, and differently in the next epoch.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data.record_config import Reading
from shoal.data.sample import Sample, describe, parse_sample
from shoal.errors import UserCodeError
from shoal.maths.counter import key_of

Change = Callable[[Any, np.random.Generator], Any]
"""From a sample, as the data set returned it, to the one that is trained on."""


@dataclass(frozen=True)
class Augmentation:
    """The changes of a run, in order, and the run's seed.

    `seeds_process`: the process reads samples one by one and does nothing else, so that the global generators of
    Python, numpy and torch, from which a user's data set may draw, are seeded for each sample, too.
    """

    changes: Sequence[Change]
    seed: int
    seeds_process: bool = False

    def before(self, *, epoch: int, sample_id: int) -> None:
        """The data set is about to be asked for that sample."""
        if self.seeds_process:
            key = key_of(self.seed, "data set", epoch, sample_id)
            random.seed(key)
            np.random.seed(key % 2**32)
            torch.default_generator.manual_seed(key)

    def __call__(self, sample: Any, *, epoch: int, sample_id: int) -> Any:
        """`sample`, changed as (seed, epoch, sample id) say."""
        generator = generator_of(self.seed, epoch, sample_id)
        for change in self.changes:
            sample = change(sample, generator)
        return sample


def generator_of(seed: int, epoch: int, sample_id: int) -> np.random.Generator:
    """The generator of one sample in one epoch."""
    key = hashlib.blake2b(f"{seed}/{epoch}/{sample_id}".encode(), digest_size=16, person=b"shoal-augment").digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(key, dtype="<u8")))


def augmentation_of(config: Reading, seed: int) -> Augmentation | None:
    """What `data.augment` asks for; None where it is empty.

    Raises:
        UserCodeError: a function that it names is not there.
    """
    if not config.augment:
        return None
    return Augmentation([_change(name, config) for name in config.augment], seed)


def _change(name: str, config: Reading) -> Change:
    if name == "flip":
        return flip
    if name == "crop":
        return lambda sample, generator: crop(sample, generator, padding=config.crop_padding)
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise UserCodeError(f"data.augment names {name!r}, which cannot be imported ({error}): correct it.") from error
    if not callable(function):
        raise UserCodeError(f"data.augment names {name!r}, which is {describe(function)}: name a function.")
    return function


def flip(sample: Any, generator: np.random.Generator) -> Sample:
    """The image in `inputs` [..., width] mirrored left to right, in half of all readings."""
    parsed, image = _image(sample)
    return replace(parsed, inputs=image.flip(-1)) if generator.random() < 0.5 else parsed


def crop(sample: Any, generator: np.random.Generator, *, padding: int) -> Sample:
    """The image in `inputs` [..., height, width] moved by up to `padding` pixels each way; zeros come in."""
    parsed, image = _image(sample)
    top, left = (int(offset) for offset in generator.integers(0, 2 * padding + 1, size=2))
    height, width = image.shape[-2:]
    padded = torch.nn.functional.pad(image, (padding, padding, padding, padding))
    return replace(parsed, inputs=padded[..., top : top + height, left : left + width].contiguous())


def _image(sample: Any) -> tuple[Sample, Tensor]:
    parsed = parse_sample(sample)
    if not isinstance(parsed.inputs, Tensor) or parsed.inputs.ndim < 2:
        raise UserCodeError(
            f"The inputs are {describe(parsed.inputs)}: flip and crop take one image [..., height, width]; name a "
            "function of your own in data.augment."
        )
    return parsed, parsed.inputs
