"""`shoal bench codec --accuracy`: the held-out loss that each codec reaches, with and without error feedback.

Two replicas train on the same samples with the same schedule, once for every codec, feedback and seed; the run without
a codec is the peer, seed by seed. The interval is that of the mean of the paired ratios over seeds, two standard errors
to each side.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.bench.codec_times import CODECS
from shoal.bench.groups import join_store
from shoal.bench.ranks import rank_folder
from shoal.bench.report import Check, Result, Row, check, told
from shoal.bench.training_job import start_training
from shoal.codec.config import CodecConfig, DGCConfig, NoCodec
from shoal.launcher.environment import Place
from shoal.optim.config import OneBitAdam
from shoal.runfile.load import run_file_of
from shoal.runfile.run_file import RunFile

WITH_MOMENTUM: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
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
TASKS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    **WITH_MOMENTUM,
    "gpt_plain_sgd": {**WITH_MOMENTUM["gpt"], "optimizer": {"kind": "sgd", "lr": 0.5, "clip_norm": 1.0}},
}
"""Error feedback of gradients is proved for SGD without momentum (arXiv:1901.09847), which `gpt_plain_sgd` is."""
LOSS_BOUND, SHARD_BOUND = 0.02, 0.01
"""How far above its peer's a coded run's loss may be; of ZeRO-3 with coded weights and gradients."""
ADAM = {"lr": 2e-3, "beta2": 0.95, "weight_decay": 0.1}
PEERED: Mapping[str, tuple[str, float]] = {
    "one_bit_adam": ("adamw", LOSS_BOUND),
    "zero_one_adam": ("adamw", LOSS_BOUND),
    "zero_3_coded": ("zero_3", SHARD_BOUND),
}
"""What is coded otherwise than by `[codec]`: its peer, and the bound."""
CHANGES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "adamw": {"optimizer": {"kind": "adamw", **ADAM}},
    "one_bit_adam": {"optimizer": {"kind": "one_bit_adam", **ADAM}},
    "zero_one_adam": {"optimizer": {"kind": "zero_one_adam", **ADAM}},
    "zero_3": {"layout": {"shard": 2}, "memory": {"zero": 3}},
    "zero_3_coded": {
        "layout": {"shard": 2}, "memory": {"zero": 3}, "shard_codec": {"weights": "int8", "gradients": "int4"},
    },
}  # fmt: skip
"""The tables that each of them, and each peer, has in place of the task's. AdamW clips no gradient, as 1-bit Adam does
not.
"""
EXACT_PART = 0.2
"""Of the steps, those of 1-bit Adam with gradients as they are: 15 to 20 % in the paper."""


def measure_accuracy(
    place: Place, task: str, chosen: Sequence[str], *, seeds: Sequence[int], steps: int
) -> Result | None:
    """Rows and checks; None on all ranks but rank 0. `steps` 0: those of the task."""
    store = join_store(place)
    with rank_folder() as folder:
        runs: dict[tuple[str, bool], list[float]] = {}
        for name, config in [("none", NoCodec()), *((name, CODECS[name]) for name in chosen)]:
            for feedback in _feedbacks(config):
                codec = config if isinstance(config, NoCodec) else _with_feedback(config, feedback)
                runs[name, feedback] = [
                    _loss(
                        _run_file(task, codec, folder, place, seed=seed, steps=steps),
                        place,
                        PrefixStore(f"{name}-{feedback}-{seed}", store),
                    )
                    for seed in told(seeds, f"{name}{' with feedback' if feedback else ''}", total=len(seeds))
                ]
    return _result(task, runs) if place.rank == 0 else None


def measure_peered(
    place: Place, task: str, chosen: Sequence[str], *, seeds: Sequence[int], steps: int
) -> Result | None:
    """The same of those in `PEERED`, each beside its own peer."""
    store = join_store(place)
    runs: dict[str, list[float]] = {}
    with rank_folder() as folder:
        for name in dict.fromkeys(side for one in chosen for side in (PEERED[one][0], one)):
            runs[name] = []
            for seed in told(seeds, name, total=len(seeds)):
                run_file = _run_file(task, NoCodec(), folder, place, seed=seed, steps=steps, changes=CHANGES[name])
                runs[name].append(_loss(run_file, place, PrefixStore(f"{name}-{seed}", store)))
    if place.rank != 0:
        return None
    rows, checks = [], list[Check]()
    for name in chosen:
        peer, bound = PEERED[name]
        rows += [
            _accuracy_row(task, peer, "", runs[peer], runs[peer]),
            _accuracy_row(task, name, peer, runs[name], runs[peer]),
        ]
        checks.append(check(f"{task}, {name}: loss above {peer}", rows[-1]["loss_above"], bound, at_most=True))
    return {"rows": rows, "checks": checks}


def _accuracy_row(task: str, name: str, peer: str, losses: Sequence[float], plain: Sequence[float]) -> Row:
    mean, half = _above(losses, plain)
    return Row(
        task=task, side=name, peer=peer, loss=round(statistics.fmean(losses), 4), loss_above=round(mean, 4),
        interval=round(half, 4),
    )  # fmt: skip


def _above(losses: Sequence[float], peer: Sequence[float]) -> tuple[float, float]:
    """How much larger than the peer's, and two standard errors of that."""
    above = [loss / plain - 1 for loss, plain in zip(losses, peer, strict=True)]
    mean = statistics.fmean(above)
    half = 2 * statistics.stdev(above) / math.sqrt(len(above)) if len(above) > 1 and math.isfinite(mean) else 0.0
    return mean, half


def _feedbacks(config: CodecConfig) -> tuple[bool, ...]:
    """With and without, where the codec leaves the choice."""
    return (True, False) if "feedback" in config.__struct_fields__ else (False,)


def _with_feedback(config: CodecConfig, feedback: bool) -> CodecConfig:
    if "feedback" not in config.__struct_fields__:
        return config
    return msgspec.structs.replace(config, feedback=feedback)


def _run_file(
    task: str,
    codec: CodecConfig,
    folder: Path,
    place: Place,
    *,
    seed: int,
    steps: int,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> RunFile:
    tables = {**TASKS[task], **(changes or {})}
    own = {"seed": seed, "processes": place.world_size, "directory": str(folder), "device": "cpu"}
    if steps:
        own["steps"] = steps
    checkpoint = {"every_steps": 0}
    whole = {**tables, "run": {**tables["run"], **own}, "checkpoint": checkpoint}
    run_file = run_file_of(whole, file=task)
    if isinstance(run_file.optimizer, OneBitAdam):
        exact = msgspec.structs.replace(run_file.optimizer, exact_steps=max(1, int(EXACT_PART * run_file.run.steps)))
        run_file = msgspec.structs.replace(run_file, optimizer=exact)
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
        mean, half = _above(losses, peer)
        rows.append(
            Row(
                task=task, codec=name, feedback=feedback, loss=round(statistics.fmean(losses), 4),
                loss_above=round(mean, 4), interval=round(half, 4),
            )
        )  # fmt: skip
        if feedback:
            checks.append(check(f"{task}, {name}: loss above uncompressed", mean, LOSS_BOUND, at_most=True))
    return {"rows": rows, "checks": checks}
