"""One simulated step against what is known exactly: closed forms, the timeline, the same step unfolded, physics."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cost.bubble import bubble_s
from shoal.cost.plan import Plan
from shoal.planner.simulate.outcome import outcome
from shoal.planner.simulate.step import Fold, SimulatedStep, simulate_step
from shoal.planner.simulate.work import Message, Stage, StepWork, Stragglers, uniform, work_of
from shoal.planning.simulating import table_of
from shoal.schedules.build import build
from shoal.schedules.timeline import timeline
from shoal.topology.cluster import Cluster
from tests.planner.jobs import CLUSTER, plans, predictor

ROUNDING = 1e-9
"""Relative: the same float64 sums in another order."""

EXACT = (("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("LoopedBFS", 2), ("ZB-H1", 1))


@pytest.mark.parametrize(("schedule", "per_rank"), EXACT)
def test_a_perfect_network_gives_the_closed_forms_bubble(schedule: str, per_rank: int) -> None:
    """Equal stages, transfers that take nothing: the step is m (F + I + W) and the bubble of cost.bubble."""
    table = build(schedule, ranks=4, microbatches=8, stages_per_rank=per_rank)
    work = uniform(table.stages, forward_s=1 / per_rank, input_s=1 / per_rank, weight_s=1 / per_rank)
    idle = bubble_s(
        schedule,  # type: ignore[arg-type]
        pipeline=4, virtual_stages=per_rank, microbatches=8, forward_s=1, input_s=1, weight_s=1,
    )  # fmt: skip
    assert simulate_step(table, work).played.makespan_s == pytest.approx(8 * 3 + idle, rel=ROUNDING)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV", "ZB-H2"])
def test_without_shared_ports_it_is_the_timeline(schedule: str) -> None:
    """Stages of different lengths, a delay on each hop: every action starts and ends as in schedules.timeline."""
    table = build(schedule, ranks=4, microbatches=8)
    stages = tuple(
        Stage(forward_s=1 + 0.1 * number, input_s=1.3 + 0.07 * number, weight_s=0.6 + 0.05 * number)
        for number in range(table.stages)
    )
    step = simulate_step(table, StepWork(stages=stages, transfer=Message(busy_s=0.0, latency_s=0.2)))
    times = timeline(
        table,
        forward_s=[one.forward_s for one in stages],
        backward_input_s=[one.input_s for one in stages],
        backward_weight_s=[one.weight_s for one in stages],
        send_s=0.2,
    )
    for row, spans in zip(step.actions, times.spans, strict=True):
        assert [step.played.ends_s[number] for number in row] == pytest.approx([end for _, _, end in spans])


@settings(max_examples=25, deadline=None)
@given(plan=plans(), sigma=st.sampled_from([0.0, 0.1]))
def test_folded_equals_unfolded(plan: Plan, sigma: float) -> None:
    """Worlds of 32: one device for its peers, and one replica for all where nothing differs, give the same step."""
    table, work = table_of(plan), work_of(plan, predictor())
    replicas, peers = plan.data_parallel, plan.layout.context * plan.layout.tensor
    stragglers = Stragglers(sigma=sigma, slow_share=0.1 if sigma else 0.0, slow_factor=1.5, seed=3)
    folded = Fold(replicas=replicas, peers=peers, fold_replicas=stragglers.even)
    whole = Fold(replicas=replicas, peers=peers, fold_replicas=False, fold_peers=False)
    got = simulate_step(table, work, fold=folded, stragglers=stragglers)
    wanted = simulate_step(table, work, fold=whole, stragglers=stragglers)
    assert len(wanted.places) == 32
    assert got.played.makespan_s == pytest.approx(wanted.played.makespan_s, rel=ROUNDING)


@settings(max_examples=60, deadline=None)
@given(plan=plans())
def test_halving_bandwidth_never_speeds_a_step_up(plan: Plan) -> None:
    """Half the rate inside nodes and between them: no plan's simulated step gets shorter."""
    table = table_of(plan)
    fast, slow = (_work(plan, cluster) for cluster in (CLUSTER, _halved(CLUSTER)))
    assert outcome(table, slow).step_s >= outcome(table, fast).step_s * (1 - ROUNDING)


def test_the_same_seed_is_the_same_step() -> None:
    """Starts of all tasks are equal with one seed, the step differs with another."""
    table = build("1F1B", ranks=4, microbatches=8)
    work = uniform(4, forward_s=1, input_s=1, weight_s=1, transfer_s=0.1)

    def played(seed: int) -> SimulatedStep:
        fold = Fold(replicas=3, fold_replicas=False)
        return simulate_step(table, work, fold=fold, stragglers=Stragglers(sigma=0.1, seed=seed))

    assert played(1).played.starts_s == played(1).played.starts_s
    assert played(1).played.makespan_s != played(2).played.makespan_s


def test_one_slow_device_holds_up_everybody() -> None:
    """Replicas that sum gradients end with the slowest; without the sum of others' gradients they would not."""
    table = build("1F1B", ranks=2, microbatches=4)
    stage = Stage(forward_s=1, input_s=1, weight_s=1, sums=(Message(busy_s=0.5),) * 2)
    work = StepWork(stages=(stage, stage), transfer=Message(busy_s=0.01))
    fold = Fold(replicas=2, fold_replicas=False)
    even = simulate_step(table, work, fold=fold)
    slow = simulate_step(table, work, fold=fold, stragglers=Stragglers(slow={(1, 0, 0): 2.0}))
    assert slow.played.makespan_s > even.played.makespan_s + 9


def test_sums_beside_the_backward_are_hidden_and_slow_it_down() -> None:
    """Overlap: earlier than behind the backward, and later than if hiding cost nothing."""
    table = build("1F1B", ranks=1, microbatches=2)
    stage = Stage(forward_s=1, input_s=1, weight_s=1, sums=(Message(busy_s=0.2),) * 4)
    beside = StepWork(stages=(stage,), transfer=Message(busy_s=0.0), slowdown=0.1)
    free, behind = replace(beside, slowdown=0.0), replace(beside, behind=True)
    seconds = [simulate_step(table, work).played.makespan_s for work in (free, beside, behind)]
    assert seconds == pytest.approx([6.2, 6.2 + 3 * 0.1 * 0.2, 6.8])


def _work(plan: Plan, cluster: Cluster) -> StepWork:
    return work_of(plan, predictor(cluster=cluster))


def _halved(cluster: Cluster) -> Cluster:
    import msgspec

    machine = cluster.machine
    links = {name: getattr(machine, name) for name in ("scale_up", "scale_out")}
    slow = {name: msgspec.structs.replace(link, gb_s=link.gb_s / 2) for name, link in links.items()}
    return msgspec.structs.replace(cluster, machine=msgspec.structs.replace(machine, **slow))
