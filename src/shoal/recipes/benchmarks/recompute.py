"""Recomputation on one process: bytes kept beside their closed form, and step time beside a step that keeps all.

Bytes are those of all blocks but one, as the difference to a model of one block, so that embedding and head drop out.
Steps are taken in turn, in a random order, and compared by the clock; the processor's time stands beside.
"""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from shoal.memory.closed_form import Activations, block_saved_bytes
from shoal.memory.recompute import RecomputeKind, recompute
from shoal.memory.tracker import measured_activation_bytes
from shoal.models.build import build
from shoal.models.config import GPTConfig
from shoal.models.gpt import GPT
from shoal.models.initialise import initialise
from shoal.recipes.benchmarks.ddp_script import Script
from shoal.recipes.benchmarks.gpt_job import MODEL, SEQUENCE
from shoal.recipes.benchmarks.paired import check, spread

SAMPLES = 2
"""256 tokens of the model of `bench step`, the smaller of its two sizes."""
WARM_UP_STEPS = 2
OFF_THE_FORM, TIMES_NONE = 0.15, 1.40
Seconds = tuple[float, float]
"""Of the processor, and by the clock on the wall."""
KINDS: tuple[RecomputeKind, ...] = ("none", "selective", "full")


def compared(corpus: Path, *, pairs: int) -> dict[str, Any]:
    """A row for each kind, and its checks."""
    turns, rows, checks = _turns(corpus, pairs), [], []
    for kind in KINDS:
        kept_bytes, form_bytes = _kept_bytes(MODEL, kind) - _kept_bytes(_of_layers(1), kind), _form_bytes(kind)
        busier = statistics.median(turn[kind][0] / turn["none"][0] for turn in turns)
        times = [turn[kind][1] / turn["none"][1] for turn in turns]
        rows.append(
            {
                "recompute": kind,
                "blocks": MODEL.layers - 1,
                "kept_bytes": kept_bytes,
                "form_bytes": form_bytes,
                "over_the_form": round(kept_bytes / form_bytes, 4),
                "step_ms": round(1e3 * statistics.median(turn[kind][1] for turn in turns), 1),
                "times_none": round(statistics.median(times), 4),
                "times_none_spread": [round(value, 4) for value in spread(times)],
                "times_none_of_the_processor": round(busier, 4),
                "pairs": len(turns),
            }
        )
        off = abs(kept_bytes / form_bytes - 1)
        checks.append(check(f"recompute = {kind}: bytes off their closed form", off, OFF_THE_FORM, at_most=True))
        if kind == "full":
            checks.append(
                check(
                    "recompute = full: step time over none, median", statistics.median(times), TIMES_NONE, at_most=True
                )
            )
    return {"rows": rows, "checks": checks}


def _turns(corpus: Path, pairs: int) -> list[dict[RecomputeKind, Seconds]]:
    """A step of each kind, by turn."""
    sizes: dict[str, int] = {"samples": SAMPLES, "sequence": SEQUENCE, "rank": 0}
    scripts = {kind: Script(_model(MODEL, kind), corpus, distributed=False, **sizes) for kind in KINDS}
    shuffle, turns = random.Random(0), []
    for _ in range(WARM_UP_STEPS + pairs):
        order = list(KINDS)
        shuffle.shuffle(order)
        turns.append({kind: _seconds(scripts[kind]) for kind in order})
    return turns[WARM_UP_STEPS:]


def _seconds(script: Script) -> Seconds:
    begin_s, thread_begin_s = time.perf_counter(), time.thread_time()
    script.step()
    return time.thread_time() - thread_begin_s, time.perf_counter() - begin_s


def _kept_bytes(config: GPTConfig, kind: RecomputeKind) -> int:
    model, tokens = _model(config, kind), torch.zeros(SAMPLES, SEQUENCE, dtype=torch.int64)
    return measured_activation_bytes(model, lambda: model(tokens).logsumexp(-1).sum())


def _form_bytes(kind: RecomputeKind) -> int:
    sizes = Activations(tokens=SAMPLES * SEQUENCE, element_bytes=torch.float32.itemsize)
    return (MODEL.layers - 1) * block_saved_bytes(MODEL, sizes, kind=kind)


def _of_layers(layers: int) -> GPTConfig:
    return msgspec.structs.replace(MODEL, layers=layers)


def _model(config: GPTConfig, kind: RecomputeKind) -> GPT:
    model = build(config)
    initialise(model, seed=0, device="cpu")
    recompute(model, kind)
    assert isinstance(model, GPT)
    return model
