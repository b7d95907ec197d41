"""Which batches each pass over a loader has, in a run that is new, resumed, or over; and what the engine passes on."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.deepspeed.config import Batches, Settings
from shoal.deepspeed.engine import Engine, _Kept, _planned
from shoal.deepspeed.loader import Loader, RepeatingLoader
from shoal.errors import UserCodeError

DATA = [torch.zeros(2)] * 32


def loader(epoch: float, *, over: bool = False) -> Loader:
    """Of a run that stands there, and has four epochs."""

    def epochs() -> Iterator[tuple[int, Iterator[str]]]:
        for number in range(int(epoch), 4):
            yield number, (f"{number}{half}" for half in "ab" if number + 0.5 * (half == "b") >= epoch)

    run = SimpleNamespace(epoch=epoch, epochs=epochs, steps_done=9)
    engine: Any = SimpleNamespace(run=run, is_over=over)
    return Loader(engine, samples=32, step=8, accumulation=1)


def test_a_resumed_run_passes_over_epochs_that_are_done() -> None:
    found = loader(2.5)
    assert [list(found) for _ in range(4)] == [[], [], ["2b"], ["3a", "3b"]]


def test_a_loop_that_knows_its_epoch_begins_there() -> None:
    found = loader(2.5)
    found.begin_here()
    assert [list(found) for _ in range(2)] == [["2b"], ["3a", "3b"]]


@pytest.mark.parametrize(("epoch", "first"), [(0.0, "0a"), (1.0, "1a"), (2.0, "2a"), (3.5, "3b")])
def test_a_loader_that_repeats_begins_where_the_run_stands(epoch: float, first: str) -> None:
    """In whatever epoch, and goes on into the next."""
    batches = list(RepeatingLoader(loader(epoch)))
    assert (batches[0], batches[-1]) == (first, "3b")
    assert next(RepeatingLoader(loader(epoch))) == first


def test_a_run_that_is_over_has_no_batch_and_no_endless_loop() -> None:
    found = loader(2.5, over=True)
    assert [list(found) for _ in range(3)] == [[], [], []]
    assert list(RepeatingLoader(loader(2.5, over=True))) == []
    with pytest.raises(UserCodeError, match="came to its end behind step 9"):
        [list(found) for _ in range(100)]
    with pytest.raises(UserCodeError, match="came to its end behind step 9"):
        next(RepeatingLoader(loader(2.5, over=True)))


def test_a_pass_that_was_left_open_is_closed() -> None:
    """A generator that outlives its run says so when the interpreter ends."""
    found = loader(0.0)
    batches = iter(found)
    assert next(batches) == "0a"
    found.close()
    assert list(batches) == []


def test_the_engine_has_what_the_model_has() -> None:
    run: Any = SimpleNamespace()
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    settings = Settings(train=8, precision="bfloat16")
    engine = Engine(run, model, optimizer, None, settings=settings, batches=Batches(8, 8, 1), kept=_Kept())
    assert engine.in_features == 3
    assert engine.bfloat16_enabled()
    assert not engine.fp16_enabled()
    with pytest.raises(AttributeError, match="out_feature'"):
        _ = engine.out_feature


@pytest.mark.parametrize(
    ("keys", "layout", "accumulation"),
    [
        (["layout.tensor=2"], {"shard": 1}, 2),
        (["layout.tensor=2", "run.processes=4"], {"shard": 2}, 1),
        (["run.processes=2"], {"shard": 2}, 1),
    ],
)
def test_ranks_that_split_a_model_share_their_samples(keys: list[str], layout: dict, accumulation: int) -> None:
    """They are not counted where a step is divided, and ZeRO divides what each of them has."""
    micro = 4 if "layout.tensor=2" in keys or "run.processes=2" in keys else 2
    settings = Settings(train=8, micro=micro, zero=2)
    tables, _, batches = _planned(settings, None, [*keys, "run.name=mine"], (DATA, None), loader=None)
    assert tables.get("layout", {}) == layout
    assert batches.accumulation == accumulation
