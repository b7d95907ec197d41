"""`python -m benchmarks.sparsity`: what training less costs in accuracy, and saves in time, bytes and memory.

steps       a step of a GPT with its first half frozen, and one with LoRA, beside one that trains all, in turn
attention   attention of 4,096 tokens under a window of 128, and BigBird's, beside causal attention, in turn
digits      recipes/digits.toml at a tenth of its weights, by every kind, from several seeds; and a lottery ticket
gpt         a GPT on the standard library's source at a tenth of its weights, and under a window
freezing    both, with blocks that are frozen when they have settled, by the defaults of every criterion
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import typer

from benchmarks.command import run
from shoal.bench.options import AsJson
from shoal.bench.report import Result, Row, check, merged, print_report
from shoal.bench.training_job import MODEL, Training, corpus_file, gpt_run_file, start_alone
from shoal.data.config import Tokens
from shoal.errors import EnvironmentFault
from shoal.memory.tracker import measured_activation_bytes, model_state
from shoal.models.attention_config import BigBird, SlidingWindow
from shoal.models.config import LoRA
from shoal.models.layers import CausalAttention
from shoal.models.sparse_attention import SparseAttention
from shoal.observe.events import read_events, series
from shoal.sparsity.config import FreezeConfig, Magnitude, MaskSchedule

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
    "magnitude": {"kind": "magnitude", "distribution": "erk", "schedule": PRUNE},
    "movement": {"kind": "movement", "distribution": "erk", "schedule": PRUNE},
    "random": {"kind": "random", "distribution": "erk", "schedule": {"shape": "one_shot"}},
    "grasp": {"kind": "grasp", "distribution": "global", "schedule": {"shape": "one_shot"}},
    "l0": {"kind": "l0", "schedule": {"begin": 20, "end": 250}},
    "snip": {"kind": "snip", "distribution": "global", "schedule": {"shape": "one_shot"}},
    "set": {"kind": "set", "distribution": "erk", "schedule": GROW},
    "rigl": {"kind": "rigl", "distribution": "erk", "schedule": GROW},
    "top_kast": {"kind": "top_kast", "distribution": "erk", "schedule": GROW},
    "rows, half": {"kind": "magnitude", "density": 0.5, "pattern": "rows", "schedule": PRUNE},
    "2:4": {"kind": "magnitude", "pattern": "2:4", "schedule": PRUNE, "layers": ["layers.[1-9].conv.weight"]},
}
CACHED = "first half frozen, cached"
OTHER_WEIGHTS = "its mask, other weights"
LONG, WINDOW = "1,024 bytes", "1,024 bytes, window 128"
SMALL_GPT = {"model.layers": 3, "model.width": 96, "model.feed_forward_width": 288, "optimizer.lr": 3e-3}
"""0.4 million weights beside their embedding: a training takes half a minute."""
DEEP_GPT = {"model.layers": 6}
"""Enough blocks that freezing some of them shows."""
PARTS = ("steps", "attention", "digits", "gpt", "freezing")


def sparsity(
    parts: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(PARTS)}; default: all.")] = None,
    seeds: Annotated[int, typer.Option(help="Seeds of the accuracy tables.", min=1)] = 3,
    turns: Annotated[int, typer.Option(help="Turns of what is timed.", min=3)] = 15,
    steps: Annotated[int, typer.Option(help="Steps of the GPT.", min=50)] = 300,
    folder: Annotated[
        Path | None, typer.Option(help="Keeps trained runs here: the same command goes on from them.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What masks, frozen layers, adapters and sparse attention cost and save.

    Example: python -m benchmarks.sparsity --parts steps --parts attention
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as temporary:
        trainings = Trainings((folder or Path(temporary)).absolute())
        measures: Mapping[str, Callable[[], Result]] = {
            "steps": lambda: compare_steps(turns),
            "attention": lambda: compare_attention(turns),
            "digits": lambda: compare_digits(trainings, seeds),
            "gpt": lambda: compare_gpt(trainings, seeds, steps),
            "freezing": lambda: compare_freezing(trainings, seeds, steps),
        }
        print_report("sparsity", merged(measures[part]() for part in parts or PARTS), as_json=as_json)


def compare_steps(turns: int) -> Result:
    """A row for each way of training a GPT of five million parameters on one thread."""
    tenth = Magnitude(density=0.1, schedule=MaskSchedule(shape="one_shot"))
    half = ("embedding", *(f"blocks.{index}" for index in range(MODEL.layers // 2)))
    ways: dict[str, dict[str, Any]] = {
        "all": {},
        "all again": {},
        "first half frozen": {"freeze": FreezeConfig(layers=half)},
        "LoRA": {"adapter": LoRA(rank=8, layers=("*.query", "*.value"))},
        "a tenth": {"sparsity": tenth},
        "a tenth, packed state": {"sparsity": msgspec.structs.replace(tenth, packed_state=True)},
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        base = gpt_run_file(folder, corpus_file(folder), 1024)
        ways[CACHED] = {"freeze": FreezeConfig(layers=half, cache="1 GiB"), "data": _short(folder)}
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


def _short(folder: Path) -> Tokens:
    """An epoch of two steps."""
    path = folder / "short.bin"
    path.write_bytes((folder / "tokens.bin").read_bytes()[:2000])
    return Tokens(path=str(path), dtype="uint8")


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
        rows += _forward_alone(inputs, turns)
    gain = next(r["times_faster"] for r in rows if r["attention"] == "window 128" and r["tokens"] == 4096)
    return {"rows": rows, "checks": [check("window 128 of 4,096 tokens, faster", gain, LEAST_ATTENTION_GAIN)]}


@torch.no_grad()
def _forward_alone(inputs: Sequence[torch.Tensor], turns: int) -> list[Row]:
    """Gathered blocks and FlexAttention, which has no backward on CPUs; its compilation is not counted."""
    masks = {form: SlidingWindow(window=128, form=form) for form in ("blocks", "flex")}
    cores = {form: SparseAttention(mask) for form, mask in masks.items()}
    given = [each.detach() for each in inputs]
    times = interleaved({form: lambda core=core: core(*given) for form, core in cores.items()}, turns)
    return [
        {
            "attention": f"window 128, forward, {form}",
            "tokens": inputs[0].shape[2],
            "ms": round(1e3 * statistics.median(times[form]), 2),
            "times_faster": round(statistics.median(a / b for a, b in zip(times["blocks"], each, strict=True)), 2),
        }
        for form, each in times.items()
    ]


def compare_digits(trainings: Trainings, seeds: int) -> Result:
    """Held-out accuracy of each kind at a tenth of the weights; of a lottery ticket, and of its mask on new weights."""
    early = {"checkpoint.every_steps": REWIND, "checkpoint.keep": 1000}
    found: dict[str, list[float]] = {}

    def train(kind: str, keys: dict[str, Any]) -> Path:
        folder = trainings.directory("digits", keys)
        found.setdefault(kind, []).append(last_of(folder, "accuracy/eval"))
        return folder

    for seed in range(seeds):
        dense = train("dense", {"run.seed": seed, **early})
        for kind, table in TENTH.items():
            train(kind, {"run.seed": seed, **_table(table)})
        ticket = _table({"kind": "lottery", "distribution": "global", "ticket": str(dense)})
        rewound = {"run.warm_start": str(dense / "checkpoints" / f"step-{REWIND:08}")}
        train("lottery ticket", {"run.seed": seed, **ticket, **rewound})
        train(OTHER_WEIGHTS, {"run.seed": seed + 1000, **ticket})
    mean = {kind: statistics.fmean(values) for kind, values in found.items()}
    return {
        "rows": _over_seeds("digits", "accuracy_percent", {k: [100 * v for v in each] for k, each in found.items()}),
        "checks": [
            check("RigL's accuracy below dense", mean["dense"] - mean["rigl"], MOST_LOST_ACCURACY, at_most=True),
            check("a ticket's accuracy above its mask's", mean["lottery ticket"] - mean[OTHER_WEIGHTS], 0.0),
        ],
    }


def compare_gpt(trainings: Trainings, seeds: int, steps: int) -> Result:
    """Held-out loss of a small byte-level GPT, and of one that reads 1,024 bytes."""
    schedules = {"begin": steps // 10, "end": steps * 3 // 5, "every": max(1, steps // 20)}
    grown = {"end": steps * 3 // 4, "every": max(1, steps // 20)}
    long = {"batch.sequence": 1024, "batch.global_samples": 2}
    runs: dict[str, dict[str, Any]] = {
        "dense": {},
        "magnitude": _table(TENTH["magnitude"] | {"schedule": schedules}),
        "rigl": _table(TENTH["rigl"] | {"schedule": grown}),
        "features, half": _table({"kind": "magnitude", "density": 0.5, "pattern": "features", "schedule": schedules}),
        "weights of 4 bits": {"quantisation.bits": 4, "quantisation.group": 32},
        LONG: long,
        WINDOW: long | {"model.attention.kind": "window", "model.attention.window": 128},
    }
    found: dict[str, list[float]] = {}
    for seed in range(seeds):
        for kind, keys in runs.items():
            folder = trainings.directory("stdlib-gpt", _gpt_keys(seed, steps) | keys)
            found.setdefault(kind, []).append(last_of(folder, "loss/eval"))
    share = statistics.fmean(found[WINDOW]) / statistics.fmean(found[LONG])
    return {
        "rows": _over_seeds("gpt", "loss_eval", found),
        "checks": [check("loss, window 128 of 1,024", share, MOST_WINDOW_LOSS, at_most=True)],
    }


def _gpt_keys(seed: int, steps: int) -> dict[str, Any]:
    given = {"run.seed": seed, "run.steps": steps, "observe.evaluate_samples": 64, "observe.sample_bytes": 0}
    return given | SMALL_GPT | {"observe.evaluate_every_steps": steps}


def compare_freezing(trainings: Trainings, seeds: int, steps: int) -> Result:
    """What each criterion of `freeze.progress` leaves out by its defaults, and what that costs."""
    recipes = {
        "digits": (lambda seed: {"run.seed": seed}, "accuracy/eval"),
        "stdlib-gpt": (lambda seed: _gpt_keys(seed, steps) | DEEP_GPT, "loss/eval"),
    }
    rows: list[Row] = []
    for recipe, (keys, figure) in recipes.items():
        for criterion in ("none", "movement", "gradient", "activations"):
            own = {} if criterion == "none" else {"freeze.progress.criterion": criterion}
            folders = [trainings.directory(recipe, keys(seed) | own) for seed in range(seeds)]
            rows.append({"recipe": recipe, "criterion": criterion, **_spread(figure, folders), **_left_out(folders)})
    return {"rows": rows, "checks": []}


def _spread(figure: str, folders: Sequence[Path]) -> Row:
    """The last of a figure of some runs: its mean, the least and the most."""
    values = [last_of(folder, figure) for folder in folders]
    return {
        figure: round(statistics.fmean(values), 4),
        "least": round(min(values), 4),
        "most": round(max(values), 4),
    }


def _left_out(folders: Sequence[Path]) -> Row:
    """The share of all updates of parameters that runs left out, the first step that did, the last, and the median time
    of a step with the most that was ever frozen beside that of one with nothing frozen."""
    shares, first, last, times = [], [], [], []
    for folder in folders:
        events = read_events(folder)
        steps, share = series(events, "freeze/share")
        frozen = [step for step, each in zip(steps, share, strict=True) if each]
        shares.append(statistics.fmean(share) if share else 0.0)
        if not frozen:
            continue
        took = dict(zip(*series(events, "time/step"), strict=True))
        most = [took[step] for step, each in zip(steps, share, strict=True) if each == max(share)]
        none = [took[step] for step, each in zip(steps, share, strict=True) if not each]
        first.append(frozen[0])
        last.append(frozen[-1])
        times.append(statistics.median(most) / statistics.median(none))
    return {
        "updates_left_out": round(statistics.fmean(shares), 3),
        "frozen_in": len(first),
        "first_step": min(first, default=None),
        "last_step": max(last, default=None),
        "step_of_most_frozen": round(statistics.fmean(times), 3) if times else None,
    }


def _over_seeds(name: str, figure: str, found: Mapping[str, Sequence[float]]) -> list[Row]:
    """A row for each kind: the mean over seeds, the least and the most."""
    return [
        {
            name: kind,
            figure: round(statistics.fmean(values), 4),
            "least": round(min(values), 4),
            "most": round(max(values), 4),
        }
        for kind, values in found.items()
    ]


def _table(table: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `[sparsity]`, at a tenth of the weights where the table says nothing else."""
    density = {} if "density" in table or ":" in table.get("pattern", "") else {"density": 0.1}
    found = {f"sparsity.{key}": value for key, value in {**table, **density}.items() if key != "schedule"}
    return found | {f"sparsity.schedule.{key}": value for key, value in table.get("schedule", {}).items()}


@dataclass(frozen=True)
class Trainings:
    """Runs of recipes on one rank, in `folder`: one that has finished there is not trained again."""

    folder: Path

    def directory(self, recipe: str, keys: Mapping[str, Any]) -> Path:
        """Trains the recipe with `keys` where that is not done; its run directory.

        Raises `EnvironmentFault` where it fails.
        """
        written = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
        directory = self.folder / f"{recipe}-{hashlib.sha256(' '.join(written).encode()).hexdigest()[:16]}"
        finished = directory / "finished"
        if finished.exists():
            return directory
        print(f"{recipe}: {' '.join(written)}", file=sys.stderr, flush=True)
        where = [f"run.directory={json.dumps(str(directory))}", "checkpoint.every_steps=50"]
        command = [sys.executable, "-m", "shoal", "train", str(RECIPES / f"{recipe}.toml"), *where]
        command += ["run.processes=1", "observe.report=false", *written]
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=one_thread, capture_output=True, text=True, check=False)
        if done.returncode:
            raise EnvironmentFault(f"{' '.join(command)} failed: {done.stderr[-500:]}")
        finished.touch()
        return directory


def last_of(directory: Path, name: str) -> float:
    """The last value that a run measured of `name`."""
    return series(read_events(directory), name)[1][-1]


if __name__ == "__main__":
    run(sparsity)
