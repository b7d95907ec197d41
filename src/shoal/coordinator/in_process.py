"""The coordinator in a thread of another process, as the launcher has it: on loopback, for this one run."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from shoal.coordinator.client import Address
from shoal.coordinator.journal import Journal
from shoal.coordinator.serve import listen
from shoal.coordinator.service import Service
from shoal.launch.environment import LOOPBACK
from shoal.launch.handshake import make_token
from shoal.resilience.events import Decision
from shoal.resilience.fingerprints import Divergence
from shoal.resilience.membership import Rules
from shoal.resilience.stragglers import Slow


@contextlib.contextmanager
def coordinator_in(
    folder: Path,
    rules: Rules,
    *,
    told: Callable[[Decision | Divergence | Slow | Exception], None],
    journal: Callable[[Path], Journal] = Journal,
) -> Iterator[Address]:
    """Serves until the end of the block, with its token in `folder`, and what `journal` opens there.

    `told` hears, in the coordinator's thread, of decisions, of verdicts on fingerprints, of slow members, and of the
    fault that ended the service, such as a full disk. Raises `EnvironmentFault` where it cannot start.
    """
    token, records = make_token(folder / "token"), journal(folder / "journal")
    with contextlib.closing(records), contextlib.closing(listen(LOOPBACK, 0)) as listener:
        service = Service(rules, records, token=token, told=told)
        loop = asyncio.new_event_loop()
        serving = loop.create_task(service.run(listener))

        def serve() -> None:
            with contextlib.closing(loop):
                try:
                    loop.run_until_complete(serving)
                except asyncio.CancelledError:
                    pass
                except Exception as error:
                    told(error)

        thread = threading.Thread(target=serve, name="shoal-coordinator", daemon=True)
        thread.start()
        try:
            yield Address(LOOPBACK, listener.getsockname()[1], token)
        finally:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(serving.cancel)
            thread.join()
