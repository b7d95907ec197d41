"""`shoal verify` in the pool of ranks: a run file of tables, proved without processes of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shoal.assembly.objects import UserObjects
from shoal.launcher.environment import Place
from shoal.runfile.rules import check_across
from shoal.runfile.run_file import RunFile
from shoal.verification.verdict import Verdict
from shoal.verification.verify import verify_rank
from tests.ranks import TestPlace
from tests.waiting import HANG_S

GPT: dict[str, Any] = {
    "kind": "gpt", "vocabulary": 61, "layers": 3, "width": 32, "heads": 4, "feed_forward_width": 48,
}  # fmt: skip
MOE: dict[str, Any] = {
    "kind": "moe", "vocabulary": 61, "layers": 2, "width": 32, "heads": 4, "expert_width": 24, "experts": 4, "top_k": 2,
    "router_z_loss": 0.01, "balance_coefficient": 0.05,
}  # fmt: skip


def corpus(folder: Path) -> Path:
    """Tokens below 61; every rank may write them, and none sees a part of another's."""
    part = folder / f"tokens.{os.getpid()}"
    part.write_bytes(np.random.default_rng(5).integers(0, 61, 20_000, dtype=np.uint8).tobytes())
    return part.replace(folder / "tokens.bin")


def run_file_of(folder: Path, **tables: dict[str, Any]) -> RunFile:
    """A small run on random tokens; `tables` replace keys of its own."""
    base: dict[str, dict[str, Any]] = {
        "run": {"name": "layouts", "steps": 10, "directory": str(folder / "run")},
        "model": GPT,
        "data": {"kind": "tokens", "path": str(folder / "tokens.bin"), "dtype": "uint8"},
        "batch": {"global_samples": 8, "sequence": 16},
        "optimizer": {"kind": "adamw", "lr": 2e-3},
        "wire": {"check_collectives": True, "timeout_s": HANG_S},
    }
    for name, table in tables.items():
        base[name] = (
            table if name == "model" or (name == "data" and "kind" in table) else {**base.get(name, {}), **table}
        )
    return msgspec.convert(base, RunFile)


def verified(
    place: TestPlace, tables: dict[str, Any], folder: str, exact: bool, steps: int | None
) -> dict[str, Any] | None:
    """The verdict as JSON at rank 0."""
    run_file = run_file_of(Path(folder), **tables)
    run_file = msgspec.structs.replace(run_file, run=msgspec.structs.replace(run_file.run, processes=place.size))
    check_across(run_file, file="layouts.toml")
    here = Place(place.rank, place.size, place.rank, place.size, 0, "shoal")
    verdict: Verdict | None = verify_rank(run_file, here, UserObjects(), steps=steps, exact=exact, store=place.store)
    return None if verdict is None else verdict.to_json() | {"sentence": verdict.sentence()}
