"""Predicted bytes of tensors at the peak of a step, beside what PyTorch's allocator gave out on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.layouts import peak_bytes
from shoal.launcher.environment import Place
from shoal.memory.tracker import allocated
from shoal.planning.answer import cluster_of, predictor_on, tensor_bytes
from shoal.planning.plan_file import written_plan
from shoal.runfile.load import load_run
from tests.ranks import TestPlace

WITHIN = 0.05
"""What is promised of nine layouts in ten; here all of them keep it."""
RUN = """
[run]
name = "bytes"
steps = 9
device = "cpu"
[model]
kind = "gpt"
layers = 4
width = 64
heads = 4
feed_forward = "swiglu"
feed_forward_width = 192
tied = true
[data]
kind = "tokens"
path = "{tokens}"
dtype = "uint8"
[batch]
global_samples = 8
sequence = 128
"""
MASTERS = 'precision.kind="bfloat16_params"'
LAYOUTS = {
    "replicate": ("layout.replicate=2",),
    "accumulate": ("layout.replicate=2", "batch.micro_samples=1"),
    "loss chunks": ("layout.replicate=2", "memory.loss_chunks=4", "model.vocabulary=2048"),
    "loss chunks, 1F1B": (
        "layout.pipeline=2",
        "pipeline.microbatches=4",
        "memory.loss_chunks=4",
        "model.vocabulary=2048",
    ),
    "loss chunks, tensor": ("layout.tensor=2", "memory.loss_chunks=4", "model.vocabulary=2048"),
    "recompute": ("layout.replicate=2", 'memory.recompute="full"'),
    "zero 2 accumulate": ("layout.shard=2", "memory.zero=2", "batch.micro_samples=2"),
    "8 bits": ("layout.replicate=2", 'optimizer.kind="adamw_8bit"'),
    "zero 1, 8 bits": ("layout.shard=2", "memory.zero=1", 'optimizer.kind="adamw_8bit"'),
    "zero 3": ("layout.shard=2", "memory.zero=3"),
    "masters": ("layout.replicate=2", MASTERS),
    "masters, zero 1": ("layout.shard=2", "memory.zero=1", MASTERS),
    "masters, zero 3": ("layout.shard=2", "memory.zero=3", MASTERS),
    "tensor": ("layout.tensor=2",),
    "sequence parallel": ("layout.tensor=2", "layout.sequence_parallel=true"),
    "1F1B": ("layout.pipeline=2", "pipeline.microbatches=4"),
    "GPipe": ("layout.pipeline=2", "pipeline.microbatches=4", 'pipeline.schedule="GPipe"'),
}


def _peak(place: TestPlace, path: str, keys: tuple[str, ...]) -> int:
    run_file = load_run(Path(path), (*keys, f"run.processes={place.size}"))
    rank = Place(place.rank, place.size, place.rank, place.size, 0, "torchrun")
    return peak_bytes(run_file, rank, place.store)


@pytest.mark.slow
@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_closed_form_is_what_the_allocator_gave_out(ranks: Any, tmp_path: Path, layout: str) -> None:
    """On the fullest of two ranks, in the second step."""
    tokens = tmp_path / "tokens.bin"
    np.random.default_rng(0).integers(0, 256, 1 << 16, dtype=np.uint8).tofile(tokens)
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(tokens=tokens))
    measured = max(ranks(2, _peak, str(path), LAYOUTS[layout]))
    run_file = load_run(path, (*LAYOUTS[layout], "run.processes=2"))
    predictor = predictor_on(run_file, cluster_of(run_file, None))
    one = predictor.predict(written_plan(run_file, predictor.cluster))
    assert max(map(tensor_bytes, one.footprints)) == pytest.approx(measured, rel=WITHIN)


@pytest.mark.slow
def test_what_is_given_back_counts_in_the_peak_alone() -> None:
    """A tensor that stays and one that goes, of known bytes."""
    kept = []

    def work() -> None:
        kept.append(torch.empty(1000))
        torch.empty(5000)

    found = allocated(work)
    assert (found.stayed_bytes, found.peak_bytes) == (4000, 24000)
