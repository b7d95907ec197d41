"""One rank of `shoal verify` for a pipeline that updates after each microbatch (PipeDream).

What it is compared with is no plain training, but the sequential program with the same stale weights: every
microbatch's gradient, and the weights when the pipeline has drained. As in every proof, the reference's optimizer takes
the gradients that the layout found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from torch import Tensor

from shoal.assembly.run import Run
from shoal.data.cursor import Cursor
from shoal.data.feed import Feed
from shoal.data.sample import Batch
from shoal.engine.proof import (
    Finding,
    HeldBox,
    Tolerances,
    assembled,
    compare_gradients,
    compare_number,
    compare_weights,
)
from shoal.engine.reference import Reference, StaleReference
from shoal.engine.step_result import StepResult
from shoal.optim.schedule import peak_rate
from shoal.parallel.pipeline.pipedream import staleness
from shoal.state.ownership import owned_gradients
from shoal.topology.box import Box
from shoal.verification.reference import (
    axes_of,
    collected,
    give_weights,
    held_weights,
    neighbour_findings,
    reference_of,
)
from shoal.verification.verdict import Verdict

NOTE = "PipeDream: the one process takes the microbatches in turn, each at weights as old as its stages' were"


def verify_pipedream(run: Run, *, steps: int, tolerances: Tolerances, exact: bool) -> Verdict | None:
    """The verdict at rank 0, None at the others. Stops at the first step that differs."""
    reference = reference_of(run) if run.process.place.rank == 0 else None
    peak, _ = peak_rate(run.run_file.optimizer, global_samples=run.run_file.batch.global_samples)
    findings: list[Finding] = []
    with ExitStack() as stack:
        feed = stack.enter_context(closing(run.feed(Cursor())))
        shares = run.mesh.batch_share[1] if reference is not None else 0
        others = [stack.enter_context(closing(run.feed(Cursor(), share=(i, shares)))) for i in range(shares)]
        for number in range(1, steps + 1):
            run.process.announce(f"verify/{number}/ready", str)  # a long wait, which no collective would allow
            give_weights(run, reference)
            found = _take_step(run, number, feed.next().microbatches, peak)
            if reference is not None:
                microbatches = _microbatches(run, others)
                findings += _compare(run, reference, microbatches, found, number, peak, tolerances)
                if not all(finding.holds for finding in findings):
                    findings += neighbour_findings(run, reference, microbatches[0], number, tolerances.loss)
            holds = all(finding.holds for finding in findings)
            if run.process.announce(f"verify/{number}/holds", lambda holds=holds: str(holds)) == "False":
                break
    axes = axes_of(run)
    return None if reference is None else Verdict(run.mesh.layout.describe(), exact, findings, axes, (NOTE,))


@dataclass(frozen=True)
class _LayoutStep:
    """A step of the layout; `gradients[microbatch]` are the parts of all ranks, at rank 0 only."""

    result: StepResult
    gradients: dict[int, list[HeldBox]]
    weights: list[HeldBox]


def _take_step(run: Run, number: int, batches: list[Batch], lr: float) -> _LayoutStep:
    seen: dict[int, list[tuple[str, Box, Tensor]]] = {}

    def record(microbatch: int) -> None:
        owned = owned_gradients(run.generation.gradients.owned)
        seen[microbatch] = [(name, box, values.clone()) for name, box, values in owned]

    result = run.step(number, batches, lr=lr, on_microbatch=record)
    gradients = {microbatch: collected(run, seen[microbatch]) for microbatch in sorted(seen)}
    weights = collected(run, list(held_weights(run.trained)))
    return _LayoutStep(result, gradients, weights)


def _microbatches(run: Run, feeds: Sequence[Feed]) -> list[tuple[Batch, ...]]:
    """The next step's, each of all replicas together."""
    arrange = run.generation.microbatching.uniform
    assert arrange is not None, "the ranks of a pipeline have microbatches of one size"
    return list(zip(*(arrange(feed.next().microbatches) for feed in feeds), strict=True))


def _compare(
    run: Run, reference: Reference, microbatches: Sequence[tuple[Batch, ...]], found: _LayoutStep, number: int,
    lr: float, tolerances: Tolerances,
) -> Iterator[Finding]:  # fmt: skip
    """Every microbatch's gradient, then loss, norm and weights of the whole step."""
    table, stages = run.generation.parts.table, run.generation.parts.stages
    assert table is not None
    assert stages is not None
    stage_of = {name: stage for stage, names in enumerate(stages.names) for name in names}
    stale = StaleReference(reference, stage_of, staleness(table))
    loss_sum, weight, squares = 0.0, 0.0, []
    for index, batches in enumerate(microbatches):
        own_weight = sum(batch.weight for batch in batches)
        if not own_weight:
            stale.update(None, lr=lr)
            continue
        wanted = stale.gradient(number, index, batches)
        loss_sum, weight = loss_sum + wanted.loss * own_weight, weight + own_weight
        squares.append(wanted.norm**2)
        yield from compare_gradients(number, found.gradients[index], wanted.gradients, tolerances=tolerances)
        stale.update(assembled(found.gradients[index], wanted.gradients), lr=lr)
    yield compare_number(number, "loss", found.result.loss, loss_sum / weight, tolerance=tolerances.loss)
    norm = math.sqrt(sum(squares) / len(squares))
    yield compare_number(number, "norm", found.result.norm, norm, tolerance=tolerances.norm)
    after = {name: parameter.detach() for name, parameter in reference.weights.items()}
    yield from compare_weights(number, found.weights, after, tolerance=tolerances.weight)
