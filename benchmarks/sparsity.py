"""`python -m benchmarks.sparsity`: what training less costs in accuracy, and saves in time, bytes and memory.

steps       a step of a GPT with its first half frozen, and one with LoRA, beside one that trains all, in turn
attention   attention of 4,096 tokens under a window of 128, and BigBird's, beside causal attention, in turn
digits      recipes/digits.toml at a tenth of its weights, by every kind, from several seeds; and a lottery ticket
gpt         a GPT on the standard library's source at a tenth of its weights, and under a window
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import typer

from benchmarks.command import run
from shoal.bench.options import AsJson
from shoal.bench.report import Result, Row, check, merged, print_report
from shoal.bench.training_job import MODEL, Training, corpus_file, gpt_run_file, start_alone
from shoal.errors import EnvironmentFault
from shoal.memory.tracker import measured_activation_bytes, model_state
from shoal.models.config import BigBird, LoRA, SlidingWindow
from shoal.models.gpt import SparseAttention
from shoal.models.layers import CausalAttention
from shoal.observe.events import read_events, series
from shoal.sparsity.config import FreezeConfig

RECIPES = Path("recipes")
MOST_FROZEN_STEP, MOST_LORA_STEP, MOST_LORA_STATE = 0.7, 0.75, 0.02
LEAST_ATTENTION_GAIN = 2.0
MOST_LOST_ACCURACY = 0.01
MOST_WINDOW_LOSS = 1.02
REWIND = 20
"""The step whose weights a lottery ticket begins with."""
PRUNE = {"begin": 40, "end": 250, "every": 20}
GROW = {"end": 300, "every": 20}
TENTH: dict[str, dict[str, Any]] = {
    "dense": {},
    "magnitude": {"kind": "magnitude", "distribution": "erk", "schedule": PRUNE},
    "movement": {"kind": "movement", "distribution": "erk", "schedule": PRUNE},
    "random": {"kind": "random", "distribution": "erk", "schedule": {"shape": "one_shot"}},
    "snip": {"kind": "snip", "distribution": "global", "schedule": {"shape": "one_shot"}},
    "set": {"kind": "set", "distribution": "erk", "schedule": GROW},
    "rigl": {"kind": "rigl", "distribution": "erk", "schedule": GROW},
    "top_kast": {"kind": "top_kast", "distribution": "erk", "schedule": GROW},
    "rows, half": {"kind": "magnitude", "density": 0.5, "pattern": "rows", "schedule": PRUNE},
    "2:4": {"kind": "magnitude", "pattern": "2:4", "schedule": PRUNE, "layers": ["layers.[1-9].conv.weight"]},
}
OTHER_WEIGHTS = "its mask, other weights"
PARTS = ("steps", "attention", "digits", "gpt")


def sparsity(
    parts: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(PARTS)}; default: all.")] = None,
    seeds: Annotated[int, typer.Option(help="Seeds of the accuracy tables.", min=1)] = 3,
    turns: Annotated[int, typer.Option(help="Turns of what is timed.", min=3)] = 15,
    steps: Annotated[int, typer.Option(help="Steps of the GPT.", min=50)] = 300,
    as_json: AsJson = False,
) -> None:
    """What masks, frozen layers, adapters and sparse attention cost and save.

    Example: python -m benchmarks.sparsity --parts steps --parts attention
    """
    torch.set_num_threads(1)
    measures: Mapping[str, Callable[[], Result]] = {
        "steps": lambda: compare_steps(turns),
        "attention": lambda: compare_attention(turns),
        "digits": lambda: compare_digits(seeds),
        "gpt": lambda: compare_gpt(steps),
    }
    print_report("sparsity", merged(measures[part]() for part in parts or PARTS), as_json=as_json)


def compare_steps(turns: int) -> Result:
    """A row for each way of training a GPT of five million parameters on one thread."""
    half = ("embedding", *(f"blocks.{index}" for index in range(MODEL.layers // 2)))
    ways: dict[str, dict[str, Any]] = {
        "all": {},
        "all again": {},
        "first half frozen": {"freeze": FreezeConfig(layers=half)},
        "LoRA": {"adapter": LoRA(rank=8, layers=("*.query", "*.value"))},
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        base = gpt_run_file(folder, corpus_file(folder), 1024)
        started = {name: start_alone(msgspec.structs.replace(base, **keys), stack) for name, keys in ways.items()}
        times = interleaved({name: training.take_step for name, training in started.items()}, turns)
        rows = [_row_of(name, started[name], times) for name in ways]
    found = {row["trained"]: row for row in rows}
    return {
        "rows": rows,
        "checks": [
            check("step, first half frozen", found["first half frozen"]["times_all"], MOST_FROZEN_STEP, at_most=True),
            check("step, LoRA", found["LoRA"]["times_all"], MOST_LORA_STEP, at_most=True),
            check(
                "optimizer bytes, LoRA",
                found["LoRA"]["optimizer_MB"] / found["all"]["optimizer_MB"],
                MOST_LORA_STATE,
                at_most=True,
            ),
        ],
    }


def _row_of(name: str, training: Training, times: Mapping[str, Sequence[float]]) -> Row:
    model, optimizer = training.run.model, training.run.state.optimizer.optimizer
    held = model_state(model, [optimizer])
    tokens = torch.zeros(1, 128, dtype=torch.int64)
    return {
        "trained": name,
        "step_ms": round(1e3 * statistics.median(times[name]), 1),
        "times_all": round(statistics.median(a / b for a, b in zip(times[name], times["all"], strict=True)), 3),
        "optimizer_MB": round(held.optimizer_bytes / 1e6, 3),
        "gradient_MB": round(held.gradients_bytes / 1e6, 3),
        "activations_MB_a_sample": round(measured_activation_bytes(lambda: model(tokens)) / 1e6, 3),
    }


def interleaved(sides: Mapping[str, Callable[[], Any]], turns: int) -> dict[str, list[float]]:
    """Seconds that each side takes of the processor, all in every turn; the first two turns do not count."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(turns + 2):
        for name, call in sides.items():
            begin_s = time.process_time()
            call()
            if turn > 1:
                found[name].append(time.process_time() - begin_s)
    return found


def compare_attention(turns: int) -> Result:
    """Forward and backward of one attention, 4 heads of 32 features, one thread."""
    cores = {
        "causal": CausalAttention(),
        "causal again": CausalAttention(),
        "window 128": SparseAttention(SlidingWindow(window=128)),
        "bigbird": SparseAttention(BigBird()),
    }
    rows: list[Row] = []
    for length in (1024, 4096):
        inputs = [torch.randn(1, 4, length, 32, requires_grad=True) for _ in range(3)]
        sides = {name: lambda core=core, inputs=inputs: core(*inputs).sum().backward() for name, core in cores.items()}
        times = interleaved(sides, turns)
        for name in cores:
            gain = statistics.median(a / b for a, b in zip(times["causal"], times[name], strict=True))
            ms = round(1e3 * statistics.median(times[name]), 2)
            rows.append({"attention": name, "tokens": length, "ms": ms, "times_faster": round(gain, 2)})
    gain = next(r["times_faster"] for r in rows if r["attention"] == "window 128" and r["tokens"] == 4096)
    return {"rows": rows, "checks": [check("window 128 of 4,096 tokens, faster", gain, LEAST_ATTENTION_GAIN)]}


def compare_digits(seeds: int) -> Result:
    """Held-out accuracy of each kind at a tenth of the weights; of a lottery ticket, and of its mask on new weights."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name:
        for seed in range(seeds):
            dense = Path(name) / f"dense-{seed}"
            for kind, table in TENTH.items():
                keys = {"run.seed": seed, **_table(table)}
                folder = dense if kind == "dense" else Path(name) / "other"
                extra = {"checkpoint.every_steps": REWIND, "checkpoint.keep": 1000} if kind == "dense" else {}
                found.setdefault(kind, []).append(_accuracy("digits", folder, keys | extra))
            ticket = {"run.seed": seed, **_table({"kind": "lottery", "distribution": "global", "ticket": str(dense)})}
            early = {"run.warm_start": str(dense / "checkpoints" / f"step-{REWIND:08}")}
            found.setdefault("lottery ticket", []).append(_accuracy("digits", Path(name) / "other", ticket | early))
            other = {"run.seed": seed + 1000}
            found.setdefault(OTHER_WEIGHTS, []).append(_accuracy("digits", Path(name) / "other", ticket | other))
    rows = [
        {
            "digits": kind,
            "accuracy_percent": round(100 * statistics.fmean(values), 2),
            "least": round(100 * min(values), 2),
            "most": round(100 * max(values), 2),
        }
        for kind, values in found.items()
    ]
    mean = {kind: statistics.fmean(values) for kind, values in found.items()}
    return {
        "rows": rows,
        "checks": [
            check("RigL's accuracy below dense", mean["dense"] - mean["rigl"], MOST_LOST_ACCURACY, at_most=True),
            check("a ticket's accuracy above its mask's", mean["lottery ticket"] - mean[OTHER_WEIGHTS], 0.0),
        ],
    }


def compare_gpt(steps: int) -> Result:
    """Held-out loss of a byte-level GPT, and of one that reads 1,024 bytes."""
    schedules = {"begin": steps // 10, "end": steps * 3 // 5, "every": max(1, steps // 20)}
    kinds = {
        "dense": {},
        "magnitude": TENTH["magnitude"] | {"schedule": schedules},
        "rigl": TENTH["rigl"] | {"schedule": {"end": steps * 3 // 4, "every": max(1, steps // 20)}},
        "features, half": {"kind": "magnitude", "density": 0.5, "pattern": "features", "schedule": schedules},
    }
    long = {"batch.sequence": 1024, "batch.global_samples": 2}
    runs: dict[str, dict[str, Any]] = {kind: _table(table) for kind, table in kinds.items()}
    runs["weights of 4 bits"] = {"quantisation.bits": 4, "quantisation.group": 32}
    runs["1,024 bytes"] = long
    window = {"model.attention.kind": "window", "model.attention.window": 128}
    runs["1,024 bytes, window 128"] = long | window
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name:
        for kind, keys in runs.items():
            keys = {"run.steps": steps, "observe.evaluate_samples": 64, "observe.sample_bytes": 0, **keys}
            trained = _trained("stdlib-gpt", Path(name) / "gpt", keys)
            rows.append({"gpt": kind, "loss_eval": round(trained("loss/eval")[-1], 4)})
    losses = {row["gpt"]: row["loss_eval"] for row in rows}
    share = losses["1,024 bytes, window 128"] / losses["1,024 bytes"]
    return {"rows": rows, "checks": [check("loss, window 128 of 1,024", share, MOST_WINDOW_LOSS, at_most=True)]}


def _table(table: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `[sparsity]`, at a tenth of the weights where the table says nothing else."""
    if not table:
        return {}
    density = {} if "density" in table or ":" in table.get("pattern", "") else {"density": 0.1}
    found = {f"sparsity.{key}": value for key, value in {**table, **density}.items() if key != "schedule"}
    return found | {f"sparsity.schedule.{key}": value for key, value in table.get("schedule", {}).items()}


def _accuracy(recipe: str, folder: Path, keys: Mapping[str, Any]) -> float:
    return _trained(recipe, folder, keys)("accuracy/eval")[-1]


def _trained(recipe: str, folder: Path, keys: Mapping[str, Any]) -> Callable[[str], list[float]]:
    """Trains a recipe on one rank; what it measured, by name. Raises `EnvironmentFault` where it fails."""
    given = {"run.processes": 1, "run.directory": str(folder), "observe.report": False, **keys}
    written = [f"{key}={json.dumps(value)}" for key, value in given.items()]
    print(f"{recipe}: {' '.join(written[3:])}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "shoal", "train", str(RECIPES / f"{recipe}.toml"), *written]
    shutil.rmtree(folder, ignore_errors=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EnvironmentFault(f"{' '.join(command)} failed: {done.stderr[-500:]}")
    events = read_events(folder)
    return lambda name: list(series(events, name)[1])


if __name__ == "__main__":
    run(sparsity)
