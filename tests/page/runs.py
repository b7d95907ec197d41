"""Event files of runs that never were, with numbers that a test knows: a slow rank, a lost rank, a NaN, a restart."""

from __future__ import annotations

import math
from pathlib import Path

from shoal.observe.events import EventWriter
from shoal.observe.facts import write_facts

START_S = 1_760_000_000.0
STEP_S = 0.1
RUN_FILE = '[run]\nname = "{name}"\nsteps = {planned}\n[optimizer]\nkind = "adamw"\nlr = {lr}\n'


def write_run(
    directory: Path,
    *,
    name: str = "tiny",
    steps: int = 60,
    planned: int = 60,
    ranks: int = 4,
    slow: dict[int, int] | None = None,
    nan_at: int | None = None,
    restart_at: int | None = None,
    lr: float = 0.001,
) -> None:
    """A run of `ranks` whose steps take 100 ms. `slow`: rank and the step from which its forward and backward takes
    40 ms more. `restart_at`: killed behind this step, and gone on 5 steps before it, 10 s later."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "run.toml").write_text(RUN_FILE.format(name=name, planned=planned, lr=lr))
    for rank in range(ranks):
        slow_from = (slow or {}).get(rank, steps + 1)
        with EventWriter(directory, rank=rank) as writer:
            last = steps if restart_at is None else restart_at
            for step in range(1, last + 1):
                writer.write(step, values(step, rank, slow_from, nan_at, lr), time_s=START_S + STEP_S * step)
                if rank == 0 and step % 20 == 0:
                    held_out = {"loss/eval": loss(step, lr) + 0.1, "accuracy/eval": step / 100}
                    writer.write(step, held_out, time_s=START_S + STEP_S * step)
        if restart_at is None:
            continue
        with EventWriter(directory, rank=rank, generation=1) as writer:
            first, begin_s = restart_at - 5, START_S + STEP_S * restart_at + 10
            writer.resume(first, time_s=begin_s)
            for step in range(first + 1, steps + 1):
                time_s = begin_s + STEP_S * (step - first)
                writer.write(step, values(step, rank, slow_from, nan_at, lr), time_s=time_s)
    write_facts(directory, {"state": "finished" if steps == planned else "", "loss_unit": "nats/byte", "world": ranks})


def loss(step: int, lr: float = 0.001) -> float:
    """The training loss of a step."""
    return 2.0 + 3.0 * math.exp(-step * lr * 60)


def values(step: int, rank: int, slow_from: int, nan_at: int | None, lr: float = 0.001) -> dict[str, float]:
    """One rank's measurements of one step: 70 ms of work, or 110 ms, and waiting for others."""
    slow_s = 0.04 if step >= slow_from else 0.0
    found = {
        "loss/train": math.nan if step == nan_at else loss(step, lr),
        "lr": lr,
        "grad/norm": 1.0 + 1.0 / step,
        "time/step": STEP_S,
        "time/data": 0.002,
        "time/forward_backward": 0.06 + slow_s,
        "time/sync_exposed": max(0.0, 0.03 - slow_s),
        "time/optimizer": 0.005,
        "time/checkpoint_stall": 0.003 if step % 20 == 1 and step > 1 else 0.0,
        "memory/peak_bytes": (100 + rank) * 2.0**20,
        "throughput/tokens_per_second": 20_480.0 + step,
        "wire/bytes_sent": 3.65e6,
        "wire/inside_bytes": 2.65e6,
        "wire/between_bytes": 1e6,
        "wire/all_reduce/bytes_sent": 3.65e6,
        "wire/all_reduce/exposed_s": 0.02,
        "wire/all_reduce/hidden_s": 0.01,
    }
    if step % 10 == 0:
        found |= {
            f"moe/load/blocks.1.moe/{expert}": 64.0 + 32.0 * (expert == 2) - 32.0 * (expert == 3) for expert in range(4)
        }
    return found
