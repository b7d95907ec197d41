"""`python -m benchmarks.embedding`: a recommendation step with sparse gradients beside the same step with dense ones.

All sides train one model (a table, two layers) on the same ids. The dense sides are `nn.Embedding`, its gradient summed
by an all-reduce, or divided by ZeRO-1 over the ranks that split the table of the sparse sides. The first dense side is
measured a second time (A/A), which shows what noise alone does to a ratio.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore

import shoal
from benchmarks.command import run
from shoal.bench.groups import gathered, interleaved, join_group, join_store
from shoal.bench.options import AsJson, Processes
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import Result, again_cells, check, columns, lower_bound, milliseconds, print_report, ratios
from shoal.bench.training_job import Training, start_training
from shoal.launcher.environment import Place
from shoal.runfile.run_file import RunFile

FEATURES, WIDTH = 8, 32
SAMPLES = 512
PROMISED = 3.0
"""Times the samples a second of dense gradients."""

SIDES: dict[str, dict[str, Any]] = {
    "rows": {"kind": "rows", "layout": "shard"},
    "columns": {"kind": "columns", "layout": "shard"},
    "replicated": {"kind": "rows", "layout": "replicate"},
    "dense": {"kind": "dense", "layout": "replicate"},
    "dense_again": {"kind": "dense", "layout": "replicate"},
    "dense_zero_1": {"kind": "dense", "layout": "shard"},
}


class Clicks:
    """Random ids of each feature, few of them often, and whether it was clicked."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(1)
        each = rows // FEATURES
        ids = (torch.rand(64 * SAMPLES, FEATURES, generator=generator) ** 3 * each).long()
        self.ids = ids + each * torch.arange(FEATURES)
        self.clicked = (ids.sum(1) % 2).float()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.ids[index], self.clicked[index]


class Recommender(nn.Module):
    """The vectors `[samples, features, width]` of the ids, through two layers, to a logit `[samples]`."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        self.layers = nn.Sequential(nn.Linear(FEATURES * WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.layers(self.table(ids).flatten(1))[:, 0]


def recommender(kind: str, rows: int) -> Recommender:
    """With an `nn.Embedding` if `kind` is "dense", else with a table split along `kind`."""
    if kind == "dense":
        return Recommender(nn.Embedding(rows, WIDTH))
    return Recommender(shoal.EmbeddingTable(rows, WIDTH, split="rows" if kind == "rows" else "columns"))


def click_loss() -> Callable[[Tensor, Tensor], Tensor]:
    """Cross-entropy of each sample's logit."""
    return lambda logits, clicked: F.binary_cross_entropy_with_logits(logits, clicked, reduction="none")


def embedding(
    rows: Annotated[int, typer.Option(help="Rows of the table.", min=1000)] = 500_000,
    pairs: Annotated[int, typer.Option(help="Turns of all sides.", min=6)] = 20,
    processes: Processes = 2,
    as_json: AsJson = False,
) -> None:
    """Steps of a recommendation model with sparse gradients of its table beside dense ones.

    Example: python -m benchmarks.embedding --rows 100000 --processes 4
    """
    if is_rank():
        run_as_rank(lambda place: measure(place, rows=rows, pairs=pairs))
        return
    command = ["benchmarks.embedding", "--rows", str(rows), "--pairs", str(pairs)]
    print_report("embedding", on_ranks(command, processes=processes), as_json=as_json)


def measure(place: Place, *, rows: int, pairs: int) -> Result | None:
    """A row and a check for each sparse side, over a table of `rows`; None on all ranks but rank 0."""
    store = join_store(place)
    clock = join_group("clock", place, store)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        sides: dict[str, Training] = {}
        for name, side in SIDES.items():
            run_file = _run_file(folder / name, side, rows=rows, ranks=place.world_size)
            sides[name] = start_training(run_file, place, stack, store=PrefixStore(name, store))
        sent = {name: gathered(clock, [float(one.take_step().bytes_sent)]) for name, one in sides.items()}
        turns = interleaved(
            {name: one.take_step for name, one in sides.items()}, clock, pairs=pairs, always=tuple(SIDES)
        )
    if place.rank != 0:
        return None
    found, checks = [], []
    for name in ("rows", "columns", "replicated"):
        gained, times = ratios(turns, name, peer="dense"), columns(turns)
        against_zero = ratios(turns, name, peer="dense_zero_1")
        found.append(
            {
                "side": name,
                "table_rows": rows,
                "ranks": place.world_size,
                "samples": SAMPLES,
                **milliseconds({side: times[side] for side in (name, "dense", "dense_zero_1")}),
                "times_dense_median": round(statistics.median(gained), 2),
                "times_dense_lower_95": round(lower_bound(gained), 2),
                "times_zero_1_median": round(statistics.median(against_zero), 2),
                "bytes_sent": int(max(own[0] for own in sent[name])),
                "bytes_sent_dense": int(max(own[0] for own in sent["dense"])),
                **again_cells(ratios(turns, "dense_again", peer="dense")),
            }
        )
        checks.append(check(f"samples/s of {name} against dense gradients, 95 % bound", lower_bound(gained), PROMISED))
    return {"rows": found, "checks": checks}


def _run_file(folder: Path, side: Mapping[str, Any], *, rows: int, ranks: int) -> RunFile:
    here = "benchmarks.embedding"
    return msgspec.convert(
        {
            "run": {"name": "embedding", "steps": 10**6, "directory": str(folder), "processes": ranks, "device": "cpu"},
            "model": {
                "kind": "python",
                "build": f"{here}:recommender",
                "arguments": {"kind": side["kind"], "rows": rows},
            },
            "data": {"kind": "python", "build": f"{here}:Clicks", "arguments": {"rows": rows}},
            "loss": {"kind": "python", "build": f"{here}:click_loss"},
            "batch": {"global_samples": SAMPLES, "denominator": "samples"},
            "optimizer": {"kind": "adagrad", "lr": 0.05},
            "layout": {side["layout"]: ranks},
            "memory": {"zero": 1} if side["layout"] == "shard" else {},
        },
        RunFile,
    )


if __name__ == "__main__":
    run(embedding)
