"""A host that is about to be taken away: the run stops after the step, with a checkpoint, before the deadline.

The first rank of each host watches for the notice, whatever launcher has started it, and asks for a stop as a signal to
it would. All ranks learn of it in the vote of the step. In an elastic run the launcher watches: see `shoal.fleet`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal.assembly.run import Run
from shoal.launch.signals import StopRequest
from shoal.resilience.preemption import Preemption, watching_for_preemption


@contextmanager
def stopping_when_preempted(run: Run, stop: StopRequest, *, say: Callable[[str], None]) -> Iterator[None]:
    """In the block, a notice that the run file names asks `stop`; `say` hears of it."""
    keys, first = run.run_file.run, run.process.place.local_rank == 0

    def told(notice: Preemption) -> None:
        say(f"{notice.sentence}: saving after this step, and stopping")
        stop.ask()

    file, url = (keys.preemption_file, keys.preemption_url) if first else (None, None)
    with watching_for_preemption(file, url, told=told, warn=say):
        yield


@contextmanager
def stop_request_of(run: Run, *, say: Callable[[str], None]) -> Iterator[StopRequest]:
    """What asks the run to stop: a signal, or a notice."""
    with StopRequest() as stop, stopping_when_preempted(run, stop, say=say):
        yield stop
