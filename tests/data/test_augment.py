"""Augmentation belongs to (seed, epoch, sample): readers, ranks and restarts do not change it; epochs do."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.data.augment import Augmentation, augmentation_of, crop, flip, generator_of
from shoal.data.batches import SourceReader, read_batch
from shoal.data.config import Digits
from shoal.data.cursor import Interval
from shoal.data.feed import Feed, StepShare
from shoal.data.inputs import Collated
from shoal.data.order import Order
from shoal.data.sample import Sample, first_leaf
from shoal.errors import UserCodeError
from tests.data.sources import built, written

SEED = 5


def noised(sample: object, generator: np.random.Generator) -> dict:
    """A user's own change: noise on the inputs."""
    assert isinstance(sample, dict)
    return sample | {"inputs": np.asarray(sample["inputs"]) + generator.normal()}


def epochs(tmp_path: Path, *, ranks: int, readers: int, start: int = 0, steps: int = 24) -> dict[int, torch.Tensor]:
    """The augmented inputs by position."""
    dataset = built(written("images", tmp_path / "data"), tmp_path / "cache")
    order = dataset.order(SEED, shuffle=True)
    changes = Augmentation([flip, lambda s, g: crop(s, g, padding=2)], SEED)
    found = {}
    for rank in range(ranks):
        with Feed(
            dataset.train,
            order,
            StepShare(7, rank, ranks),
            start=start,
            readers=readers,
            open_reader=lambda: SourceReader(dataset.train, order, denominator="auto", augmentation=changes),
        ) as feed:
            for _ in range(steps):
                for batch in feed.next().microbatches:
                    assert isinstance(batch.inputs, torch.Tensor)
                    found |= dict(zip(batch.positions.tolist(), batch.inputs, strict=True))
    return found


def test_any_number_of_readers_and_ranks_changes_a_sample_alike(tmp_path: Path):
    """Two epochs and more are the same bit for bit with 1 to 4 ranks and readers, and after a restart in the middle."""
    reference = epochs(tmp_path, ranks=1, readers=1)
    for ranks, readers, start in ((2, 3, 0), (4, 1, 0), (3, 4, 70)):
        again = epochs(tmp_path, ranks=ranks, readers=readers, start=start, steps=24 - start // 7)
        assert set(again) == {p for p in reference if p >= start}
        for position, inputs in again.items():
            assert torch.equal(inputs, reference[position]), position


def test_epochs_differ():
    """The same sample gets other numbers in another epoch, of another seed, and beside another sample."""
    draws = {generator_of(*key).integers(2**60) for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (10, 0, 0))}
    assert len(draws) == 5


def test_a_batch_that_straddles_epochs(tmp_path: Path):
    """A sample that stands twice in one batch, in two epochs, is changed twice."""
    order = Order(2, SEED, shuffle=False)
    source = [{"inputs": np.zeros(1), "targets": 0}, {"inputs": np.zeros(1), "targets": 1}]
    with Feed(
        source,
        order,
        StepShare(6),
        open_reader=lambda: SourceReader(source, order, denominator="auto", augmentation=Augmentation([noised], SEED)),
    ) as feed:
        (batch,) = feed.next().microbatches
    wanted = [generator_of(SEED, p // 2, p % 2).normal() for p in range(6)]
    assert batch.inputs[:, 0].tolist() == pytest.approx(wanted)  # type: ignore[index]
    assert len(set(wanted)) == 6


def test_flip_and_crop():
    """Flips mirror the width in about half of the readings; crops move by up to the padding, and zeros come in."""
    image = torch.arange(1, 13, dtype=torch.float32).reshape(1, 3, 4)
    sample = Sample(image, torch.tensor(0), None)
    flipped = [not torch.equal(flip(sample, generator_of(0, 0, i)).inputs, image) for i in range(400)]  # type: ignore[arg-type]
    assert 150 < sum(flipped) < 250
    offsets = set()
    for i in range(200):
        moved = crop(sample, generator_of(0, 0, i), padding=1).inputs
        padded = torch.nn.functional.pad(image, (1, 1, 1, 1))
        offsets |= {
            (t, left)
            for t in range(3)
            for left in range(3)
            if torch.equal(padded[:, t : t + 3, left : left + 4], moved)  # type: ignore[arg-type]
        }
    assert offsets == {(t, left) for t in range(3) for left in range(3)}


def test_functions_are_named():
    """A run file names built-in changes and functions of the user's; what is not there is refused."""
    assert augmentation_of(Digits(), 0) is None
    made = augmentation_of(Digits(augment=["flip", "tests.data.test_augment:noised"]), 3)
    assert made is not None
    assert made.changes[1].__name__ == "noised"
    with pytest.raises(ValueError, match="augment names 'rotate'"):
        Digits(augment=["rotate"])
    for wrong in ("tests.data.nowhere:noised", "tests.data.test_augment:nothing", "tests.data.test_augment:SEED"):
        with pytest.raises(UserCodeError, match=wrong):
            augmentation_of(Digits(augment=[wrong]), 0)
    with pytest.raises(UserCodeError, match="flip and crop take one image"):
        flip((np.zeros(3), 0), generator_of(0, 0, 0))


class Noisy:
    """Draws from the generators of the process."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple:
        return torch.tensor([index, random.random(), np.random.rand(), float(torch.rand(()))]), 0


def test_what_a_data_set_draws_itself_belongs_to_the_sample():
    """In a process that reads alone: however positions are cut into batches, and anew in the next epoch."""
    order = Order(6, 3)

    def rows(cuts: list[int]) -> list[list[float]]:
        reader = SourceReader(Noisy(), order, denominator="auto", augmentation=Augmentation([], 3, seeds_process=True))
        parts = [reader.read(Interval(a, b)).batch for a, b in itertools.pairwise(cuts)]
        return [row for part in parts for row in first_leaf(part.inputs).tolist()]

    whole = rows([0, 12])
    assert rows([6, 8, 12]) == whole[6:]
    assert rows([0, 1, 2, 5, 12]) == whole
    later = {row[0]: row[1:] for row in whole[6:]}
    assert all(later[row[0]][k] != row[1 + k] for row in whole[:6] for k in range(3))


class Words:
    """Sample i is a text of i + 1 letters: a loop's own `collate_fn` alone knows how texts lie side by side."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> str:
        return "abcdef"[index] * (index + 1) + str(random.randrange(10))


def lettered(texts: list[str]) -> torch.Tensor:
    """The texts as numbers, padded: [texts, 9]."""
    return torch.tensor([list(text.ljust(9).encode()) for text in texts])


def shouted(text: str, generator: np.random.Generator) -> str:
    """A user's change of a text."""
    return text.upper() + str(generator.integers(10))


@pytest.mark.parametrize("seeds_process", [False, True])
def test_what_the_loop_collates_is_augmented_first(seeds_process: bool):
    """The change sees the sample as the data set returned it, then the loop's own `collate_fn` sees all of them. In a
    reader process the data set's own draws are seeded for each sample, too."""
    source = Collated(Words(), lettered)  # type: ignore[arg-type]
    ids = np.array([4, 1, 2])
    changed = (Augmentation([shouted], SEED, seeds_process=seeds_process), np.array([0, 0, 1]))
    reads = [read_batch(source, ids, np.arange(3), denominator="auto", changed=changed).batch.inputs for _ in range(2)]
    texts = [[bytes(row).decode().strip() for row in read.tolist()] for read in reads]  # type: ignore[union-attr]
    drawn = [str(generator_of(SEED, epoch, index).integers(10)) for index, epoch in ((4, 0), (1, 0), (2, 1))]
    assert [(text[:-2], text[-1]) for text in texts[0]] == list(zip(["EEEEE", "BB", "CCC"], drawn, strict=True))
    if seeds_process:
        assert texts[0] == texts[1]


def test_a_sample_that_cannot_be_changed_is_named():
    """Before the loop's own `collate_fn` sees it."""
    changed = (Augmentation([flip], SEED), np.array([0]))
    with pytest.raises(UserCodeError, match="Sample 4 at position 0"):
        read_batch(Collated(Words(), lettered), np.array([4]), np.arange(1), denominator="auto", changed=changed)  # type: ignore[arg-type]
