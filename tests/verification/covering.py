"""Layouts that cover every pair of choices: a greedy pairwise covering array (AETG, Cohen et al. 1997).

From random legal candidates the one is taken that covers most pairs of (choice, choice) that no earlier one has.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec

from shoal.assembly.splitting import table_of
from shoal.errors import ShoalError
from shoal.runfile.rules import check_across
from shoal.runfile.run_file import RunFile
from shoal.topology.layout import Layout
from tests.verification.layouts import GPT, MOE, run_file_of

FACTORS: dict[str, tuple[Any, ...]] = {
    "model": ("dense", "moe"),
    "tied": (False, True),
    "kv_heads": (4, 2, 1),
    "dropout": (0.0, 0.1),
    "replicate": (1, 2),
    "shard": (1, 2, 4),
    "zero": (1, 2, 3),
    "tensor": (1, 2, 4),
    "sequence_parallel": (False, True),
    "grid_rows": (0, 1, 2),
    "pipeline": (1, 2, 4),
    "schedule": (
        "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "ZB-H1",
        "ZB-H2",
    ),
    "microbatches": (4, 8),
    "context": (1, 2, 4),
    "kind": ("ring", "ulysses", "allgather"),
    "expert": (1, 2, 4),
    "recompute": ("none", "selective", "operators", "full"),
    "accumulation": (False, True),
    "optimizer": ("adamw", "sgd"),
    "exact": (False, True),
}  # fmt: skip
MOST_RANKS = (8, 4, 2, 4)
"""Of one layout after the other: large ones cover more, small ones are what most people run."""
CANDIDATES = 60

Choices = dict[str, Any]


def covering(number: int, *, seed: int = 0) -> list[Choices]:
    """`number` legal combinations, the most telling first. What an axis of size 1 makes meaningless is left out."""
    draw, seen, chosen = random.Random(seed), set[frozenset[tuple[str, Any]]](), []
    while len(chosen) < number:
        most_ranks = MOST_RANKS[len(chosen) % len(MOST_RANKS)]
        candidates = [legal(draw, most_ranks) for _ in range(CANDIDATES)]
        best = max(candidates, key=lambda choices: len(_pairs(choices) - seen))
        seen |= _pairs(best)
        chosen.append(best)
    return chosen


def world_of(choices: Choices) -> int:
    """Ranks in the layout."""
    return layout_of(choices).world_size


def layout_of(choices: Choices) -> Layout:
    return Layout(**{axis: choices.get(axis, 1) for axis in Layout().to_dict()})


def tables_of(choices: Choices) -> dict[str, dict[str, Any]]:
    """The tables of the run file."""
    layout = layout_of(choices)
    model = dict(MOE if choices["model"] == "moe" else GPT)
    model |= {"layers": 6 if layout.pipeline > 1 else 2, "tied": choices["tied"], "kv_heads": choices["kv_heads"]}
    model["dropout"] = choices["dropout"]
    tables: dict[str, dict[str, Any]] = {
        "model": model,
        "layout": layout.to_dict() | {"sequence_parallel": choices.get("sequence_parallel", False)} | _grid(choices),
        "memory": {"recompute": choices["recompute"]} | ({"zero": choices["zero"]} if "zero" in choices else {}),
        "batch": {"global_samples": 8} | ({"micro_samples": 1} if choices["accumulation"] else {}),
        "optimizer": {"kind": "adamw", "lr": 2e-3} if choices["optimizer"] == "adamw" else {"kind": "sgd", "lr": 0.1},
    }
    if "schedule" in choices:
        tables["pipeline"] = {"schedule": choices["schedule"], "microbatches": choices["microbatches"]}
    if "kind" in choices:
        tables["context"] = {"kind": choices["kind"]}
    return tables


def _grid(choices: Choices) -> dict[str, Any]:
    rows = choices.get("grid_rows")
    return {"tensor_grid": [rows, choices["tensor"] // rows]} if rows else {}


def named(choices: Choices) -> str:
    """A short name for people."""
    return " ".join(
        f"{name}={value}"
        for name, value in choices.items()
        if value is True or name == "grid_rows" or value not in (1, False, 0.0, "none")
    )


def legal(draw: random.Random, most_ranks: int) -> Choices:
    """A combination that the rules of the run file allow, of at most so many ranks."""
    while True:
        choices = {name: draw.choice(values) for name, values in FACTORS.items()}
        choices = dict(_meaningful(choices))
        if _is_legal(choices, most_ranks):
            return choices


def _meaningful(choices: Choices) -> Iterator[tuple[str, Any]]:
    """Keys that an axis of size 1 leaves without an effect would only seem to be covered."""
    needs = {
        "zero": "shard", "sequence_parallel": "tensor", "grid_rows": "tensor", "schedule": "pipeline",
        "microbatches": "pipeline", "kind": "context",
    }  # fmt: skip
    for name, value in choices.items():
        if choices.get(needs.get(name, ""), 2) == 1 or (name == "expert" and choices["model"] == "dense"):
            continue
        yield name, value


def _is_legal(choices: Choices, most_ranks: int) -> bool:
    try:
        layout = layout_of(choices)
        if layout.world_size > most_ranks:
            return False
        run_file = run_file_of_tables(choices)
        check_across(run_file, file="covering")
        table_of(run_file, choices.get("microbatches", 1))
    except (ShoalError, ValueError):
        return False
    return True


def run_file_of_tables(choices: Choices) -> RunFile:
    run_file = run_file_of(Path("/nowhere"), **tables_of(choices))
    run = msgspec.structs.replace(run_file.run, processes=world_of(choices))
    return msgspec.structs.replace(run_file, run=run)


def _pairs(choices: Choices) -> set[frozenset[tuple[str, Any]]]:
    return {frozenset(pair) for pair in combinations(choices.items(), 2)}
