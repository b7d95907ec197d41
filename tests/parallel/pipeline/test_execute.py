"""Every schedule on real ranks computes what one process computes."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.comm.collective import Collective, GroupCollective
from shoal.comm.config import WireConfig
from shoal.comm.mesh import build_mesh
from shoal.errors import LayoutError
from shoal.models.layers import set_sample_keys
from shoal.parallel.pipeline.execute import Computation, Hooks, PipelineRun, run_pipeline
from shoal.parallel.pipeline.packing import AS_IT_IS, Packing
from shoal.parallel.pipeline.stages import Stages, balanced_cut, estimated_costs, staged
from shoal.schedules.build import NAMES, build
from shoal.schedules.table import Action, ScheduleTable, forward_only
from shoal.topology.layout import Layout
from tests.parallel.pipeline import chains
from tests.parallel.pipeline.copies import sum_copies
from tests.ranks import TestPlace
from tests.waiting import HANG_S

EXACT = 1e-12  # float64: only the order of a few sums differs
TIMEOUT_S = 5.0
Case = tuple[str, str, int, int | None]  # model, schedule, microbatches, stages a rank
SYNCHRONOUS = [name for name in NAMES if name != "PipeDream"]


def pipeline_of(place: TestPlace) -> Collective:
    layout = Layout(pipeline=place.size)
    mesh = build_mesh(
        layout,
        place.rank,
        store=place.store,
        device=torch.device("cpu"),
        wire=WireConfig(timeout_s=HANG_S, transport="gloo"),
    )
    return mesh.axis("pipeline")


def cut_model(kind: str, table: ScheduleTable, rank: int) -> tuple[Any, Stages]:
    whole = chains.model(kind)
    stages = staged(whole, balanced_cut(estimated_costs(whole, whole.parts()), table.stages), table.placement)
    stages.keep(rank)
    return whole, stages


def run_case(
    group: Collective, case: Case, *, forward: bool = False, packing: Packing = AS_IT_IS
) -> tuple[PipelineRun, dict[str, Tensor]]:
    """One pass; the rank's gradients under the names of the whole model."""
    kind, schedule, microbatches, per_rank = case
    table = build(schedule, ranks=group.size, microbatches=microbatches, stages_per_rank=per_rank)
    table = forward_only(table) if forward else table
    model, stages = cut_model(kind, table, group.rank)
    batch = chains.data(kind, microbatches)

    @contextmanager
    def around(action: Action):
        set_sample_keys(model.modules(), batch.keys[action.microbatch])
        yield

    result = run_pipeline(
        table,
        group,
        Computation(stages.forward, batch.loss, stages.weights),
        [model.context(i) for i in batch.inputs],
        device=torch.device("cpu"),
        hooks=Hooks(around),
        packing=packing,
    )
    gradients = {}
    for stage in table.stages_of(group.rank):
        for name in stages.names[stage]:
            if (gradient := model.get_parameter(name).grad) is not None:
                gradients[stages.aliases[name]] = gradient
    for name in dict.fromkeys(stages.aliases.values()):
        holders = stages.holders(name)
        if len(holders) > 1 and group.rank in holders:
            sum_copies(gradients[name], holders, group)
    return result, gradients


def compare(place: TestPlace, cases: list[Case]) -> list[str]:
    """On every rank: what differs from one process, over all cases."""
    group, wrong = pipeline_of(place), []
    for case in cases:
        loss, expected = chains.one_process(case[0], case[2])
        result, gradients = run_case(group, case)
        if (result.loss is None) == (expected_last(case, group)):
            wrong.append(f"{case}: rank {group.rank} has loss {result.loss}")
        if result.loss is not None and abs(result.loss.item() - loss) > EXACT * abs(loss):
            wrong.append(f"{case}: loss {result.loss.item()} for {loss}")
        wrong += [f"{case}: {name}" for name, g in gradients.items() if not close(g, expected[name])]
        names = torch.tensor([float(name in gradients) for name in expected])
        group.all_reduce(names, "max").wait()
        wrong += [f"{case}: {name} on no rank" for name, held in zip(expected, names, strict=True) if not held]
    return wrong


def expected_last(case: Case, group: Collective) -> bool:
    table = build(case[1], ranks=group.size, microbatches=case[2], stages_per_rank=case[3])
    return table.placement[table.last_stage] == group.rank


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= EXACT * b.norm())


def takes(schedule: str, microbatches: int, ranks: int) -> int:
    return max(microbatches, 2 * ranks) if schedule == "DualPipeV" else microbatches


TURNING = ["ZBVZeroBubble", "DualPipeV"]
OTHERS = [kind for kind in chains.MODELS if kind not in ("perceptron", "gpt with dropout")]
TWO: list[Case] = [
    *[("perceptron", name, takes(name, m, 2), None) for name in SYNCHRONOUS for m in (1, 3)],
    *[(kind, name, 4, None) for kind in OTHERS for name in ("1F1B", "InterleavedZeroBubble", *TURNING)],
    *[("gpt with dropout", name, 4, None) for name in ("1F1B", "ZBVZeroBubble")],
    *[("perceptron", name, 4, v) for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble") for v in (1, 4)],
]
FOUR: list[Case] = [
    *[("perceptron", name, 8, None) for name in SYNCHRONOUS],
    *[("tied gpt", name, 8, None) for name in ("1F1B", "InterleavedZeroBubble", *TURNING)],
    *[("perceptron", name, 3, None) for name in SYNCHRONOUS if name != "DualPipeV"],
]
ALONE: list[Case] = [("perceptron", name, 3, None) for name in SYNCHRONOUS]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "cases"), [(1, ALONE), (2, TWO), (4, FOUR)], ids=["1 rank", "2 ranks", "4 ranks"])
def test_schedules_compute_what_one_process_computes(ranks, world: int, cases: list[Case]) -> None:
    """Loss and every gradient, float64: all schedules; frozen, tied, recomputed and dropped-out models; few and many
    microbatches; one to four stages a rank."""
    for wrong in ranks(world, compare, cases, timeout_s=240):
        assert wrong == []


def evaluate(place: TestPlace, cases: list[Case]) -> list[str]:
    """Forward only: the loss, no gradients, and no graph kept."""
    group, wrong = pipeline_of(place), []
    for case in cases:
        loss, _ = chains.one_process(case[0], case[2])
        result, gradients = run_case(group, case, forward=True)
        wrong += [f"{case}: a gradient of {name}" for name in gradients]
        if result.loss is not None and abs(result.loss.item() - loss) > EXACT * abs(loss):
            wrong.append(f"{case}: loss {result.loss.item()} for {loss}")
    return wrong


def test_forward_only_gives_the_loss_and_no_gradient(ranks) -> None:
    """The forwards of any table, for evaluation."""
    for wrong in ranks(2, evaluate, [("perceptron", name, 4, None) for name in SYNCHRONOUS]):
        assert wrong == []


def run_broken(place: TestPlace, fault: str, timeout_s: float = HANG_S) -> float:
    """A pass in which the stage of rank 1 misbehaves on microbatch 2; the norm of this rank's gradients. `timeout_s`
    is that of rank 0 once the ranks have met.
    """
    group = pipeline_of(place)
    group.barrier().wait()
    if place.rank == 0:
        assert isinstance(group, GroupCollective)
        group.group.inner.set_timeout(timedelta(seconds=timeout_s))  # pyright: ignore[reportAttributeAccessIssue]
    table = build("ZBVZeroBubble", ranks=group.size, microbatches=4)
    model, stages = cut_model("perceptron", table, group.rank)
    batch = chains.data("perceptron", 4)

    def stage(index: int, x: Tensor | None, context: tuple[int, Tensor]) -> Tensor:
        microbatch, inputs = context
        output = stages.forward(index, x, inputs)
        if index == 1 and microbatch == 2:
            if fault == "raises":
                raise ZeroDivisionError("the stage's own error")
            return output * float("nan") if fault == "nan" else output[:1]
        return output

    computation = Computation(stage, batch.loss, stages.weights)
    run_pipeline(table, group, computation, list(enumerate(batch.inputs)), device=torch.device("cpu"))
    return float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())


@pytest.mark.slow
def test_a_stage_that_fails_stops_the_others_within_the_timeout(ranks) -> None:
    """The rank at fault shows its own error, the others a sentence; nobody hangs."""
    for fault, error in (("raises", "ZeroDivisionError"), ("shrinks", "must have a form that follows")):
        (well_0, text_0), (well_1, text_1) = ranks.outcomes(2, run_broken, fault, TIMEOUT_S)
        assert not well_0
        assert "CollectiveError" in text_0
        assert not well_1
        assert error in text_1


def test_a_nan_of_one_stage_reaches_every_rank_and_stops_none(ranks) -> None:
    """So that the vote on a step, taken afterwards, sees it."""
    for norm in ranks(2, run_broken, "nan"):
        assert norm != norm


def refuse(place: TestPlace) -> list[str]:
    """What is said of a table for other sizes."""
    group, said = pipeline_of(place), []
    computation = Computation(lambda s, x, c: c, lambda x, j: x, lambda s: [])
    for table in (build("1F1B", ranks=3, microbatches=2), build("1F1B", ranks=2, microbatches=4)):
        with pytest.raises(LayoutError) as refusal:
            run_pipeline(table, group, computation, [0, 0], device=torch.device("cpu"))
        said.append(str(refusal.value))
    return said


def test_a_table_of_other_sizes_is_refused(ranks) -> None:
    for ranks_said, microbatches_said in ranks(2, refuse):
        assert "build it with ranks=2" in ranks_said
        assert "build it with microbatches=2" in microbatches_said
