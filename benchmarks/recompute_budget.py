"""`python -m benchmarks.recompute_budget`: a step that keeps what saves most, beside whole blocks at equal bytes.

Of a GPT's blocks some are computed again as a whole (`memory.recompute = "full"` with `recompute_layers`) and the
others keep everything. `memory.recompute = "budget"` gets the bytes that those others keep. Both graphs' bytes are
counted, and steps of all variants are taken in turn by one thread; the time is the thread's own, so that other jobs of
the machine count less. `extra` is what a step takes more than one that computes nothing again.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from torch import Tensor
from torch.nn import functional as F

from benchmarks.command import run
from shoal import units
from shoal.bench.options import AsJson
from shoal.bench.report import Result, Row, check, print_report
from shoal.memory.recompute import recompute
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
    seconds = _in_turn(models, sizes.tokens, turns)
    extra = {
        name: statistics.median(b - a for a, b in zip(seconds["none"], own, strict=True))
        for name, own in seconds.items()
    }
    rows: list[Row] = []
    for name in models:
        held = _held_bytes(models[name], sizes.tokens)
        rows.append(
            {
                "variant": name,
                "graph_bytes": held,
                "graph": units.memory_size(held),
                "of_none": round(held / whole_bytes, 3),
                "step_s": round(statistics.median(seconds[name]), 4),
                "extra_s": round(extra[name], 4),
                "of_full": round(extra[name] / extra["full"], 3),
            }
        )
    checks = [
        check(f"extra time by budget over whole blocks, {again} of {layers} again, equal bytes",
              extra[f"budget {again}"] / extra[f"blocks {again}"], BOUND, at_most=True)
        for again in parts
    ]  # fmt: skip
    held = {str(row["variant"]): int(row["graph_bytes"]) for row in rows}
    checks += [
        check(f"bytes by budget over whole blocks, {again} of {layers} again",
              held[f"budget {again}"] / held[f"blocks {again}"], 1.01, at_most=True)
        for again in parts
    ]  # fmt: skip
    return {"rows": rows, "checks": checks}


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
