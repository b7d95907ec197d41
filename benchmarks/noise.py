"""`python -m benchmarks.noise`: steps to a loss at several batch sizes, predicted from the noise scale at one of them.

A small GPT is trained to a fixed held-out loss with each batch size, from several seeds. The noise scale of the runs of
one batch size predicts the steps of all others (`steps_at`), and sets their learning rates by the rule
of the paper, with the power 1/2 that suits Adam. The peers are two rules of thumb that need no measurement: a batch
twice as large halves the steps, or changes nothing.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from torch._C._distributed_c10d import PrefixStore, Store

from benchmarks.command import run
from shoal.bench.groups import join_store
from shoal.bench.options import AsJson, Processes, numbers
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import Result, check, print_report
from shoal.bench.training_job import start_training
from shoal.checkpoint.config import CheckpointConfig
from shoal.comm.config import WireConfig
from shoal.cost.noise_scale import Moments
from shoal.data.config import BatchConfig, StdlibText
from shoal.errors import Diverged
from shoal.launcher.environment import Place
from shoal.models.config import GPTConfig
from shoal.observe.config import ObserveConfig
from shoal.optim.config import AdamW
from shoal.runfile.run_file import RunConfig, RunFile

LOSS = 2.25
"""Nats per byte at which all runs end."""
BOUND = 0.15
"""The promised error of a prediction."""
POWER = 0.5
"""Of the rule for learning rates."""
MODEL = GPTConfig(layers=2, width=64, heads=4, feed_forward="gelu", feed_forward_width=256, tied=True)
SEQUENCE, WARM_UP_STEPS, EVALUATE_EVERY, EVALUATED_SAMPLES, MOST_STEPS = 64, 20, 10, 256, 4000
BLOCK_STEPS = 20
"""Moments are averaged over so many steps before they are divided: the scale of a single step is mostly chance."""


def steps_at(batch: float, *, scales: Sequence[float], measured_batch: float) -> float:
    """Steps that a run with batches of `batch` takes to where a run with `measured_batch` came.

    `scales` are B_noise at each step of that run. Each of its steps went 1 / (1 + B_noise / B) of the way of a step
    without noise, so that S = sum (1 + B_noise / batch) / (1 + B_noise / measured_batch).
    """
    return sum((1 + scale / batch) / (1 + scale / measured_batch) for scale in scales)


def rate_at(batch: float, *, best_rate: float, noise_scale: float, power: float = 1.0) -> float:
    """The learning rate for a batch size: best_rate / (1 + B_noise / B)^power (section 2.2; appendix E for `power`).

    `power` is 1 for SGD; Adam, whose steps are normalised, wants 0.5 to 1.
    """
    return best_rate / (1 + noise_scale / batch) ** power


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Steps to the loss, interpolated between two evaluations, and the moments of every step."""

    steps: float
    moments: tuple[Moments, ...]

    @property
    def scales(self) -> list[float]:
        """B_noise of each step up to the loss: that of the step's block."""
        found: list[float] = []
        for first in range(0, int(self.steps), BLOCK_STEPS):
            block = self.moments[first : min(first + BLOCK_STEPS, int(self.steps))]
            signal, trace = sum(one.signal for one in block), sum(one.trace for one in block)
            before = found[-1] if found else 0.0
            found += [max(0.0, trace / signal) if signal > 0 else before] * len(block)
        return found


def noise(
    batches: Annotated[str, typer.Option(help="Global batches in samples, with commas.")] = "4,8,16,32",
    measured_at: Annotated[int, typer.Option(help="The one whose noise predicts the others.")] = 16,
    seeds: Annotated[int, typer.Option(help="Trainings of each batch size.", min=1)] = 3,
    lr: Annotated[float, typer.Option(help="Learning rate of the batch that is measured at.", min=1e-9)] = 3e-3,
    processes: Processes = 2,
    as_json: AsJson = False,
) -> None:
    """Steps to a loss at several batch sizes, predicted from the gradient noise scale measured at one of them.

    Example: python -m benchmarks.noise --seeds 1
    """
    sizes = numbers(batches, "--batches", least=processes, multiple_of=processes)
    if measured_at not in sizes:
        raise typer.BadParameter(f"{measured_at}; give one of --batches {batches}", param_hint="--measured-at")
    if is_rank():
        run_as_rank(lambda place: measure(place, batches=sizes, measured_at=measured_at, seeds=seeds, lr=lr))
        return
    command = ["benchmarks.noise", "--batches", batches, "--measured-at", str(measured_at), "--seeds", str(seeds)]
    command += ["--lr", str(lr), "--processes", str(processes)]
    print_report("noise", on_ranks(command, processes=processes), as_json=as_json)


def measure(place: Place, *, batches: Sequence[int], measured_at: int, seeds: int, lr: float) -> Result | None:
    """Rows and checks; None on all ranks but rank 0. `lr` is the rate of the batch size `measured_at`."""
    store = join_store(place)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:

        def outcomes(batch: int, rate: float) -> list[Outcome]:
            runs = (run_file_of(Path(folder), batch=batch, seed=seed) for seed in range(seeds))
            return [train_to(LOSS, run, place, store, lr=rate) for run in runs]

        found = {measured_at: outcomes(measured_at, lr)}
        scale = mean_scale(found[measured_at])
        best = lr * (1 + scale / measured_at) ** POWER
        rates = {size: rate_at(size, best_rate=best, noise_scale=scale, power=POWER) for size in batches}
        for size in batches:
            if size != measured_at:
                found[size] = outcomes(size, rates[size])
    return result_of(found, rates, measured_at) if place.rank == 0 else None


def mean_scale(runs: Sequence[Outcome]) -> float:
    """The noise scale in samples, in the mean over all steps of all runs."""
    return statistics.mean(scale for run in runs for scale in run.scales)


def result_of(found: Mapping[int, Sequence[Outcome]], rates: Mapping[int, float], measured_at: int) -> Result:
    """Each batch size's steps beside what the runs of `measured_at` predict."""
    source = found[measured_at]
    here = statistics.mean(run.steps for run in source)
    rows, checks = [], []
    for size in sorted(found):
        measured = statistics.mean(run.steps for run in found[size])
        predicted = statistics.mean(steps_at(size, scales=run.scales, measured_batch=measured_at) for run in source)
        rows.append(
            {
                "batch_samples": size,
                "lr": round(rates[size], 6),
                "steps": round(measured, 1),
                "steps_of_seeds": [round(run.steps, 1) for run in found[size]],
                "predicted_steps": round(predicted, 1),
                "error": round(predicted / measured - 1, 4),
                "steps_by_halving": round(here * measured_at / size, 1),
                "steps_unchanged": round(here, 1),
                "samples": round(measured * size),
                "noise_scale": round(mean_scale(found[size]), 2),
            }
        )
        if size != measured_at:
            error = abs(predicted / measured - 1)
            name = f"steps to {LOSS} nats at {size} samples, from {measured_at}"
            checks.append(check(name, error, BOUND, at_most=True))
    return {"rows": rows, "checks": checks}


def run_file_of(folder: Path, *, batch: int, seed: int) -> RunFile:
    """A small version of recipes/stdlib-gpt.toml, which reaches its loss within some hundred steps."""
    return RunFile(
        run=RunConfig(name="noise", steps=MOST_STEPS, seed=seed, directory=str(folder)),
        model=MODEL,
        data=StdlibText(),
        batch=BatchConfig(global_samples=batch, sequence=SEQUENCE),
        optimizer=AdamW(beta2=0.98, weight_decay=0.0),
        wire=WireConfig(timeout_s=600.0),
        checkpoint=CheckpointConfig(every_steps=0),
        observe=ObserveConfig(noise_every_steps=1, evaluate_samples=EVALUATED_SAMPLES),
    )


def train_to(loss: float, run_file: RunFile, place: Place, store: Store, *, lr: float) -> Outcome:
    """Trains on all ranks; the same outcome on each. Raises `Diverged` where `MOST_STEPS` do not reach the loss."""
    name = f"batch-{run_file.batch.global_samples}-seed-{run_file.run.seed}"
    moments: list[Moments] = []
    before = (0, float("inf"))
    with ExitStack() as stack:
        for number, found in _evaluations(run_file, place, PrefixStore(name, store), stack, lr=lr, moments=moments):
            if found <= loss:
                share = (before[1] - loss) / (before[1] - found) if before[0] else 1.0
                return Outcome(steps=before[0] + share * (number - before[0]), moments=tuple(moments))
            before = (number, found)
    raise Diverged(f"{name}: a loss of {loss} was not reached in {MOST_STEPS} steps; give a higher one")


def _evaluations(
    run_file: RunFile, place: Place, store: Store, stack: ExitStack, *, lr: float, moments: list[Moments]
) -> Iterator[tuple[int, float]]:
    """(step, held-out loss) every few steps of training; appends the moments of every step."""
    training = start_training(run_file, place, stack, store=store)
    for number in range(1, MOST_STEPS + 1):
        reading = training.take_step(lr=lr * min(1.0, number / WARM_UP_STEPS)).noise
        moments.append(reading.step if reading is not None else Moments(signal=0.0, trace=0.0))
        if number % EVALUATE_EVERY == 0:
            yield number, training.run.evaluate()["loss/eval"]


if __name__ == "__main__":
    run(noise)
