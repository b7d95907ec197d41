"""A run that never was: event files with known numbers, for the tests of the report."""

from __future__ import annotations

import math
from pathlib import Path

from shoal.observe.events import EventWriter
from shoal.observe.facts import write_facts

RUN_FILE = '[run]\nname = "tiny"\nsteps = {steps}\n'
START_S = 1_760_000_000.0


def write_run(
    directory: Path, *, steps: int = 40, planned: int = 40, ranks: int = 2, stop_at: int | None = None
) -> None:
    """A run of `ranks`, of which the last works 20 % longer; it was stopped after `stop_at` and resumed 5 before it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "run.toml").write_text(RUN_FILE.format(steps=planned))
    for rank in range(ranks):
        slow = rank == ranks - 1 and ranks > 1
        if stop_at is not None:
            _life(directory, rank, range(1, stop_at + 1), generation=0, slow=slow)
        first = 1 if stop_at is None else stop_at - 4
        _life(directory, rank, range(first, steps + 1), generation=0 if stop_at is None else 1, slow=slow)
    write_facts(directory, {"world": ranks, "parameters": 912_384, "loss_unit": "nats/byte"})


def _life(directory: Path, rank: int, steps: range, *, generation: int, slow: bool) -> None:
    with EventWriter(directory, rank=rank, generation=generation) as writer:
        for step in steps:
            writer.write(step, measurements(step, slow=slow), time_s=START_S + 1000 * generation + step)
        if rank == 0 and len(steps):
            writer.write(steps[-1], {"loss/eval": 2.0, "accuracy/eval": 0.975}, time_s=START_S + steps[-1])


def measurements(step: int, *, slow: bool) -> dict[str, float]:
    """One step of 100 ms."""
    return {
        "loss/train": 2.0 + 3.0 * math.exp(-step / 10),
        "lr": 1e-3,
        "grad/norm": math.inf if step == 7 else 1.0,
        "time/step": 0.1,
        "time/data": 0.001,
        "time/forward_backward": 0.084 if slow else 0.07,
        "time/sync_exposed": 0.006 if slow else 0.02,
        "time/optimizer": 0.005,
        "wire/bytes_sent": 3.65e6,
        "throughput/tokens_per_second": 20_480.0,
        "tokens/consumed": 2048.0 * step,
    }
