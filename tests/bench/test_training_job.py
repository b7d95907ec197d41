"""Benchmarks open training runs in one place."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from shoal.bench.training_job import corpus_file, small_gpt_run_file, start_alone
from shoal.data.config import BatchConfig
from shoal.models.config import GPTConfig
from tests.test_floors import imports_of

ROOT = Path(__file__).parents[2]
OPENS_RUNS = "shoal.assembly.run"


def test_only_one_module_of_the_benchmarks_opens_runs() -> None:
    """So that a change of how runs are opened changes one file; scripts with a loop of their own, and those that
    measure a step from its inside, are others."""
    files = [*(ROOT / "src" / "shoal" / "bench").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    assert {path.name for path in files if OPENS_RUNS in imports_of(path)} == {
        "training_job.py", "loop_scripts.py", "gpu.py", "host_overhead.py", "launches.py", "tiers.py",
        "memory_start.py", "collector.py",
    }  # fmt: skip


def test_steps_of_a_training_move_its_weights(tmp_path: Path) -> None:
    """Two runs of the same file take the same steps, and each step updates the model."""
    model = GPTConfig(layers=1, width=16, heads=2, vocabulary=256)
    run_file = small_gpt_run_file(tmp_path, corpus_file(tmp_path), model, BatchConfig(global_samples=2, sequence=8))
    losses = []
    for _ in range(2):
        with ExitStack() as stack:
            training = start_alone(run_file, stack)
            before = [p.clone() for p in training.run.model.parameters()]
            losses.append([float(training.take_step().loss) for _ in range(3)])
            assert any((p != b).any() for p, b in zip(training.run.model.parameters(), before, strict=True))
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3
