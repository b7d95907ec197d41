"""`python -m benchmarks.checkpoint_bytes`: what `checkpoint.compress` and `checkpoint.moments` save and cost.

A run of a recipe is trained, and saved every few steps in each of the ways, by savers that take turns on the same live
state. Of each way: the bytes of a checkpoint beside those of its tensors (the mean of the saves after the first one),
the seconds until it is whole, how long training stood still, and the seconds of a start from the last one (verify every
byte, read, decode). Then the run goes on from each last checkpoint with the same samples, and its losses are held
against those of the run that went on without a stop. Ways without loss must give the same losses to the bit.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.command import run
from shoal.bench.options import AsJson
from shoal.bench.report import Check, Result, Row, check, print_report
from shoal.bench.training_job import SAVE_S, Training, start_alone, training_job
from shoal.checkpoint.agreement import LocalExchange
from shoal.checkpoint.commit import newest_verified
from shoal.checkpoint.config import CheckpointConfig
from shoal.checkpoint.planes import encode
from shoal.checkpoint.save import Saver, SaveReport
from shoal.engine.loop import Job, take_step
from shoal.engine.recovery import resume
from shoal.runfile.load import load_run
from shoal.state import targets_of

RECIPES = {
    "stdlib GPT": ("recipes/stdlib-gpt.toml", ("model.width", "model.feed_forward_width")),
    "Llama of transformers": (
        "recipes/lora-base.toml",
        ("model.config.hidden_size", "model.config.intermediate_size"),
    ),
}
WAYS = {
    "none": CheckpointConfig(keep=1),
    "planes": CheckpointConfig(keep=1, compress="planes"),
    "deltas": CheckpointConfig(keep=1, compress="deltas"),
    "planes, moments in 8 bits": CheckpointConfig(keep=1, compress="planes", moments="8bit"),
    "deltas, moments in 8 bits": CheckpointConfig(keep=1, compress="deltas", moments="8bit"),
}
SHARES = {"planes": 0.87, "deltas": 0.80, "planes, moments in 8 bits": 0.50}
"""Of the tensors' bytes, at most."""
NEAR = 0.02
"""The largest difference of a loss after a start from moments in 8 bits."""


def checkpoint_bytes(
    steps: Annotated[int, typer.Option(help="Steps before the last save.", min=2)] = 120,
    every: Annotated[int, typer.Option(help="Steps between two saves, of which there are four.", min=1)] = 10,
    more: Annotated[int, typer.Option(help="Steps after the start from a checkpoint.", min=1)] = 20,
    width: Annotated[int, typer.Option(help="Of the models; a multiple of 64.", min=64)] = 256,
    as_json: AsJson = False,
) -> None:
    """Bytes and seconds of checkpoints in each form, and the losses after a start from them.

    Example: python -m benchmarks.checkpoint_bytes --steps 60
    """
    torch.set_num_threads(1)
    rows: list[Row] = []
    checks: list[Check] = []
    for name in RECIPES:
        with ExitStack() as stack:
            found = measure(name, stack, steps=steps, every=every, more=more, width=width)
            rows += found["rows"]
            checks += found["checks"]
    print_report("checkpoint_bytes", {"rows": rows, "checks": checks}, as_json=as_json)


def measure(name: str, stack: ExitStack, *, steps: int, every: int, more: int, width: int) -> Result:
    """A row for each way."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
    job, training = _job(name, folder, stack, width)
    savers = {
        way: Saver(folder / way, rank=0, world_size=1, exchange=LocalExchange(), config=config, timeout_s=SAVE_S)
        for way, config in WAYS.items()
    }
    stalls: dict[str, list[float]] = {way: [] for way in WAYS}
    reports: dict[str, list[SaveReport]] = {way: [] for way in WAYS}
    for step in range(1, steps + 1):
        take_step(job)
        if (steps - step) % every == 0 and steps - step < 4 * every:
            for way, saver in savers.items():
                stalls[way].append(saver.save(step, job.state.tensors(), job.state.to_json(), **job.origin))
                reports[way] += saver.wait()
    batches = [training.feed.next().microbatches for _ in range(more)]

    def losses() -> list[float]:
        numbers = range(steps + 1, steps + 1 + more)
        return [
            training.run.step(number, batch, lr=job.rate(number)).loss
            for number, batch in zip(numbers, batches, strict=True)
        ]

    untouched = losses()
    rows: list[Row] = []
    for way in WAYS:
        begin_s = time.perf_counter()
        resume(job.state, folder / way, announce=lambda key, find: find(), warn=print)
        load_s = time.perf_counter() - begin_s
        off = max(abs(a - b) for a, b in zip(untouched, losses(), strict=True))
        rows.append(_row(name, way, reports[way], stalls[way], folder / way, load_s, off))
    rows.append(_bfloat16(name, job))
    return {"rows": rows, "checks": _checks(name, rows)}


def _job(name: str, folder: Path, stack: ExitStack, width: int) -> tuple[Job, Training]:
    recipe, (hidden, inner) = RECIPES[name]
    run_file = load_run(
        Path(recipe),
        [
            f"run.directory={folder / 'run'}",
            "run.processes=1",
            "run.device=cpu",
            "batch.global_samples=4",
            "batch.sequence=64",
            f"{hidden}={width}",
            f"{inner}={3 * width}",
        ],
    )
    training = start_alone(run_file, stack)
    return training_job(training, folder / "run", stack), training


def _row(
    name: str, way: str, reports: list[SaveReport], stalls: list[float], directory: Path, load_s: float, off: float
) -> Row:
    manifest, _ = newest_verified(directory)
    assert manifest is not None, "it was saved"
    state_bytes = reports[-1].state_bytes
    own_bytes = statistics.mean(report.bytes_written + report.bytes_reused for report in reports[1:])
    return {
        "model": name,
        "way": way,
        "state_bytes": state_bytes,
        "checkpoint_bytes": round(own_bytes),
        "share": round(own_bytes / state_bytes, 4),
        "with_base": round(sum(manifest.objects.values()) / state_bytes, 4),
        "stall_s": round(statistics.median(stalls), 4),
        "save_s": round(statistics.median(report.seconds for report in reports), 3),
        "start_s": round(load_s, 3),
        "loss_differs": off,
    }


def _bfloat16(name: str, job: Job) -> Row:
    """The weights alone, as a file in bfloat16 would have them."""
    held = (tensor for key, tensor in job.state.tensors().items() if key.startswith("model/"))
    parts = [target.tensor.detach() for each in held for target in targets_of(each)]
    weights = [part.bfloat16().view(-1).view(torch.int16).numpy().view("u2") for part in parts]
    nbytes, coded = sum(each.nbytes for each in weights), sum(len(encode(each).stream) for each in weights)
    return {"model": name, "way": "weights in bfloat16, planes", "state_bytes": nbytes, "checkpoint_bytes": coded,
            "share": round(coded / nbytes, 4)}  # fmt: skip


def _checks(name: str, rows: list[Row]) -> list[Check]:
    by_way = {str(row["way"]): row for row in rows}
    checks = [
        check(f"{name}: bytes, {way}", float(by_way[way]["share"]), bound, at_most=True)
        for way, bound in SHARES.items()
    ]
    for way in WAYS:
        bound = NEAR if "8 bits" in way else 0.0
        off = float(by_way[way]["loss_differs"])
        checks.append(check(f"{name}: losses after a start, {way}", off, bound, at_most=True))
    return checks


if __name__ == "__main__":
    run(checkpoint_bytes)
