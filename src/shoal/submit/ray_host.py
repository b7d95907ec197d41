"""The actor of a host: runs the host's launcher as a process, which ends with the actor."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Sequence

from shoal.launch.orphans import ask_kernel


class RayHost:
    """One host of a job. Ray makes an actor of it; it imports no Ray itself but to ask for its own address."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def meeting_point(self) -> tuple[str, int]:
        """This host's address in the cluster, and a port that was free just now."""
        from ray.util import get_node_ip_address

        with socket.socket() as listener:
            listener.bind(("", 0))
            return str(get_node_ip_address()), listener.getsockname()[1]

    def run(self, command: Sequence[str], variables: dict[str, str], folder: str) -> int:
        """Run the launcher to its end; its exit code, 128 + n for signal n. Without a `folder` it starts in the actor's
        own, which is the job's working directory.
        """
        # The kernel ends the launcher with this thread, and the launcher's guards end its ranks.
        self._process = subprocess.Popen(
            command, cwd=folder or None, env={**os.environ, **variables}, preexec_fn=ask_kernel, start_new_session=True
        )
        code = self._process.wait()
        return 128 - code if code < 0 else code

    def stop(self, within_s: float) -> None:
        """SIGTERM to the launcher, which passes it on to its ranks; returns when they have saved and left."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(within_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
