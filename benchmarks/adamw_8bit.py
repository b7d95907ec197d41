"""`python -m benchmarks.adamw_8bit`: AdamW with moments in 8 bits beside PyTorch's fused AdamW.

A step of one optimizer over the same parameters and gradients, on one thread, in turn: the fused kernel, the same once
more (A/A), the loop in C, and now and then torch's form of it. Bytes are those of the state that each holds, measured.
With `--seeds`, a recipe is trained with both from each seed, and the mean losses of its last steps are compared.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from torch.nn import Parameter

from benchmarks.command import run
from shoal.bench.options import AsJson
from shoal.bench.report import Result, Row, check, print_report
from shoal.errors import EnvironmentFault
from shoal.memory.tracker import model_state
from shoal.observe.events import read_events, series
from shoal.optim import adamw_8bit as module
from shoal.optim.build import build_optimizer
from shoal.optim.config import AdamW, AdamW8bit

ROWS = 1024
"""Of each matrix."""
LEAST_GAIN = 2.0
"""Of the loop in C over torch's form."""
MOST_BYTES = 0.26
"""Of AdamW's state."""
LOSS_BOUND = 0.02
"""The most that the mean loss of all seeds is off, relative."""
LAST_STEPS = 20


def adamw_8bit(
    parameters: Annotated[int, typer.Option(help="Numbers in all matrices together.", min=1 << 20)] = 25_000_000,
    turns: Annotated[int, typer.Option(help="Steps of each kernel.", min=3)] = 20,
    seeds: Annotated[int, typer.Option(help="Seeds from which the recipe is trained.", min=0)] = 0,
    recipe: Annotated[Path, typer.Option(help="The recipe.")] = Path("recipes/stdlib-gpt.toml"),
    steps: Annotated[int, typer.Option(help="Its steps.", min=LAST_STEPS)] = 300,
    as_json: AsJson = False,
) -> None:
    """A step of AdamW with moments in 8 bits beside the fused AdamW's: time, bytes, and losses of a recipe.

    Example: python -m benchmarks.adamw_8bit --turns 5
    """
    torch.set_num_threads(1)
    result = measure(parameters, turns=turns)
    if seeds:
        losses = compare_losses(recipe, seeds=seeds, steps=steps)
        result = {key: [*result[key], *losses[key]] for key in result}
    print_report("adamw_8bit", result, as_json=as_json)


def measure(parameters: int, *, turns: int) -> Result:
    """A row for each kernel: its median step, that beside the fused kernel's, and bytes of state for a parameter."""
    generator = torch.Generator().manual_seed(0)
    held = [torch.randn(ROWS, ROWS, generator=generator) for _ in range(max(1, parameters // ROWS**2))]
    gradients = [torch.randn(each.shape, generator=generator) * 1e-3 for each in held]
    kinds = {"fused AdamW": AdamW(), "fused AdamW again": AdamW(), "8 bits, in C": AdamW8bit()}
    steps, bytes_held = {}, {}
    for name, config in {**kinds, "8 bits, in torch": AdamW8bit()}.items():
        own = [Parameter(each.clone()) for each in held]
        for parameter, gradient in zip(own, gradients, strict=True):
            parameter.grad = gradient
        optimizer = build_optimizer(config, [(str(i), p, True) for i, p in enumerate(own)], lr=1e-3)
        optimizer.step()
        state = model_state(torch.nn.Module(), [optimizer], gradients=[])
        bytes_held[name] = state.optimizer_bytes / sum(parameter.numel() for parameter in own)
        steps[name] = optimizer.step
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns):
        for name in kinds:
            seconds[name].append(_spent(steps[name]))
        if turn < 2:
            with patch.object(module, "kernels_for", lambda *tensors: None):
                seconds["8 bits, in torch"].append(_spent(steps["8 bits, in torch"]))
    median = {name: statistics.median(found) for name, found in seconds.items()}
    rows = [
        {
            "kernel": name,
            "step_ms": round(1e3 * median[name], 2),
            "times_fused": round(median[name] / median["fused AdamW"], 2),
            "ns_per_parameter": round(1e9 * median[name] / (len(held) * ROWS**2), 3),
            "state_bytes_per_parameter": round(bytes_held[name], 3),
        }
        for name in steps
    ]
    gain = median["8 bits, in torch"] / median["8 bits, in C"]
    share = bytes_held["8 bits, in C"] / bytes_held["fused AdamW"]
    return {
        "rows": rows,
        "checks": [
            check("the loop in C against torch's form", gain, LEAST_GAIN),
            check("bytes of state against AdamW's", share, MOST_BYTES, at_most=True),
        ],
    }


def compare_losses(recipe: Path, *, seeds: int, steps: int) -> Result:
    """A row for each seed, and a check of the means. Raises `EnvironmentFault` where a run fails."""
    rows: list[Row] = []
    all_found: dict[str, list[float]] = {"adamw": [], "adamw_8bit": []}
    for seed in range(seeds):
        found = {}
        for kind, losses in all_found.items():
            print(f"{recipe.stem}, seed {seed}: {kind}", file=sys.stderr, flush=True)
            found[kind] = _loss(recipe, kind, seed=seed, steps=steps)
            losses.append(found[kind])
        rows.append(
            {
                "recipe": recipe.stem,
                "seed": seed,
                **{f"loss_{kind}": float(f"{loss:.4g}") for kind, loss in found.items()},
                "difference_percent": round(100 * (found["adamw_8bit"] / found["adamw"] - 1), 2),
            }
        )
    off = abs(statistics.fmean(all_found["adamw_8bit"]) / statistics.fmean(all_found["adamw"]) - 1)
    return {"rows": rows, "checks": [check("mean loss against AdamW's, relative", off, LOSS_BOUND, at_most=True)]}


def _loss(recipe: Path, kind: str, *, seed: int, steps: int) -> float:
    """The mean training loss of the last steps."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        keys: dict[str, Any] = {
            "run.processes": 1, "run.seed": seed, "run.steps": steps, "run.directory": folder + "/run",
            "optimizer.kind": kind, "observe.report": False,
        }  # fmt: skip
        written = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
        command = [sys.executable, "-m", "shoal", "train", str(recipe), *written]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise EnvironmentFault(f"{' '.join(command)} failed: {done.stderr[-500:]}")
        return statistics.fmean(series(read_events(Path(folder) / "run"), "loss/train")[1][-LAST_STEPS:])


def _spent(call: Callable[[], Any]) -> float:
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


if __name__ == "__main__":
    run(adamw_8bit)
