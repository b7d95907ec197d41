"""What a rank reports of its steps: those that count, in order, and now and then a fingerprint of its parameters."""

from __future__ import annotations

import torch

from shoal.assembly.run import Run
from shoal.coordinator.client import Client
from shoal.data.cursor import Interval
from shoal.data.order import share
from shoal.elastic.state_copy import held_state
from shoal.engine.step_result import StepResult
from shoal.gradients.residuals import is_own
from shoal.maths.fingerprint import fingerprint
from shoal.runfile.run_file import statistics_group
from shoal.topology.axes import INSIDE_REPLICA

HALF_BITS = 31


class StepReports:
    """The reports of one rank in one generation. Fingerprints are taken `every` so many steps, 0: never."""

    def __init__(self, client: Client, run: Run, *, every: int) -> None:
        self._client, self._run, self._every = client, run, every
        self._taken: list[tuple[int, float]] = []

    def taken(self, result: StepResult) -> None:
        """A step was taken; it counts when `send` is called."""
        samples = samples_here(self._run)
        sample_s = result.times.forward_backward_s / samples if samples else 0.0
        self._taken.append((self._run.state.progress.cursor.next_position, sample_s))

    def send(self) -> None:
        """All steps since the last call count. Does not wait for the coordinator. Raises `FencedOut`."""
        step, taken, self._taken = self._run.state.progress.step, self._taken, []
        due = self._every > 0 and step // self._every > (step - len(taken)) // self._every
        last = len(taken) - 1
        for number, (stop, sample_s) in enumerate(taken):
            value = replica_fingerprint(self._run) if due and number == last else 0
            self._client.applied(stop=stop, fingerprint=value, sample_s=sample_s)


def samples_here(run: Run) -> int:
    """How many samples of a step this rank's replica computes; a server computes none."""
    run_file, (number, replicas) = run.run_file, run.mesh.batch_share
    working = replicas - run_file.sync.serving_only
    whole, group = Interval(0, run_file.batch.global_samples), statistics_group(run_file.model)
    return len(share(whole, replicas=working, replica=number, group=group)) if number < working else 0


def replica_fingerprint(run: Run) -> int:
    """That of what all replicas have equal: the state without what a rank keeps for itself, or where replicas have
    optimizers of their own the model.

    The ranks of a replica add theirs: all of them call it.
    """
    equal = run.generation.sync.keeps_replicas_equal
    held = held_state(run.state).pieces("" if equal else "model/")
    pieces = {name: piece for name, piece in held.items() if not is_own(name)}
    if run.generation.agreement.served is not None:  # servers hold different rows of a table
        away = tuple(
            f"model/{name}@" for name, role in run.generation.parts.split.roles.items() if role.kind == "table"
        )
        pieces = {name: piece for name, piece in pieces.items() if not name.startswith(away)}
    own = fingerprint(pieces)
    if run.mesh.layout.replica_size == 1:
        return own
    halves = torch.tensor([own >> HALF_BITS, own % (1 << HALF_BITS)], dtype=torch.int64, device=run.device)
    run.mesh.axis(*INSIDE_REPLICA).all_reduce(halves).wait()
    high, low = halves.tolist()
    return ((high << HALF_BITS) + low) % (2**63 - 1) or 1
