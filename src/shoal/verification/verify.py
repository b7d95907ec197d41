"""One rank of `shoal verify`: the same steps under the layout and in one process, compared number by number.

Every step starts from the reference's weights. First the layout computes its gradients; then rank 0, which alone holds
the reference, computes them plainly and compares. The reference's optimizer then takes the gradient that the layout
found: so what the optimizer and the agreement on parameters do is judged by itself, and not by how Adam amplifies the
last bit of a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import msgspec
from torch._C._distributed_c10d import Store

from shoal import units
from shoal.assembly.objects import UserObjects
from shoal.assembly.proofs import remember, said_of
from shoal.assembly.run import Run, open_run, run_in_generation
from shoal.assembly.workload import with_new_model
from shoal.codec.config import NoCodec, ShardCodecConfig
from shoal.data.cursor import Cursor
from shoal.data.feed import Feed
from shoal.engine.config import BFloat16, BFloat16Params, Float8, Float16, Float32, Float64, PrecisionConfig
from shoal.engine.precision import LossScaler, precision_of, whole_float32
from shoal.engine.reference import Reference
from shoal.engine.tolerances import EXACT, HALF, MASTERS, SINGLE, Finding, HeldBox, Tolerances
from shoal.launcher.environment import Place
from shoal.models.config import ForeignModel
from shoal.models.mixture import ReplayRoutes
from shoal.observe.terminal import ProgressBar
from shoal.runfile.run_file import RunFile, declared_group
from shoal.topology.layout import Layout
from shoal.verification import layout_step
from shoal.verification.layout_step import (
    LEFT_OUT,
    MOMENTS_NOTE,
    compare_step,
    expect_step,
    give_moments,
    rounds_moments,
    take_step,
    verify_pipedream,
    without_rounding,
)
from shoal.verification.reference import (
    axes_of,
    give_weights,
    neighbour_findings,
    rate_findings,
    reference_of,
    share_routes,
)
from shoal.verification.refusals import replicas_differ, require_provable
from shoal.verification.strategies import ending_after, provable, steps_of, verify_strategy
from shoal.verification.verdict import Verdict

STEPS = 5
"""Optimizer steps that are compared where nobody says how many."""

HALF_STEPS = 2
"""Steps under the run's own precision, after those in float32, where that has 16 bits."""

LOSSY_STAGES = (
    'pipeline.codec = "{}" was left out: this compares the layout with activations that are sent as they are; with the '
    "codec, what a stage gets is off by up to 1/254 (int8) of its block's largest number, or 1/256 (bfloat16) of itself"
)
LOSSY_PIECES = (
    "[shard_codec] was left out: this compares the layout with pieces that are sent as they are; with it a number is "
    "off by up to 1/254 (int8) or 1/14 (int4) of its block's largest, or 1/256 (bfloat16) of itself"
)
LOSSY_ACTIVATIONS = (
    "memory.offload.activation_bits was left out: this compares the layout with activations that are saved as they "
    "are; with it each is off by up to 1/254 of its block's largest number"
)
DELAYED = (
    "memory.offload.delay_update_after = {} was taken as 0, so that updates of the proof are delayed; after the first "
    "step the layout and the one process go on from their own weights"
)
FLOAT8 = (
    'precision.kind = "float8" was left out: its products are rounded as their scales come, which no tolerance tells '
    "from a mistake; the layout is proved without them"
)
PRECISION = (
    'precision.kind = "{}" was left out: the strategy is proved without it; sync.kind = "allreduce" compares the '
    "layout under it"
)
HALF_SCALE = 2.0**10
"""The loss scale of float16 there: fixed, and too small to overflow."""


def verify_rank(
    run_file: RunFile,
    place: Place,
    objects: UserObjects,
    *,
    steps: int | None,
    exact: bool,
    store: Store | None = None,
    bar: ProgressBar | None = None,
) -> Verdict | None:
    """The verdict at rank 0, None at the others. Stops at the first step that differs. `store`: as for `open_run`.

    `steps` None: `STEPS`, or as many as show all of a strategy under which replicas differ.
    """
    require_provable(run_file)
    with whole_float32():
        return _verify_rank(run_file, place, objects, steps=steps, exact=exact, store=store, bar=bar or ProgressBar())


def _verify_rank(
    run_file: RunFile,
    place: Place,
    objects: UserObjects,
    *,
    steps: int | None,
    exact: bool,
    store: Store | None,
    bar: ProgressBar,
) -> Verdict | None:
    bar.update(f"building the model and its layout over {units.plural(place.world_size, 'rank')}")
    own_precision, tolerances = run_file.precision, EXACT if exact else SINGLE
    differ = replicas_differ(run_file.sync)
    run_file = msgspec.structs.replace(run_file, precision=Float64() if exact else Float32())
    run_file, notes = _without_what_rounds(run_file, differ=differ)
    if differ:
        if isinstance(own_precision, BFloat16 | BFloat16Params | Float8):
            notes.append(PRECISION.format(own_precision.variant))
        steps = steps or steps_of(run_file, place.world_size, least=STEPS)
        run = replace(open_run(ending_after(steps, run_file), place, objects, store=store), run_file=run_file)
        verdict = verify_strategy(run, steps=steps, tolerances=tolerances, exact=exact, bar=bar)
    elif run_file.pipeline.asynchronous:
        steps, run = steps or STEPS, open_run(run_file, place, objects, store=store)
        bar.update(f"comparing {units.plural(steps, 'step')} with one process")
        verdict = verify_pipedream(run, steps=steps, tolerances=tolerances, exact=exact)
    else:
        run = open_run(run_file, place, objects, store=store)
        verdict = _verify_layout(run, own_precision, steps=steps or STEPS, tolerances=tolerances, exact=exact, bar=bar)
    run.settle()
    return None if verdict is None else replace(verdict, notes=(*verdict.notes, *notes))


def _without_what_rounds(run_file: RunFile, *, differ: bool) -> tuple[RunFile, list[str]]:
    """The run file without what rounds on purpose, and a sentence for each thing that is left out. `differ`: replicas
    do, so that one process plays the strategy."""
    run_file, notes = provable(run_file) if differ else (run_file, [])
    if rounds_moments(run_file):
        plain = differ or run_file.pipeline.asynchronous
        notes.append((LEFT_OUT if plain else MOMENTS_NOTE).format(run_file.optimizer.variant))
        run_file = without_rounding(run_file) if plain else run_file
    if run_file.shard_codec != ShardCodecConfig():
        notes.append(LOSSY_PIECES)
        run_file = msgspec.structs.replace(run_file, shard_codec=ShardCodecConfig())
    if run_file.memory.offload.activation_bits is not None:
        notes.append(LOSSY_ACTIVATIONS)
        run_file = with_offload(run_file, activation_bits=None)
    if run_file.memory.offload.delay_update_after:
        notes.append(DELAYED.format(run_file.memory.offload.delay_update_after))
        run_file = with_offload(run_file, delay_update_after=0)
    if (lossy := run_file.pipeline.codec) != "none":
        notes.append(LOSSY_STAGES.format(lossy))
    pipeline = msgspec.structs.replace(run_file.pipeline, codec="none")
    return msgspec.structs.replace(run_file, pipeline=pipeline), notes


def _verify_layout(
    run: Run, own_precision: PrecisionConfig, *, steps: int, tolerances: Tolerances, exact: bool, bar: ProgressBar
) -> Verdict | None:
    """Steps under the layout beside those of one process, and then some under the run's own precision."""
    run_file, notes = run.run_file, []
    if run_file.codec != NoCodec():
        notes.append(layout_step.LOSSY_NOTE.format(run_file.codec.variant))
    with closing(run.feed(Cursor())) as feed, closing(_whole_feed(run)) as whole:
        reference = reference_of(run) if run.process.place.rank == 0 else None
        proof = _Proof(run, reference, feed, whole, rate_findings(run), bar)
        holds = proof.take(range(1, steps + 1), tolerances)
        if holds and not exact and isinstance(own_precision, BFloat16 | BFloat16Params | Float16):
            proof.switch(own_precision)
            masters = isinstance(own_precision, BFloat16Params)
            proof.take(range(steps + 1, steps + HALF_STEPS + 1), MASTERS if masters else HALF)
            notes.append(f"the last {HALF_STEPS} steps are in {own_precision.variant}")
    run, axes = proof.run, axes_of(proof.run)
    if proof.reference is None:
        return None
    if proof.replayed:
        notes.append(f"{proof.replayed} routes of near-ties were taken from the reference")
    if isinstance(own_precision, Float8):
        notes.append(FLOAT8)
    notes += run.tiers.unused(run.model)
    unkeyed = said_of(proof.unkeyed, compiled=run_file.run.compile)
    verdict = Verdict(
        run.mesh.layout.describe(), exact, proof.findings, axes, tuple(notes), unkeyed,
        narrowing=narrowing(run_file, run.mesh.layout),
    )  # fmt: skip
    if verdict.holds and isinstance(run_file.model, ForeignModel):
        remember(run_file, run.generation.parts.split.shapes)
    return verdict


def with_offload(run_file: RunFile, **changed: int | None) -> RunFile:
    """The same with other keys of `[memory.offload]`."""
    offload = msgspec.structs.replace(run_file.memory.offload, **changed)
    return msgspec.structs.replace(run_file, memory=msgspec.structs.replace(run_file.memory, offload=offload))


def narrowing(run_file: RunFile, layout: Layout) -> str:
    """Which keys, changed one at a time, tell what computes otherwise; empty where there is one thing only."""
    sizes = {axis: layout.size(axis) for axis in ("shard", "pipeline", "context", "tensor", "expert")}
    split = [f"layout.{axis}=1" for axis, size in sizes.items() if size > 1]
    keys = split if len(split) > 1 else []
    if sizes["pipeline"] > 1:
        keys = ['pipeline.schedule="GPipe"'] * (run_file.pipeline.schedule != "GPipe") + keys
        keys = ["pipeline.microbatches=1"] * (run_file.pipeline.microbatches != 1) + keys
    elif run_file.batch.micro_samples not in (None, run_file.batch.global_samples):
        keys = [f"batch.micro_samples={run_file.batch.global_samples}", *keys]
    if run_file.memory.recompute != "none":
        keys.append('memory.recompute="none"')
    return f". To find out where, change one key at a time: {', '.join(keys)}" if keys else ""


@dataclass
class _Proof:
    """The layout and, at rank 0, the reference, which take the same steps. `apart`: whether both go on by themselves,
    as each holds an update that its weights do not show yet.
    """

    run: Run
    reference: Reference | None
    feed: Feed
    whole: Feed
    findings: list[Finding]
    bar: ProgressBar
    moments: Sequence[HeldBox] = ()
    replayed: int = 0
    unkeyed: frozenset[str] = frozenset()
    apart: bool = False

    def take(self, numbers: range, tolerances: Tolerances) -> bool:
        """The steps `numbers`, up to the first that differs. Does everything hold so far?"""
        for number in numbers:
            self._take_one(number, tolerances, last=numbers[-1])
            holds = all(finding.holds for finding in self.findings)
            if self.run.process.announce(f"verify/{number}/holds", lambda holds=holds: str(holds)) == "False":
                return False
        return True

    def switch(self, config: PrecisionConfig) -> None:
        """From now on both compute under `config`: its autocast of float32 weights, or bfloat16 copies of masters."""
        precision = precision_of(config)
        if precision.mixed is not None:
            self._with_masters(config)
            return
        scale = HALF_SCALE if isinstance(config, Float16) else 1.0
        scaler = LossScaler(scale, dynamic=False, growth_steps=1)
        self.run = replace(self.run, step=self.run.step.under(precision, scaler))
        if self.reference is not None:
            compute = replace(self.reference.compute, precision=precision)
            self.reference = replace(self.reference, compute=compute, scale=scale)

    def _with_masters(self, config: PrecisionConfig) -> None:
        """The parameters of a layout are of one type for as long as it stands: it is built again."""
        run, generation = self.run, self.run.mesh.generation + 1
        run.settle()
        run.end()
        run_file = msgspec.structs.replace(run.run_file, precision=config)
        workload = with_new_model(replace(run.workload, precision=precision_of(config)), run_file, run.device)
        self.run, self.moments = run_in_generation(run_file, run.process, workload, number=generation), ()
        self.apart = False
        if self.reference is not None:
            self.reference = reference_of(self.run)

    def _take_one(self, number: int, tolerances: Tolerances, *, last: int) -> None:
        run, reference = self.run, self.reference
        self.bar.update(f"step {number} of {last}: one process computes it", done=2 * number - 2, total=2 * last)
        batches = self.whole.next().microbatches if reference is not None else []
        wanted, routes = expect_step(reference, batches, number)
        if reference is not None and isinstance(run.run_file.model, ForeignModel):
            self.unkeyed |= reference.compute.randomness.unkeyed(run.device)
        run.process.announce(f"verify/{number}/expected", str)  # a long wait, which no collective would allow
        self.bar.update(f"step {number} of {last}: the layout computes it", done=2 * number - 1, total=2 * last)
        if not self.apart:
            give_weights(run, reference)
        self.apart = run.run_file.memory.offload.delay_update_after is not None
        tap = ReplayRoutes(share_routes(run, routes, key=f"verify/{number}/routes"), tolerances.loss)
        found = take_step(run, number, self.feed.next().microbatches, tap)
        self.replayed += found.replayed
        if reference is not None and wanted is not None:
            give_moments(reference, self.moments)
            rounding = lambda: reference.rounding(batches, wanted)  # noqa: E731
            own = list(compare_step(reference, wanted, found, number, run.rate(number), tolerances, rounding))
            if not all(finding.holds for finding in own) and not self.unkeyed:  # whose draws differ with the batch, too
                own += neighbour_findings(run, reference, batches, number, tolerances.loss)
            self.findings += own
        self.moments = found.moments


def _whole_feed(run: Run) -> Feed:
    """The global batches, each in one piece, or in the groups that the run file states."""
    batch = run.run_file.batch
    return run.feed(Cursor(), share=(0, 1), micro_samples=declared_group(run.run_file.model) or batch.global_samples)
