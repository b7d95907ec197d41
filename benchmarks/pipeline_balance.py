"""How evenly the automatic cut divides a model of uneven layers into stages.

The parts are timed and cut by what they cost; then each stage is timed as a whole. The clock is the processor's time of
the thread, which other processes do not lengthen.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.bench.ddp_script import new_gpt
from shoal.bench.report import Result, check
from shoal.models.build import initialise
from shoal.models.config import GPTConfig
from shoal.models.gpt import GPT
from shoal.models.layers import GELU
from shoal.models.roles import DeclaresParts, Part
from shoal.parallel.pipeline.stages import Cut, balanced_cut, estimated_costs, measured_costs

MODEL = GPTConfig(vocabulary=4096, layers=24, width=128, heads=4, feed_forward="gelu")
NARROWEST, WIDEST = 128, 2048
SAMPLES, SEQUENCE = 2, 128
REPEATS = 15
MOST_OVER_MEAN = 1.1


def balance_result(*, stages: int) -> Result:
    """A row for each way of cutting, and a check of the cut by measured costs."""
    model, tokens = _uneven_gpt(), torch.zeros(SAMPLES, SEQUENCE, dtype=torch.int64)
    parts = model.parts()
    cuts = {
        "by measured costs": balanced_cut(_seconds(model, tokens), stages),
        "by estimated costs": balanced_cut(estimated_costs(model, parts), stages),
        "by number of layers": balanced_cut([1.0] * len(parts), stages),
    }
    rows = [_row(name, cut, _seconds(_Stages(model, cut), tokens)) for name, cut in cuts.items()]
    most = rows[0]["most_over_mean"]
    name = "slowest stage over the mean, cut by measured costs"
    return {"rows": rows, "checks": [check(name, most, MOST_OVER_MEAN, at_most=True)]}


def _seconds(model: DeclaresParts, tokens: Tensor) -> list[float]:
    return measured_costs(model, tokens, repeats=REPEATS, clock=time.thread_time)


@dataclass(frozen=True)
class _Stages:
    """The chain of `model`, in which each stage is one part."""

    model: GPT
    cut: Cut

    def context(self, *inputs: Any, **named: Any) -> Any:
        return self.model.context(*inputs, **named)

    def parts(self) -> Sequence[Part]:
        parts = self.model.parts()
        return [Part(f"stage {n}", (), partial(_run_parts, [parts[i] for i in own])) for n, own in enumerate(self.cut)]


def _run_parts(parts: Sequence[Part], x: Tensor | None, context: Any) -> Tensor:
    for part in parts:
        x = part.run(x, context)
    assert x is not None
    return x


def _uneven_gpt() -> GPT:
    """A GPT whose feed-forwards differ in width."""
    model, draw = new_gpt(MODEL), random.Random(0)
    for block in model.blocks:
        block.feed_forward = GELU(MODEL.width, draw.randrange(NARROWEST, WIDEST, 32))
    initialise(model, seed=0, device="cpu")
    return model


def _row(name: str, cut: Cut, seconds: Sequence[float]) -> dict[str, Any]:
    return {
        "cut": name,
        "parts": [len(own) for own in cut],
        "stage_ms": [round(1e3 * value, 2) for value in seconds],
        "most_over_mean": round(max(seconds) * len(seconds) / sum(seconds), 4),
    }
