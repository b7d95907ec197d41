"""The page beside a run: served by the process that starts the ranks, in a thread, for as long as they run."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.errors import MissingExtra
from shoal.page.live_run import LiveRun
from shoal.page.server import Follower, listen, open_page

HOST = "127.0.0.1"
BESIDE_POLL_S = 2.0
"""The ranks need the cores more than the page does."""


@contextmanager
def page_beside(directory: Path, *, port: int, say: Callable[[str], None]) -> Iterator[str]:
    """Serves the page of the run in `directory`, which may only be about to begin, on loopback; port 0: any that is
    free. Gives the address, token included, after `say` has heard of it.

    Raises `InUse` for a port that is taken, `MissingExtra` without starlette and uvicorn.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise MissingExtra("uvicorn", extra="page", purpose="observe.page") from error
    token = secrets.token_urlsafe(24)
    with Follower([LiveRun(directory, begun=False)], poll_s=BESIDE_POLL_S) as follower:
        application = open_page(follower, token=token)
        with listen(HOST, port) as listener:
            config = uvicorn.Config(application, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
            server = uvicorn.Server(config)
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="shoal-page", daemon=True)
            thread.start()
            address = f"http://{HOST}:{listener.getsockname()[1]}/?token={token}"
            say(f"live page: {address}")
            try:
                yield address
            finally:
                server.should_exit = True
                thread.join()
