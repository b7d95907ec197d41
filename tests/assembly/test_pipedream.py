"""PipeDream as a choice of the run file is the sequential program with the same stale weights, and resumes bitwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.assembly.journey import travel
from tests.verification.layouts import GPT, corpus, verified

DEEP = GPT | {"layers": 4}
LAYOUTS: list[tuple[int, bool, dict[str, Any]]] = [
    (2, True, {"layout": {"pipeline": 2}}),
    (2, False, {"layout": {"pipeline": 2}, "memory": {"recompute": "full"}, "model": DEEP | {"dropout": 0.1}}),
    (4, True, {"layout": {"pipeline": 4}, "pipeline": {"microbatches": 6}, "batch": {"global_samples": 11}}),
    (4, True, {"layout": {"pipeline": 2, "replicate": 2}, "batch": {"global_samples": 9, "micro_samples": 1}}),
    (4, False, {"layout": {"pipeline": 2, "tensor": 2, "sequence_parallel": True}, "optimizer": {"clip_norm": 0.05}}),
    (4, True, {"layout": {"pipeline": 2, "context": 2}, "optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.9}}),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pipedream")
    corpus(folder)
    return folder


def tables_of(tables: dict[str, Any]) -> dict[str, Any]:
    return {"model": DEEP} | tables | {"pipeline": {"schedule": "PipeDream"} | tables.get("pipeline", {})}


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize(("world", "exact", "tables"), LAYOUTS, ids=lambda value: str(value)[:70])
def test_every_update_is_that_of_the_stale_sequential_program(
    ranks, folder: Path, world: int, exact: bool, tables: dict[str, Any]
) -> None:
    """Each microbatch's gradient, the loss, the norm, and the weights when the pipeline has drained."""
    verdict, *_ = ranks(world, verified, tables_of(tables), str(folder), exact, 2)
    assert verdict["holds"], verdict["sentence"]
    assert "PipeDream" in verdict["notes"][0]


@pytest.mark.slow
def test_a_run_goes_on_bitwise_from_a_drained_pipeline(ranks, folder: Path) -> None:
    """2 + 2 steps are the 4 steps of a run that was never stopped: losses, weights and moments."""
    tables = tables_of({"layout": {"pipeline": 2}})
    first, *_ = ranks(2, travel, tables, str(folder), "stopped", 2)
    second, *_ = ranks(2, travel, tables, str(folder), "stopped", 2)
    whole, *_ = ranks(2, travel, tables, str(folder), "whole", 4)
    assert first.losses + second.losses == whole.losses
    assert second.left.keys() == whole.left.keys()
    assert all(torch.equal(values, second.left[name]) for name, values in whole.left.items())


def test_a_step_makes_as_many_updates_as_it_has_microbatches(ranks, folder: Path) -> None:
    """The optimizer's own count, after two steps of four microbatches."""
    tables = tables_of({"layout": {"pipeline": 2}, "pipeline": {"microbatches": 4}})
    leg, *_ = ranks(2, travel, tables, str(folder), "counted", 2)
    counts = {float(values) for name, values in leg.left.items() if name.startswith("optimizer/step/")}
    assert counts == {8.0}
