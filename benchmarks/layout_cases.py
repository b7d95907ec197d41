"""The layouts in which `benchmarks.layouts` trains one run: every axis, ZeRO stage and kind of schedule at least once.

The first is the one on which the machine is calibrated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.runfile.load import load_run
from shoal.runfile.run_file import RunFile

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Case:
    """A layout, as keys that replace the run file's."""

    name: str
    ranks: int
    keys: tuple[str, ...]


def _case(name: str, ranks: int, *keys: str) -> Case:
    return Case(name, ranks, keys)


def run_file_of(path: Path, case: Case, overrides: Sequence[str] = ()) -> RunFile:
    """The run file in the layout of a case. Raises `ConfigError` where the run cannot have it."""
    keys = (f"run.processes={case.ranks}", 'run.device="cpu"', f"wire.timeout_s={TIMEOUT_S}")
    return load_run(path, (*overrides, *case.keys, *keys))


CASES = (
    _case("replicate=2", 2, "layout.replicate=2"),
    _case("replicate=2 accumulate 4", 2, "layout.replicate=2", "batch.micro_samples=2"),
    _case("replicate=2 recompute full", 2, "layout.replicate=2", 'memory.recompute="full"'),
    _case("shard=2 zero 1", 2, "layout.shard=2", "memory.zero=1"),
    _case("shard=2 zero 2 accumulate 2", 2, "layout.shard=2", "memory.zero=2", "batch.micro_samples=4"),
    _case("shard=2 zero 3", 2, "layout.shard=2", "memory.zero=3"),
    _case("tensor=2", 2, "layout.tensor=2"),
    _case("tensor=2 sequence parallel", 2, "layout.tensor=2", "layout.sequence_parallel=true"),
    _case("context=2 ring", 2, "layout.context=2"),
    _case("pipeline=2 1F1B", 2, "layout.pipeline=2", "pipeline.microbatches=8"),
    _case("pipeline=2 GPipe", 2, "layout.pipeline=2", "pipeline.microbatches=4", 'pipeline.schedule="GPipe"'),
    _case("replicate=4", 4, "layout.replicate=4"),
    _case("shard=4 zero 3", 4, "layout.shard=4", "memory.zero=3"),
    _case("shard=4 zero 1", 4, "layout.shard=4", "memory.zero=1"),
    _case("tensor=4", 4, "layout.tensor=4"),
    _case("context=4 ulysses", 4, "layout.context=4", 'context.kind="ulysses"'),
    _case("pipeline=4 1F1B", 4, "layout.pipeline=4", "pipeline.microbatches=8"),
    _case("replicate=2 tensor=2", 4, "layout.replicate=2", "layout.tensor=2"),
    _case("pipeline=2 tensor=2", 4, "layout.pipeline=2", "layout.tensor=2", "pipeline.microbatches=4"),
    _case("shard=2 context=2 zero 2", 4, "layout.shard=2", "layout.context=2", "memory.zero=2"),
    _case(
        "replicate=2 pipeline=2 interleaved", 4, "layout.replicate=2", "layout.pipeline=2",
        "pipeline.microbatches=4", 'pipeline.schedule="Interleaved1F1B"', "pipeline.stages_per_rank=2",
    ),
    _case(
        "shard=2 tensor=2 recompute full", 4, "layout.shard=2", "layout.tensor=2", "memory.zero=3",
        'memory.recompute="full"',
    ),
)  # fmt: skip
