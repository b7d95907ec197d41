"""`shoal bench codec --accuracy`: the held-out loss that each codec reaches, with and without error feedback.

Two replicas train on the same samples with the same schedule, once for every codec, feedback and seed; the run without
a codec is the peer, seed by seed. The interval is that of the mean of the paired ratios over seeds, two standard errors
to each side.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.bench.codec import CODECS
from shoal.bench.groups import join_store
from shoal.bench.report import Check, Result, Row, check
from shoal.bench.training_job import start_training
from shoal.codec.config import CodecConfig, DGCConfig, NoCodec
from shoal.launch.environment import Place
from shoal.runfile.load import run_file_of
from shoal.runfile.run_file import RunFile

TASKS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "digits": {
        "run": {"name": "digits", "steps": 200},
        "model": {"kind": "convnet", "channels": 1, "classes": 10, "width": 16},
        "data": {"kind": "digits"},
        "batch": {"global_samples": 64},
        "optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9},
        "schedule": {"warmup_steps": 20, "final_fraction": 0.01},
    },
    "gpt": {
        "run": {"name": "stdlib-gpt", "steps": 300},
        "model": {"kind": "gpt", "layers": 2, "width": 64, "heads": 2, "feed_forward_width": 192, "tied": True},
        "data": {"kind": "stdlib"},
        "batch": {"global_samples": 16, "sequence": 64},
        "optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.9, "clip_norm": 1.0},
        "schedule": {"kind": "cosine", "warmup_steps": 40, "final_fraction": 0.02},
        "observe": {"evaluate_samples": 1000},
    },
}
"""The recipes of these names, smaller, so that a table of all codecs takes minutes. The optimizer and its rate were
chosen after AdamW had done worse with one-bit codes.
"""
LOSS_BOUND = 0.02


def measure_accuracy(
    place: Place, task: str, chosen: Sequence[str], *, seeds: Sequence[int], steps: int
) -> Result | None:
    """Rows and checks; None on all ranks but rank 0. `steps` 0: those of the task."""
    store = join_store(place)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        runs: dict[tuple[str, bool], list[float]] = {}
        for name, config in [("none", NoCodec()), *((name, CODECS[name]) for name in chosen)]:
            for feedback in _feedbacks(config):
                codec = config if isinstance(config, NoCodec) else _with_feedback(config, feedback)
                runs[name, feedback] = [
                    _loss(
                        _run_file(task, codec, Path(folder), place, seed=seed, steps=steps),
                        place,
                        PrefixStore(f"{name}-{feedback}-{seed}", store),
                    )
                    for seed in seeds
                ]
    return _result(task, runs) if place.rank == 0 else None


def _feedbacks(config: CodecConfig) -> tuple[bool, ...]:
    """With and without, where the codec leaves the choice."""
    return (True, False) if "feedback" in config.__struct_fields__ else (False,)


def _with_feedback(config: CodecConfig, feedback: bool) -> CodecConfig:
    if "feedback" not in config.__struct_fields__:
        return config
    return msgspec.structs.replace(config, feedback=feedback)


def _run_file(task: str, codec: CodecConfig, folder: Path, place: Place, *, seed: int, steps: int) -> RunFile:
    tables = TASKS[task]
    own = {"seed": seed, "processes": place.world_size, "directory": str(folder), "device": "cpu"}
    if steps:
        own["steps"] = steps
    checkpoint = {"every_steps": 0}
    whole = {**tables, "run": {**tables["run"], **own}, "checkpoint": checkpoint}
    run_file = run_file_of(whole, file=task)
    if not isinstance(codec, DGCConfig):
        return msgspec.structs.replace(run_file, codec=codec)
    optimizer = msgspec.structs.replace(run_file.optimizer, momentum=0.0, clip_norm=None)
    own = msgspec.structs.replace(codec, clip_norm=run_file.optimizer.clip_norm)
    return msgspec.structs.replace(run_file, optimizer=optimizer, codec=own)


def _loss(run_file: RunFile, place: Place, store: Store) -> float:
    """The held-out loss after the last step; infinity where the training diverged."""
    with ExitStack() as stack:
        training = start_training(run_file, place, stack, store=store)
        for number in range(1, run_file.run.steps + 1):
            training.take_step(lr=training.run.rate(number))
        loss = training.run.evaluate()["loss/eval"]
    return loss if math.isfinite(loss) else math.inf


def _result(task: str, runs: Mapping[tuple[str, bool], list[float]]) -> Result:
    """Every codec beside the run without one."""
    peer, rows, checks = runs["none", False], [], list[Check]()
    for (name, feedback), losses in runs.items():
        above = [loss / plain - 1 for loss, plain in zip(losses, peer, strict=True)]
        mean = statistics.fmean(above)
        half = 2 * statistics.stdev(above) / math.sqrt(len(above)) if len(above) > 1 and math.isfinite(mean) else 0.0
        rows.append(
            Row(
                task=task, codec=name, feedback=feedback, loss=round(statistics.fmean(losses), 4),
                loss_above=round(mean, 4), interval=round(half, 4),
            )
        )  # fmt: skip
        if feedback:
            checks.append(check(f"{task}, {name}: loss above uncompressed", mean, LOSS_BOUND, at_most=True))
    return {"rows": rows, "checks": checks}
