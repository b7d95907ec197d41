"""The beginning of a generation on one replica: groups and parts are built anew, and everybody gets the state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from shoal.errors import CollectiveError
from shoal.launch.rendezvous import STARTED
from shoal.recipes.elastic.state_copy import HeldState, share_state
from shoal.recipes.process import Process
from shoal.recipes.run import Run, next_generation, run_in_generation
from shoal.recipes.sameness import require_same, require_same_code, require_same_start, samples_of, shapes_of
from shoal.recipes.workload import Workload, with_new_model
from shoal.resilience.events import View
from shoal.runfile.run_file import RunFile
from shoal.sync.config import ServerConfig


class Generations:
    """Builds this replica's run in one generation after the other, on the same workload."""

    def __init__(self, run_file: RunFile, workload: Workload) -> None:
        self._run_file, self._workload = run_file, workload
        self._sameness = {"model": shapes_of(workload.model), "data": samples_of(workload.data)}
        self._used = False

    def rehearse(self, process: Process) -> None:
        """Builds a run of this replica alone, of `process`, and drops it: whoever joins a run that waits should have
        everything in memory that is loaded when it is first used.
        """
        run_in_generation(_for_one(self._run_file), process, self._workload, number=0).end()
        self._used = True

    def open(self, process: Process, view: View) -> Run:
        """The run in the generation of `view`, before it has its state. Blocks until all members are here.

        Raises `CollectiveError` where one is lost meanwhile, and `ConfigError` or `UserCodeError` where a member that
        has come anew was started with another run file, code or data than rank 0.
        """
        rank = process.place.rank
        if brings_newcomers(view):
            require_same_start(rank, process.announce, self._run_file)
            require_same_code(rank, process.announce)
            require_same(rank, process.announce, self._sameness)
        number = int(process.announce("generation", lambda: str(next_generation(self._run_file))))
        workload = self._workload
        if self._used:
            workload = replace(workload, model=with_new_model(workload, self._run_file, process.device).model)
        self._used = True
        process.rendezvous.barrier(STARTED)
        return run_in_generation(self._run_file, process, workload, number=number)


def _for_one(run_file: RunFile) -> RunFile:
    """The run file for a replica alone, which neither dedicated servers nor backup workers can do without."""
    sync = run_file.sync
    needs_others = isinstance(sync, ServerConfig) and (sync.servers or sync.backup)
    return msgspec.structs.replace(run_file, sync=ServerConfig()) if needs_others else run_file


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
