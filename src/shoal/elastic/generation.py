"""The beginning of a generation on one replica: groups and parts are built anew, and everybody gets the state."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch

from shoal.assembly.generation import next_generation
from shoal.assembly.objects import UserObjects
from shoal.assembly.process import Process
from shoal.assembly.reading import short_epoch
from shoal.assembly.run import Run, run_in_generation
from shoal.assembly.sameness import (
    KnownCode,
    require_same,
    require_same_code,
    require_same_start,
    shapes_of,
)
from shoal.assembly.saving import CopySender, build_saver
from shoal.assembly.workload import Workload, load_workload, with_new_model, with_samples
from shoal.checkpoint.commit import newest_verified
from shoal.data.feed import StepShare
from shoal.elastic.committed_state import CommittedState, gather_served
from shoal.elastic.state_copy import HeldState, load_state, share_state
from shoal.errors import CollectiveError, ShoalError
from shoal.launcher.rendezvous import STARTED
from shoal.resilience.events import View
from shoal.runfile.run_file import RunFile, default_micro_samples

LAST_SAVE_LOCK, OTHERS = ".last-save.lock", "others"


class Generations:
    """Builds this replica's run in one generation after the other, on the same workload. `copies` sends checkpoints of
    all of them to a remote store.
    """

    def __init__(self, run_file: RunFile, workload: Workload) -> None:
        self._run_file, self._workload = run_file, with_samples(workload, run_file)
        self._sameness = {"model": shapes_of(workload.model), "data": self._workload.samples}
        self._used = False
        self._code = KnownCode(workload.trained_with)
        self.copies = CopySender()

    def rehearse(self, process: Process) -> None:
        """Builds a run of this replica alone, of `process`, and drops it: whoever joins a run that waits should have
        everything in memory that is loaded when it is first used.
        """
        run_in_generation(_for_one(self._run_file), process, self._workload, number=0).end()
        self._workload = with_new_model(self._workload, self._run_file, process.device)

    def save(self, held: HeldState, process: Process, directory: Path, *, newest: bool) -> str:
        """Saves `held`, unless a checkpoint as new is there; what became of it, in a clause. The ranks of the replica
        call it together, on `process`, theirs alone. Replicas that share `directory` save one after the other.
        `newest`, as the first rank knows it: no others go on from a newer state, and save that.
        """
        try:
            with ExitStack() as stack:
                find = lambda: _newest_of_all(directory, stack) if newest else OTHERS  # noqa: E731
                saved = process.announce("newest checkpoint", find)
                if saved == OTHERS:
                    return "others have gone on from a newer state"
                if int(saved) >= held.step:
                    return f"the checkpoint of step {saved} has the newest state"
                workload = with_new_model(self._workload, self._run_file, process.device)
                number = int(process.announce("generation", lambda: str(next_generation(self._run_file))))
                run = run_in_generation(_for_one(self._run_file), process, workload, number=number)
                stack.callback(run.end)
                load_state(run.state, held)
                saver = build_saver(run, directory, None)
                origin = {"layout": run.mesh.layout.to_dict(), "generation": number}
                saver.save(held.step, run.state.tensors(), run.state.to_json(), **origin)
                reports = saver.wait()
                if any(report.committed for report in reports):
                    return f"the state after step {held.step} is saved, and the same command resumes from it"
                why = "; ".join(report.error for report in reports if report.error)
        except (ShoalError, OSError) as error:
            why = str(error)
        return f"the state after step {held.step} could not be saved ({why}): the newest checkpoint counts"

    def open(self, process: Process, view: View) -> Run:
        """The run in the generation of `view`, before it has its state. Blocks until all members are here.

        Raises `CollectiveError` where one is lost meanwhile, and `ConfigError` or `UserCodeError` where a member that
        has come anew was started with another run file, code or data than rank 0.
        """
        rank = process.place.rank
        if brings_newcomers(view):
            require_same_start(rank, process.announce, self._run_file)
            require_same_code(rank, process.announce, self._workload.trained_with, own=self._code.now())
            require_same(rank, process.announce, self._sameness)
        number = int(process.announce("generation", lambda: str(next_generation(self._run_file))))
        workload = self._workload
        if self._used:
            workload = with_new_model(workload, self._run_file, process.device)
        self._used = True
        process.rendezvous.barrier(STARTED)
        return run_in_generation(self._run_file, process, workload, number=number)


def _newest_of_all(directory: Path, stack: ExitStack) -> str:
    """The step of the newest checkpoint, 0 without one, when no other replica saves there; none does until `stack`
    ends.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = stack.enter_context((directory / LAST_SAVE_LOCK).open("ab"))
    fcntl.flock(lock, fcntl.LOCK_EX)
    manifest, _ = newest_verified(directory)
    return str(0 if manifest is None else manifest.step)


def load_generations(run_file: RunFile, objects: UserObjects, *, device: torch.device, ranks: int) -> Generations:
    """The workload, loaded, and the generations that train it; `ranks` are the most that a generation has."""
    workload = load_workload(
        run_file,
        objects,
        device=device,
        environ=os.environ,
        layout=run_file.layout.layout(ranks),
        micro_samples=default_micro_samples(run_file),
    )
    return Generations(run_file, workload)


def _for_one(run_file: RunFile) -> RunFile:
    """The run file for a replica alone."""
    return msgspec.structs.replace(run_file, sync=run_file.sync.for_one())


def brings_newcomers(view: View) -> bool:
    """Whether a member lacks the state that the others hold."""
    return not set(view.members) <= set(view.holders)


def state_for(run: Run, view: View, held: HeldState | None, load: Callable[[], None]) -> HeldState | None:
    """The state with which the generation goes on: `held`, or a copy of a holder's.

    None: `load` has brought the run to the newest checkpoint, because nobody holds a state. Raises `CollectiveError`
    where the only holder is no member.
    """
    if not view.holders:
        load()
        return None
    if not brings_newcomers(view):
        return held
    root = next((member for member, name in enumerate(view.members) if name in view.holders), None)
    if root is None:
        raise CollectiveError("the replica that holds the newest state has left: waiting for another generation")
    return share_state(held, run.mesh.axis("replicate"), root=root, device=run.device)


def take_state(run: Run, view: View, committed: CommittedState, load: Callable[[], None]) -> int:
    """Brings `run` to the state with which the generation goes on. How many steps servers are ahead of its progress.

    Raises `CollectiveError` where a server is lost, and drops what is left: the next generation begins with the newest
    checkpoint; and as `state_for` does.
    """
    if run.generation.agreement.carried == "nothing" or not view.holders:
        committed.take_over(run, state_for(run, view, committed.held, load))
        return 0
    ahead = gather_served(run.state, committed.held, run.mesh.axis("replicate"), run.device)
    if ahead is None:
        committed.held = None
        raise CollectiveError("a server was lost, and with it a part of the state: waiting for another generation")
    if run.generation.coded is not None:  # a worker that serves from now on pushes nothing
        run.generation.coded.hand_over(run.mesh.axis("replicate"), leaving=False)
    committed.take_over(run, None)
    return ahead


def skip_steps(run: Run, steps: int) -> list[int]:
    """Servers have the updates of so many more `steps`: their samples are used. The position after each."""
    epoch = short_epoch(run.run_file.batch, len(run.workload.data.train))
    share, positions = StepShare(run.run_file.batch.global_samples, epoch=epoch), list[int]()
    for _ in range(steps):
        cursor = run.state.progress.cursor
        run.state.progress.advance(cursor.take(share.samples_at(cursor.next_position))[1])
        positions.append(run.state.progress.cursor.next_position)
    return positions
