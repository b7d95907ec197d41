"""One rank of `shoal verify` for a strategy under which replicas take steps of their own, or servers make the updates.

One process keeps a copy of the model and the optimizer for each replica, hands each copy its share of the samples, and
plays the strategy's rule (`plain_rules`). Copies and replicas begin at the same weights and then go on by themselves,
over several agreements. In each step are compared: every replica's loss, norm and gradients, computed plainly at the
weights that it has; the weights that its own update made, where the copy's optimizer takes the gradient that the
replica found, as in every proof; the weights after the agreement. So what differs first says whether a replica is wrong
or the agreement.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor

from shoal.assembly.proofs import remember, said_of
from shoal.assembly.run import Run
from shoal.codec.config import NoCodec
from shoal.comm.collective import gather_named
from shoal.data.cursor import Cursor
from shoal.data.feed import Feed
from shoal.data.sample import Batch
from shoal.engine.reference import Reference, ReferenceGradient
from shoal.engine.tolerances import (
    Finding,
    HeldBox,
    Quantity,
    Tolerances,
    assembled,
    compare_gradients,
    compare_number,
    compare_weights,
)
from shoal.errors import ConfigError
from shoal.models.config import ForeignModel
from shoal.models.mixture import ReplayRoutes
from shoal.observe.terminal import ProgressBar
from shoal.runfile.run_file import RunFile, declared_group
from shoal.sync.config import LocalConfig, StreamingConfig
from shoal.verification.plain_rules import Rule, Setting, Stepped, Vectors, fragments_of, rule_of, telling_steps
from shoal.verification.reference import (
    axes_of,
    compare_buffers,
    give_weights,
    neighbour_findings,
    rate_findings,
    share_routes,
)
from shoal.verification.replicas import Copies, ReplicasStep, TakenStep
from shoal.verification.verdict import Verdict

CODEC_LEFT_OUT = (
    'codec.kind = "{}" was left out: this compares the strategy with what replicas send as it is; verify the codec '
    'with sync.kind = "allreduce"'
)
PERIOD_STAYS = "sync.wait_share was left out: a period that follows the clock is compared as sync.period = {}"
MET_ONCE = (
    "all replicas met once, after the last step: --steps {} compares two meetings more; a smaller sync.{} takes fewer"
)


def provable(run_file: RunFile) -> tuple[RunFile, list[str]]:
    """The run file whose strategy is proved, and sentences about what was left out."""
    said, sync = [], run_file.sync
    if isinstance(sync, LocalConfig) and sync.wait_share:
        run_file = msgspec.structs.replace(run_file, sync=msgspec.structs.replace(sync, wait_share=0.0))
        said.append(PERIOD_STAYS.format(sync.period))
    if run_file.codec != NoCodec():
        said.append(CODEC_LEFT_OUT.format(run_file.codec.variant))
        run_file = msgspec.structs.replace(run_file, codec=NoCodec())
    return run_file, said


def ending_after(steps: int, run_file: RunFile) -> RunFile:
    """The same run, which makes its last agreement after `steps` steps."""
    return msgspec.structs.replace(run_file, run=msgspec.structs.replace(run_file.run, steps=steps))


def steps_of(run_file: RunFile, ranks: int, *, least: int) -> int:
    """Steps that show all of the strategy, and at least so many, if the run has them."""
    replicas = run_file.layout.layout(ranks).replicate
    return min(max(least, telling_steps(run_file.sync, replicas)), run_file.run.steps)


def verify_strategy(run: Run, *, steps: int, tolerances: Tolerances, exact: bool, bar: ProgressBar) -> Verdict | None:
    """The verdict at rank 0, None at the others. Stops at the first step that differs.

    The run's strategy ends after `steps`; its run file may be of a longer run, whose learning rates it takes.
    """
    proof = _Proof(run, steps, tolerances, bar, rate_findings(run))
    proof.take()
    axes = axes_of(run)
    if proof.copies is None or proof.rule is None:
        return None
    unkeyed = said_of(proof.copies.unkeyed, compiled=run.run_file.run.compile)
    rule = f'sync.kind = "{run.run_file.sync.variant}": {proof.rule.equation}'
    layout = run.mesh.layout.describe()
    verdict = Verdict(layout, exact, proof.findings, axes, tuple(proof.notes()), unkeyed, rule)
    if verdict.holds and isinstance(run.run_file.model, ForeignModel):
        remember(run.run_file, run.generation.parts.split.shapes)
    return verdict


@dataclass
class _Proof:
    """The replicas and, at rank 0, their `copies` and the `rule` that these play; None on other ranks."""

    run: Run
    steps: int
    tolerances: Tolerances
    bar: ProgressBar
    findings: list[Finding]

    def __post_init__(self) -> None:
        run = self.run
        if run.generation.looks_up:
            raise ConfigError(
                'sync.kind = "server" with an EmbeddingTable: its rows lie on the servers alone, and no worker has '
                'weights to compare; verify the model with sync.kind = "allreduce"'
            )
        self.replicas = run.mesh.layout.replicate - run.run_file.sync.serving_only
        self.meetings, self.replayed = 0, 0
        fragments = _fragments(run)
        self.copies: Copies | None = None
        self.rule: Rule | None = None
        if run.process.place.rank == 0:
            self.copies = Copies(run, self.replicas)
            start = self.copies.vectors[0]
            masks = _masks(fragments, self.copies.of[0].weights)
            self.rule = rule_of(run.run_file.sync, Setting(start, self.replicas, masks))

    def take(self) -> None:
        """All steps, up to the first that differs."""
        run = self.run
        give_weights(run, None if self.copies is None else self.copies.of[0])
        with ExitStack() as stack:
            feed = stack.enter_context(closing(run.feed(Cursor())))
            shares = 0 if self.copies is None else self.replicas * run.mesh.layout.shard
            micro = declared_group(run.run_file.model) or run.run_file.batch.global_samples
            wholes = [
                stack.enter_context(closing(run.feed(Cursor(), share=(i, shares), micro_samples=micro)))
                for i in range(shares)
            ]
            for number in range(1, self.steps + 1):
                self._take_one(number, feed.next().microbatches, self._of_replicas(wholes))
                holds = all(finding.holds for finding in self.findings)
                if run.process.announce(f"verify/{number}/holds", lambda holds=holds: str(holds)) == "False":
                    return

    def notes(self) -> Iterator[str]:
        """What the proof does not cover, or took from the reference."""
        sync = self.run.run_file.sync
        period = "meet_every" if hasattr(sync, "meet_every") else "period"
        every = getattr(sync, period, None)
        if self.meetings < 2 and every and every < self.run.run_file.run.steps:
            yield MET_ONCE.format(2 * every + 1, period)
        if self.replayed:
            yield f"{self.replayed} routes of near-ties were taken from the reference"

    def _of_replicas(self, wholes: Sequence[Feed]) -> list[list[Batch]]:
        """The next step's samples of each replica, at rank 0."""
        shares, each = [feed.next().microbatches for feed in wholes], self.run.mesh.layout.shard
        return [[batch for own in shares[at : at + each] for batch in own] for at in range(0, len(shares), each)]

    def _take_one(self, number: int, own: list[Batch], batches: list[list[Batch]]) -> None:
        run, last = self.run, self.steps
        self.bar.update(f"step {number} of {last}: one process computes it", done=2 * number - 2, total=2 * last)
        step, wanted, routes = ReplicasStep(run, number, own), [], None
        if self.copies is not None:
            self.findings += self._went_on(number, step.before)
            at = [self._parts_of(k, step.before) for k in range(self.replicas)]
            wanted, routes = self.copies.gradients(number, batches, at)
        run.process.announce(f"verify/{number}/expected", str)  # a long wait, which no collective would allow
        self.bar.update(f"step {number} of {last}: the replicas compute it", done=2 * number - 1, total=2 * last)
        routes = share_routes(run, routes, key=f"verify/{number}/routes")
        found = step.take(ReplayRoutes(routes, self.tolerances.loss))
        self.replayed += found.replayed
        if self.copies is not None and self.rule is not None:
            self.findings += self._compare(number, self.copies, self.rule, batches, wanted, found)

    def _went_on(self, number: int, before: Sequence[HeldBox]) -> Iterator[Finding]:
        """What every replica goes on with is what the agreement of the step before left to it."""
        assert self.copies is not None, "this is rank 0"
        for k, vector in enumerate(self.copies.vectors):
            own, tolerance = self._parts_of(k, before), self.tolerances.weight
            wanted = self.copies.named(vector)
            yield from compare_weights(number - 1, own, wanted, tolerance=tolerance, quantity="agreement")

    def _compare(
        self,
        number: int,
        copies: Copies,
        rule: Rule,
        batches: Sequence[list[Batch]],
        wanted: Sequence[ReferenceGradient],
        found: TakenStep,
    ) -> Iterator[Finding]:
        for difference in found.routes:
            where = f"{difference.layer}, token {difference.place} of sample {difference.sample}"
            yield Finding(number, "route", where, -1, difference.gap, self.tolerances.loss)
        gradients = []
        for k, copy in enumerate(copies.of):
            own = list(self._of_replica(k, number, copy, batches[k], wanted[k], found))
            if not all(finding.holds for finding in own) and not copies.unkeyed:
                own += neighbour_findings(self.run, copy, batches[k], number, self.tolerances.loss)
            yield from own
            gradients.append(assembled(self._parts_of(k, found.gradients), wanted[k].gradients))
        weights, lr = [sum(batch.weight for batch in own) for own in batches], self.run.rate(number)
        copies.update(gradients, weights, lr=lr, together=rule.updates_together)
        stepped = Stepped(number, copies.vectors, weights, [g.loss for g in wanted], lr, last=number == self.steps)
        if not rule.updates_together:
            yield from self._compare_weights(number, copies, stepped.x, found.made, "weight")
        outcome = rule.agree(stepped)
        self.meetings += outcome.together
        copies.go_on(outcome.own, together=outcome.together)
        shown = outcome.shown + outcome.shown[:1] * (self.run.run_file.sync.serving_only if outcome.together else 0)
        yield from self._compare_weights(number, copies, shown, found.weights, "agreement")
        for k, copy in enumerate(copies.of):
            yield from compare_buffers(copy, number, self._parts_of(k, found.buffers), self.tolerances.gradient)

    def _of_replica(
        self,
        k: int,
        number: int,
        copy: Reference,
        batches: Sequence[Batch],
        wanted: ReferenceGradient,
        found: TakenStep,
    ) -> Iterator[Finding]:
        """Loss, norm and gradients of replica `k`."""
        rank = next(rank for rank in range(self.run.mesh.world.size) if self._replica(rank) == k)
        (loss, norm), tolerances = found.numbers[rank], self.tolerances
        yield replace(compare_number(number, "loss", loss, wanted.loss, tolerance=tolerances.loss), rank=rank)
        yield replace(compare_number(number, "norm", norm, wanted.norm, tolerance=tolerances.norm), rank=rank)
        rounding = lambda: copy.rounding(batches, wanted)  # noqa: E731
        own = self._parts_of(k, found.gradients)
        yield from compare_gradients(number, own, wanted.gradients, tolerances=tolerances, rounding=rounding)

    def _compare_weights(
        self, number: int, copies: Copies, x: Vectors, parts: Sequence[HeldBox], quantity: Quantity
    ) -> Iterator[Finding]:
        """The weights of each replica beside its vector."""
        for k, vector in enumerate(x):
            own, tolerance = self._parts_of(k, parts), self.tolerances.weight
            yield from compare_weights(number, own, copies.named(vector), tolerance=tolerance, quantity=quantity)

    def _replica(self, rank: int) -> int:
        return self.run.mesh.layout.index("replicate", rank)

    def _parts_of(self, k: int, parts: Sequence[HeldBox]) -> list[HeldBox]:
        return [part for part in parts if self._replica(part.rank) == k]


def _fragments(run: Run) -> dict[str, int]:
    """At rank 0, the fragment of each tensor under streaming, and its number under Adasum, which takes each by itself.
    Raises `ConfigError` if ranks cut fragments otherwise.
    """
    sync = run.run_file.sync
    if isinstance(sync, LocalConfig) and sync.merge == "adasum":
        return {one.name: number for number, one in enumerate(run.generation.gradients.owned)}
    if not isinstance(sync, StreamingConfig):
        return {}
    sizes = {one.name: one.parameter.numel() for one in run.generation.gradients.owned}
    own = [(json.dumps(fragments_of(sizes, sync.fragments)), torch.zeros(0))]
    found: dict[str, int] = {}
    agree = True
    for ((said, _),) in gather_named(own, run.mesh.world, device=run.device):
        of_rank = json.loads(said)
        agree = agree and all(found.get(name, number) == number for name, number in of_rank.items())
        found |= of_rank
    if run.process.announce("verify/fragments", lambda: str(agree)) == "False":
        raise ConfigError(
            'sync.kind = "streaming" with this layout: each rank of a replica agrees on fragments of its own pieces, '
            "which are no whole tensors; verify it with layout.replicate alone"
        )
    return found


def _masks(fragments: Mapping[str, int], weights: Mapping[str, Tensor]) -> list[Tensor]:
    """For each fragment which numbers of a vector are in it, bool `[numbers]`."""
    of = [torch.full((weight.numel(),), fragments[name]) for name, weight in weights.items() if fragments]
    return [torch.cat(of) == p for p in range(max(fragments.values(), default=-1) + 1)]
