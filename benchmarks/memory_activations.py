"""Activations that a rank keeps for the backward: of a long sequence over context ranks, and under recomputation.

Context parallelism: the storages that autograd saves count once each, at the end of the forward, when there are most.
Each of n ranks keeps 1/n of them; Ulysses also keeps its result on both sides of the all-to-all.

Recomputation, on one process: bytes kept beside their closed form, and step times beside a step that keeps everything.
The bytes are those of all blocks but one, as the difference to a model of one block, so that embedding and head cancel.
Steps are taken in turn, in a random order, and compared by wall clock; the processor's time is in the row as well.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.bench.ddp_script import Script, new_gpt
from shoal.bench.report import Result, check, spread
from shoal.bench.training_job import MODEL, SEQUENCE
from shoal.comm.mesh import Mesh
from shoal.engine.tolerances import SINGLE
from shoal.memory.closed_form import Activations, block_saved_bytes
from shoal.memory.recompute import RecomputeKind, recompute
from shoal.memory.tracker import SavedActivations, measured_activation_bytes
from shoal.models.config import GPTConfig
from shoal.models.gpt import GPT
from shoal.parallel.context.core import positions
from shoal.parallel.context.kinds import KINDS, put_context

LONG_MODEL = GPTConfig(layers=2, width=32, heads=4)
ABOVE_THE_SHARE = 1.1
"""Promised of a rank's bytes over the n-th part of one process's."""
LongForward = tuple[float, float, float]
"""Loss of the sequence, most bytes that a rank kept, seconds of the forward."""

SAMPLES = 2
"""256 tokens of the model of `shoal bench step`."""
WARM_UP_STEPS = 2
OFF_THE_FORM, TIMES_NONE = 0.15, 1.40
RECOMPUTE_KINDS: tuple[RecomputeKind, ...] = ("none", "selective", "operators", "full")
Seconds = tuple[float, float]
"""Of the processor, and on the wall clock."""


def by_context_kind(mesh: Mesh, *, tokens: int) -> dict[str, LongForward]:
    """A forward of `tokens` with each kind of context parallelism over all ranks; the same on each."""
    here, found = positions(tokens, size=mesh.world.size, rank=mesh.rank), {}
    for kind in sorted(KINDS):
        model = new_gpt(LONG_MODEL)
        put_context(model, mesh.axis("context"), kind)
        loss, kept_bytes, seconds = _forward(model, _sequence(tokens), here)
        total, most = torch.tensor(loss, dtype=torch.float64), torch.tensor([kept_bytes, seconds], dtype=torch.float64)
        mesh.world.all_reduce(total).wait()
        mesh.world.all_reduce(most, "max").wait()
        found[kind] = (float(total), float(most[0]), float(most[1]))
    return found


def one_process(*, tokens: int) -> LongForward:
    """A forward of the whole sequence in this process."""
    return _forward(new_gpt(LONG_MODEL), _sequence(tokens), torch.arange(tokens))


def context_result(kinds: Mapping[str, LongForward], whole: LongForward, *, tokens: int, ranks: int) -> Result:
    """A row for one process and each kind, and the checks of the kinds."""
    rows, checks = [], []
    for kind, (loss, kept_bytes, seconds) in {"one process": whole, **kinds}.items():
        share, error = kept_bytes / whole[1], abs(loss / whole[0] - 1)
        rows.append(
            {
                "context": kind,
                "ranks": ranks if kind in kinds else 1,
                "tokens": tokens,
                "activation_bytes": int(kept_bytes),
                "share": round(share, 4),
                "loss": loss / tokens,
                "loss_relative_error": error,
                "forward_s": round(seconds, 2),
            }
        )
        if kind in kinds:
            name = f"context = {ranks}, {kind}, {tokens} tokens"
            checks.append(
                check(f"{name}: activations of a rank over its share", share * ranks, ABOVE_THE_SHARE, at_most=True)
            )
            checks.append(check(f"{name}: loss against one process", error, SINGLE.loss, at_most=True))
    return {"rows": rows, "checks": checks}


def recompute_result(corpus: Path, *, pairs: int) -> Result:
    """A row and checks for each kind of recomputation, from `pairs` steps of each."""
    turns, rows, checks = _recompute_turns(corpus, pairs), [], []
    for kind in RECOMPUTE_KINDS:
        one_block = msgspec.structs.replace(MODEL, layers=1)
        kept_bytes, form_bytes = _kept_bytes(MODEL, kind) - _kept_bytes(one_block, kind), _form_bytes(kind)
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
            name = "recompute = full: step time over none, median"
            checks.append(check(name, statistics.median(times), TIMES_NONE, at_most=True))
    return {"rows": rows, "checks": checks}


def _forward(model: nn.Module, sequence: Tensor, places: Tensor) -> LongForward:
    """The summed loss of the tokens at `places`, and the bytes that its graph saves."""
    begin_s = time.perf_counter()
    with SavedActivations(apart=model.parameters()) as saved:
        logits = model(sequence[:, places], places[None])
        loss = F.cross_entropy(logits.flatten(0, 1), sequence[:, places + 1].flatten(), reduction="sum")
    return float(loss.detach()), saved.peak_bytes, time.perf_counter() - begin_s


def _sequence(tokens: int) -> Tensor:
    """`[1, tokens + 1]`, int64, the same everywhere."""
    return torch.randint(0, LONG_MODEL.vocabulary, (1, tokens + 1), generator=torch.Generator().manual_seed(0))


def _recompute_turns(corpus: Path, pairs: int) -> list[dict[RecomputeKind, Seconds]]:
    """The seconds of a step of each kind, turn by turn."""
    sizes: dict[str, Any] = {"samples": SAMPLES, "sequence": SEQUENCE, "rank": 0, "distributed": False}
    scripts = {kind: Script(_recomputed(MODEL, kind), corpus, **sizes) for kind in RECOMPUTE_KINDS}
    shuffle, turns = random.Random(0), []
    for _ in range(WARM_UP_STEPS + pairs):
        order = list(RECOMPUTE_KINDS)
        shuffle.shuffle(order)
        turns.append({kind: _step_seconds(scripts[kind]) for kind in order})
    return turns[WARM_UP_STEPS:]


def _step_seconds(script: Script) -> Seconds:
    begin_s, thread_begin_s = time.perf_counter(), time.thread_time()
    script.step()
    return time.thread_time() - thread_begin_s, time.perf_counter() - begin_s


def _kept_bytes(config: GPTConfig, kind: RecomputeKind) -> int:
    model, tokens = _recomputed(config, kind), torch.zeros(SAMPLES, SEQUENCE, dtype=torch.int64)
    return measured_activation_bytes(lambda: model(tokens).logsumexp(-1).sum())


def _form_bytes(kind: RecomputeKind) -> int:
    sizes = Activations(tokens=SAMPLES * SEQUENCE, element_bytes=torch.float32.itemsize)
    return (MODEL.layers - 1) * block_saved_bytes(MODEL, sizes, kind=kind)


def _recomputed(config: GPTConfig, kind: RecomputeKind) -> GPT:
    model = new_gpt(config)
    recompute(model, kind)
    return model
