"""`python -m benchmarks.recompute_budget`: a step that keeps what saves most, beside whole blocks at equal memory.

Of a GPT's blocks some are computed again as a whole (`memory.recompute = "full"` with `recompute_layers`) and the
others keep everything. `memory.recompute = "budget"` gets the bytes that those others keep, and once more so many that
its step's peak is theirs: where every block repeats something, the last one's backward holds what it repeats beside
what all others keep. Bytes of graphs and of peaks are counted, and steps of all variants are taken in turn by one
thread, which keeps freed memory as a rank does; the time is the thread's own, so that other jobs of the machine count
less. `extra` is what a step takes more than one that computes nothing again.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from torch import Tensor
from torch.nn import functional as F

from benchmarks.command import run
from shoal import units
from shoal.bench.options import AsJson
from shoal.bench.report import Check, Result, Row, check, print_report
from shoal.launcher.allocator import keep_freed_memory, thresholds
from shoal.memory.recompute import recompute
from shoal.memory.simulated_device import SimulatedDevice
from shoal.memory.tracker import measured_activation_bytes
from shoal.models.build import build, initialise
from shoal.models.config import GPTConfig
from shoal.models.gpt import GPT

BOUND = 0.7
WARM_UP = 2


@dataclass(frozen=True)
class Sizes:
    """Of the model, and of a step."""

    config: GPTConfig
    samples: int
    sequence: int

    @property
    def tokens(self) -> Tensor:
        """Of a step, int64."""
        draws = torch.Generator().manual_seed(0)
        return torch.randint(0, self.config.vocabulary, (self.samples, self.sequence), generator=draws)


def recompute_budget(
    width: Annotated[int, typer.Option(help="Of the GPT.", min=64)] = 512,
    layers: Annotated[int, typer.Option(help="Of the GPT.", min=4)] = 8,
    samples: Annotated[int, typer.Option(help="Of a step.", min=1)] = 4,
    sequence: Annotated[int, typer.Option(help="Tokens of a sample.", min=16)] = 256,
    turns: Annotated[int, typer.Option(help="Steps of each variant.", min=3)] = 7,
    again: Annotated[int | None, typer.Option(help="Blocks that are computed again; default: 3/4 and half.")] = None,
    as_json: AsJson = False,
) -> None:
    """Extra time of recomputation by budget, beside that of whole blocks at equal bytes.

    Example: python -m benchmarks.recompute_budget --turns 5
    """
    torch.set_num_threads(1)
    keep_freed_memory(thresholds(None, ranks=1), os.environ)
    config = GPTConfig(vocabulary=512, layers=layers, width=width, heads=max(1, width // 64), feed_forward="swiglu")
    parts = [layers * 3 // 4, layers // 2] if again is None else [again]
    print_report("recompute_budget", measure(Sizes(config, samples, sequence), parts, turns=turns), as_json=as_json)


def measure(sizes: Sizes, parts: list[int], *, turns: int) -> Result:
    """A row for each number of blocks that are computed again, and for all of them."""
    layers = sizes.config.layers
    whole_bytes, none = _model_bytes(sizes, None), _model(sizes, "none")
    least_bytes = _model_bytes(sizes, range(layers))
    each = (whole_bytes - least_bytes) // layers
    models = {"none": none, "none again": _model(sizes, "none"), "full": _model(sizes, "full", range(layers))}
    for again in parts:
        models[f"blocks {again}"] = _model(sizes, "full", range(again))
        models[f"budget {again}"] = _model(sizes, "budget", budget_bytes=(layers - again) * each)
        models[f"budget {again}, peak"] = _at_peak(sizes, models[f"blocks {again}"], (layers - again) * each)
    seconds = _in_turn(models, sizes.tokens, turns)
    extra = {
        name: statistics.median(b - a for a, b in zip(seconds["none"], own, strict=True))
        for name, own in seconds.items()
    }
    rows: list[Row] = []
    for name in models:
        held, peak = _held_bytes(models[name], sizes.tokens), _peak_bytes(models[name], sizes.tokens)
        rows.append(
            {
                "variant": name,
                "graph_bytes": held,
                "graph": units.memory_size(held),
                "of_none": round(held / whole_bytes, 3),
                "peak_bytes": peak,
                "peak": units.memory_size(peak),
                "step_s": round(statistics.median(seconds[name]), 4),
                "extra_s": round(extra[name], 4),
                "of_full": round(extra[name] / extra["full"], 3),
            }
        )
    by_name = {str(row["variant"]): row for row in rows}
    return {"rows": rows, "checks": [one for again in parts for one in _checks(by_name, f"blocks {again}", again)]}


def _checks(rows: dict[str, Row], blocks: str, again: int) -> Iterator[Check]:
    for budget, bytes_ in ((f"budget {again}", "graph_bytes"), (f"budget {again}, peak", "peak_bytes")):
        own, other = rows[budget], rows[blocks]
        yield check(f"extra time, {budget} over {blocks}", _number(own, "extra_s") / _number(other, "extra_s"), BOUND,
                    at_most=True)  # fmt: skip
        yield check(f"{bytes_}, {budget} over {blocks}", _number(own, bytes_) / _number(other, bytes_), 1.01,
                    at_most=True)  # fmt: skip


def _number(row: Row, name: str) -> float:
    return float(row[name] or 0)


def _at_peak(sizes: Sizes, other: GPT, most_bytes: int) -> GPT:
    """By budget, with the largest budget whose peak is not above the other's, to a part in 64."""
    peak, low, high = _peak_bytes(other, sizes.tokens), 0, most_bytes
    while high - low > most_bytes // 64:
        middle = (low + high) // 2
        found = _peak_bytes(_model(sizes, "budget", budget_bytes=middle), sizes.tokens)
        low, high = (middle, high) if found <= peak else (low, middle)
    return _model(sizes, "budget", budget_bytes=low)


def _peak_bytes(model: GPT, tokens: Tensor) -> int:
    """The most that a step holds at a time, with its gradients; the second one, as the first looks at blocks."""
    device = SimulatedDevice(None)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        device.take_peak()
        with device.counting():
            _loss(model, tokens).backward()
    return device.take_peak()


def _model(sizes: Sizes, kind: str, layers: range | None = None, *, budget_bytes: int = 0) -> GPT:
    model = build(sizes.config)
    assert isinstance(model, GPT)
    initialise(model, seed=0, device="cpu")
    recompute(model, kind, layers=layers, budget_bytes=budget_bytes)  # type: ignore[arg-type]
    return model


def _model_bytes(sizes: Sizes, layers: range | None) -> int:
    return _held_bytes(_model(sizes, "none" if layers is None else "full", layers), sizes.tokens)


def _held_bytes(model: GPT, tokens: Tensor) -> int:
    return measured_activation_bytes(lambda: _loss(model, tokens))


def _loss(model: GPT, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def _in_turn(models: dict[str, GPT], tokens: Tensor, turns: int) -> dict[str, list[float]]:
    """Seconds of this thread for a step of each, in another order every time."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    shuffle = random.Random(0)
    for _ in range(WARM_UP + turns):
        order = list(models)
        shuffle.shuffle(order)
        for name in order:
            models[name].zero_grad(set_to_none=True)
            begin_s = time.thread_time()
            _loss(models[name], tokens).backward()
            seconds[name].append(time.thread_time() - begin_s)
    return {name: own[WARM_UP:] for name, own in seconds.items()}


if __name__ == "__main__":
    run(recompute_budget)
