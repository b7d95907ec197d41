"""What a run file asks for, as the planner prices it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.optim.config import SGD, AdamW, OptimizerConfig
from shoal.planning.answer import cluster_of, predictor_on, stack_of
from shoal.planning.plan_file import written_plan
from shoal.runfile.load import load_run
from shoal.runfile.run_file import RunFile

RECIPE = Path(__file__).parents[2] / "recipes/stdlib-gpt.toml"
OPTIMIZERS = ((AdamW(), 2), (SGD(), 0), (SGD(momentum=0.9, clip_norm=1.0), 1))


def _run(*keys: str) -> RunFile:
    return load_run(RECIPE, keys)


@pytest.mark.parametrize(("optimizer", "slots"), OPTIMIZERS)
def test_the_optimizers_slots_are_what_is_priced(optimizer: OptimizerConfig, slots: int) -> None:
    """AdamW keeps two numbers for a parameter, SGD none, and one with momentum: in memory and in what a step moves."""
    run = msgspec.structs.replace(_run(), optimizer=optimizer)
    cluster = cluster_of(run, None)
    predictor = predictor_on(run, cluster)
    one = predictor.predict(written_plan(run, cluster)).peak
    assert one.optimizer == pytest.approx(slots * one.weights)
    clip = 2 if run.optimizer.clip_norm else 0
    assert stack_of(run, cluster).update_bytes == 4 * (4 + clip + 2 * slots)


def test_only_some_layers_recomputed_is_priced_between_none_and_all() -> None:
    """Two of the blocks: more memory and less time than all of them."""
    times, sizes = [], []
    for keys in ((), ('memory.recompute="full"', "memory.recompute_layers=[0, 1]"), ('memory.recompute="full"',)):
        run = _run(*keys)
        cluster = cluster_of(run, None)
        one = predictor_on(run, cluster).predict(written_plan(run, cluster))
        times.append(one.step_s)
        sizes.append(one.peak.activations)
    assert times == sorted(times)
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(times)) == len(set(sizes)) == 3
