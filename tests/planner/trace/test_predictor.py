"""Plans from traces: against the closed forms of the models that have them, and what a model's declarations allow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from shoal.cost.footprint import FLOAT32
from shoal.cost.plan import Plan
from shoal.models.config import GPTConfig
from shoal.planner.explain.explain import why_not
from shoal.planner.predict.measured import measured_of
from shoal.planner.predict.predictor import Predictor, Workload
from shoal.planner.predict.stack import MODERN
from shoal.planner.predict.workload import Constants
from shoal.planner.search.candidates import Allowed, candidates
from shoal.planner.search.search import search
from shoal.planner.trace.predictor import TracedPredictor
from shoal.planner.trace.subject import Subject, TracedJob
from shoal.schedules.table import Schedule
from shoal.topology.cluster_file import cluster_from, known_cluster
from shoal.topology.layout import Layout
from tests.planner.calibrations import CORES, calibration
from tests.planner.trace.models import LENGTH, Blocks, subject
from tests.planner.trace.test_trace import gpt, sizes_of

SAMPLES = 16
FEW = Allowed(microbatch=2, schedules=("1F1B",))
CLUSTER = known_cluster("dgx-h100", 1)
EAGER = replace(
    MODERN, name="eager", state=FLOAT32, dtype="float32", eager=True, own_blocks=True, fused_weight_gradient=False,
    overlap_tensor=False, overlap_data=False, overlap_pipeline=False, scatter_pipeline=False, update_bytes=40,
)  # fmt: skip
LENGTH_OF_LARGE = 1024
"""Its head is small beside a block, so that a run cuts it as the closed forms assume, into as many layers each."""
LARGE = GPTConfig(vocabulary=4096, layers=4, width=2048, heads=16, feed_forward_width=5632)
MEMORY, PIPELINED = 0.01, 0.05
"""Of the closed forms; a pipeline's peak is the fullest backward of a block beside all that is in flight."""
PRODUCTS, TIME = 0.1, 0.25
"""Of the closed forms, which take query, key and value for one product and gate and up for another, where waves are
fuller, and a norm for two passes over memory, of which PyTorch makes nine on a CPU."""
MEASURED_PRODUCTS, EXACT = 0.1, 1e-9
"""A gradient's product has the sides of its own, between which the sweep is interpolated."""
NO_HOST = Constants(dispatch_s=0.0, kernel_s=0.0, optimizer_start_s=0.0)


def traced(of: Subject, sequence: int) -> TracedPredictor:
    """Predicts `SAMPLES` samples a step."""
    job = TracedJob(subject=of, global_samples=SAMPLES, sequence=sequence)
    return TracedPredictor(job, CLUSTER, stack=EAGER)


@pytest.fixture(scope="module")
def both() -> tuple[Predictor, TracedPredictor]:
    """A GPT by closed forms, and as if it were a user's."""
    workload = Workload(model=sizes_of(LARGE), global_samples=SAMPLES, sequence=LENGTH_OF_LARGE)
    return Predictor(workload, CLUSTER, stack=EAGER), traced(gpt(LARGE, length=LENGTH_OF_LARGE), LENGTH_OF_LARGE)


def test_a_traced_gpt_costs_on_a_measured_machine_what_it_does_by_name() -> None:
    """Products, attention, the host, waits, sums and the optimizer of four ranks on two cores, as if it were a gpt."""
    small = GPTConfig(vocabulary=256, layers=4, width=128, heads=4, feed_forward_width=384)
    here = cluster_from({"cluster": {"nodes": 1, "machine": "cpu-2", "devices_per_node": 4}}, file="test")
    known = measured_of(calibration(), cores=CORES, dtype="float32", backend="shm")
    options: dict[str, Any] = {"stack": EAGER, "constants": NO_HOST, "measured": known}
    workload = Workload(model=sizes_of(small), global_samples=SAMPLES, sequence=128)
    job = TracedJob(subject=gpt(small, length=128), global_samples=SAMPLES, sequence=128)
    plan = Plan(layout=Layout(replicate=4), microbatch=2, microbatches=2)
    closed, found = (
        one.bill(plan).seconds for one in (Predictor(workload, here, **options), TracedPredictor(job, here, **options))
    )
    for item in ("launches", "waiting", "gradients", "optimizer"):
        assert found[item] == pytest.approx(closed[item], rel=TIME if item == "waiting" else EXACT)
    assert found["matrix products"] == pytest.approx(closed["matrix products"], rel=MEASURED_PRODUCTS)
    assert found["attention"] == pytest.approx(closed["attention"], rel=MEASURED_PRODUCTS)


@pytest.mark.parametrize(
    ("layout", "options", "memory"),
    [
        (Layout(), {}, MEMORY),
        (Layout(), {"recompute": "full"}, MEMORY),
        (Layout(shard=2), {"zero": 1}, MEMORY),
        (Layout(shard=2), {"zero": 2}, MEMORY),
        (Layout(shard=2), {"zero": 3}, MEMORY),
        (Layout(tensor=2), {}, MEMORY),
        (Layout(tensor=2), {"sequence_parallel": True}, MEMORY),
        (Layout(pipeline=2), {}, PIPELINED),
        (Layout(pipeline=2, tensor=2), {"schedule": "ZB-H1"}, PIPELINED),
    ],
)
def test_a_traced_gpt_has_the_prices_of_the_closed_forms(
    both: tuple[Predictor, TracedPredictor], layout: Layout, options: dict[str, object], memory: float
) -> None:
    """Bytes, arithmetic and communication of a step; and its time but for what eager operators add."""
    plan = Plan(layout=layout, microbatch=2, microbatches=SAMPLES // 2 // layout.shard, **options)  # type: ignore[arg-type]
    closed, found = (predictor.predict(plan) for predictor in both)
    for one, other in zip(closed.footprints, found.footprints, strict=True):
        assert other.total - other.workspace == pytest.approx(one.total - one.workspace, rel=memory)
    assert both[1].step_flops == both[0].step_flops
    assert found.bill.seconds["gradients"] == pytest.approx(closed.bill.seconds["gradients"])
    assert found.bill.seconds["matrix products"] == pytest.approx(closed.bill.seconds["matrix products"], rel=PRODUCTS)
    assert found.step_s == pytest.approx(closed.step_s, rel=TIME)


def test_declarations_decide_which_layouts_there_are(both: tuple[Predictor, TracedPredictor]) -> None:
    """Without roles no tensor ranks, without a chain no stages, without blocks nothing is computed again."""
    free, plain = both[1], traced(subject(Blocks), LENGTH)
    flat = traced(subject(lambda: nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4))), LENGTH)

    def axes(predictor: TracedPredictor) -> tuple[set[str], set[str]]:
        plans = list(candidates(predictor.job, CLUSTER, Allowed().within(predictor.abilities)))
        used = {axis for plan in plans for axis, size in plan.layout.to_dict().items() if size > 1}
        return used, {plan.recompute for plan in plans}

    assert axes(free)[0] == {"replicate", "shard", "pipeline", "tensor"}
    assert axes(plain) == ({"replicate", "shard"}, {"none", "selective", "operators", "full"})
    assert axes(flat) == ({"replicate", "shard"}, {"none"})


@pytest.mark.parametrize(
    ("schedule", "virtual", "last"), [("1F1B", 1, 1), ("Interleaved1F1B", 2, 1), ("ZBVZeroBubble", 2, 0)]
)
def test_the_loss_is_where_the_last_stage_is(
    both: tuple[Predictor, TracedPredictor], schedule: Schedule, virtual: int, last: int
) -> None:
    """Every unit has one rank; what lies outside of units goes with the head, at the end of a loop or of a V."""
    plan = Plan(layout=Layout(pipeline=2), microbatch=2, microbatches=8, schedule=schedule, virtual_stages=virtual)
    held = both[1].stages(plan).held
    assert sorted(unit for units in held for unit in units if unit is not None) == list(range(LARGE.layers + 2))
    assert {None, LARGE.layers + 1} <= held[last]


@pytest.mark.slow
def test_why_not_says_what_the_model_says(both: tuple[Predictor, TracedPredictor]) -> None:
    """A split that was tried and failed, and roles that are missing."""
    plain = traced(subject(Blocks), LENGTH)
    best = search(plain, FEW, keep=1).best[0]
    assert "parameter_roles()" in why_not(plain, "tensor=2", best, allowed=Allowed())
    assert "context" in why_not(plain, "context=2", best, allowed=Allowed())
    best = search(both[1], FEW, keep=1).best[0]
    assert "tensor" in why_not(both[1], "tensor=3", best, allowed=FEW)


@pytest.mark.slow
def test_the_search_finds_what_fits(both: tuple[Predictor, TracedPredictor]) -> None:
    """The same plan is fastest as by the closed forms."""
    closed, found = (search(predictor, FEW, keep=1).best[0] for predictor in both)
    assert found.plan == closed.plan
