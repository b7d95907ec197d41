"""The launcher of an elastic run on one host: a process a rank, and the coordinator if there is no other.

With a coordinator elsewhere, each host has such a launcher, for its own replicas. Ranks keep their slot's log;
whichever is rank 0 of the run writes to the terminal of its host.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from shoal.coordinator.journal import journal_of
from shoal.coordinator.service import coordinator_in
from shoal.coordinator.watch import view_of, watching
from shoal.errors import UsageError
from shoal.files import temporary_folder
from shoal.fleet.fleet import Event, Fleet
from shoal.fleet.processes import TOKEN, Starter, coordinator_from, coordinator_variables, replicas_here
from shoal.fleet.scaling import Speeds, scaling
from shoal.launcher import sockets
from shoal.launcher.environment import LOOPBACK
from shoal.launcher.failure import FAILURE_FOLDER
from shoal.launcher.orphans import LAUNCHER_PID, LAUNCHER_PIPE
from shoal.launcher.spawn import ExitCode, listening, no_survivors, pipe
from shoal.launcher.supervision import say
from shoal.resilience.config import ElasticConfig
from shoal.resilience.membership import Rules
from shoal.resilience.preemption import watching_for_preemption


@dataclass(frozen=True)
class ElasticJob:
    """What is launched: `command` as each of the `ranks` of each replica, to step `steps` of the run (None: until a
    script ends), each of `global_samples`. `warn` hears what is said of losses and the coordinator, beside the
    terminal. `start_s`: how long a rank may take until it is ready to join; None: as long as it likes. `preemption`:
    the file and the URL that say that this host is about to be taken away.
    """

    command: Sequence[str]
    ranks: int
    steps: int | None
    run_directory: Path
    global_samples: int = 1
    warn: Callable[[str], object] = str
    start_s: float | None = None
    preemption: tuple[str | None, str | None] = None, None


def run_elastic(
    job: ElasticJob, config: ElasticConfig, *, environ: Mapping[str, str], keep_fds: Sequence[int] = ()
) -> tuple[ExitCode, bool]:
    """Runs `job` as replicas; the exit code that the launcher should exit with, and whether replicas on other hosts go
    on with the run. `environ` may name a coordinator.

    Call it from the main thread, as `launcher.spawn.run_ranks`. Raises `EnvironmentFault` where nothing can be started.
    """
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    elsewhere = coordinator_from(environ)
    if elsewhere is not None and config.policy != "available":
        raise UsageError(
            f'elastic.policy = "{config.policy}" with a coordinator of several hosts, which no launcher scales: use '
            "`shoal coordinator scale`, and leave elastic.policy out"
        )
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        stack.enter_context(listening(events))
        if elsewhere is None:
            rules = Rules(
                config.min, config.max, silence_s=config.silence_s, accept_s=config.accept_s, hang_s=config.hang_s
            )
            journal = journal_of(environ)
            address = stack.enter_context(coordinator_in(folder, rules, told=events.put, journal=journal))
            token, slots, host = folder / "token", config.max + config.spares, ""
        else:
            address, token, slots = elsewhere, Path(environ.get(TOKEN, "")), replicas_here(environ)
            host = sockets.address_towards(elsewhere.host, elsewhere.port)
        variables = coordinator_variables(address, token.absolute())
        starter = stack.enter_context(
            _starter(job, slots, folder, environ, host=host, coordinator=variables, keep_fds=keep_fds)
        )
        fleet = Fleet(config, job.steps, address, folder, events, starter, job.run_directory, job.warn)
        fleet.start_s = job.start_s
        stack.enter_context(no_survivors(fleet.processes))
        if elsewhere is not None:
            stack.enter_context(_seeing_others(fleet))
        fleet.speeds = Speeds(job.global_samples)
        stack.enter_context(scaling(config, address, fleet.speeds, say=say))
        for slot in range(slots):
            fleet.start(slot)
        stack.enter_context(watching_for_preemption(*job.preemption, told=events.put, warn=say))
        while fleet.running:
            fleet.react()
        code = fleet.conclude()
        return code, fleet.goes_on_elsewhere(code)


@contextmanager
def _starter(
    job: ElasticJob,
    slots: int,
    folder: Path,
    environ: Mapping[str, str],
    *,
    host: str,
    coordinator: Mapping[str, str],
    keep_fds: Sequence[int],
) -> Iterator[Starter]:
    """What starts the ranks of `slots` replicas, which end with this process. `host`: this one's address, where there
    are others ("": there are none).
    """
    with pipe() as read_end:
        terminal_fd = os.dup(1)
        try:
            yield Starter(
                list(job.command),
                ranks=job.ranks,
                slots=slots,
                host=host or LOOPBACK,
                several_hosts=bool(host),
                run_directory=job.run_directory / "hosts" / host if host else job.run_directory,
                environ={
                    **environ,
                    FAILURE_FOLDER: str(folder),
                    LAUNCHER_PID: str(os.getpid()),
                    LAUNCHER_PIPE: str(read_end),
                },
                coordinator=coordinator,
                fds=(read_end, terminal_fd, *keep_fds),
                terminal_fd=terminal_fd,
            )
        finally:
            os.close(terminal_fd)


def _seeing_others(fleet: Fleet) -> AbstractContextManager[None]:
    """The fleet hears from a coordinator elsewhere who else takes part."""
    since = view_of(fleet.address)
    fleet.members = since.members
    return watching(
        fleet.address,
        lambda: tuple(fleet.running),
        since=since,
        told=fleet.events.put,
        silence_s=fleet.config.silence_s,
    )
