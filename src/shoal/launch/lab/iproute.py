"""`ip` and `tc`: whether this process may use them, and running several of their commands at once.

What the kernel counted on the interfaces of this network namespace.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import EnvironmentFault

TIMEOUT_S = 30.0
INSTEAD = 'or set lab.network = "throttle", which slows the ranks\' own processes down, approximately'


def why_not() -> str | None:
    """Why this process cannot make a lab, as a sentence with the repair; None where it can."""
    if sys.platform != "linux":
        return f"a lab is made of Linux's network namespaces, and this is {sys.platform}; use Linux, {INSTEAD}"
    if os.geteuid() != 0:
        return f"a lab needs root to make network namespaces, and this is user {os.geteuid()}; use sudo, {INSTEAD}"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"a lab needs iproute2, and there is no {' and no '.join(missing)}; apt-get install iproute2, {INSTEAD}"
    return None


def require() -> None:
    """Raises `EnvironmentFault` where this process cannot make a lab."""
    if (reason := why_not()) is not None:
        raise EnvironmentFault(reason)


def ip(commands: Sequence[str], *, namespace: str | None = None) -> str:
    """Runs lines of `ip`, stops at the first that fails, and returns their output. Raises `EnvironmentFault`."""
    return _batch("ip", commands, namespace)


def tc(commands: Sequence[str], *, namespace: str | None = None) -> str:
    """The same of `tc`."""
    return _batch("tc", commands, namespace)


def inside(namespace: str) -> list[str]:
    """What stands before a command that runs in a namespace, in the same process."""
    return ["ip", "netns", "exec", namespace]


def _batch(tool: str, commands: Sequence[str], namespace: str | None) -> str:
    where = ["-n", namespace] if namespace is not None else []
    text = "".join(f"{command}\n" for command in commands)
    try:
        done = subprocess.run(
            [tool, *where, "-batch", "-"],
            input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, start_new_session=True,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentFault(f"{tool} could not be run ({error}); {INSTEAD}") from error
    if done.returncode != 0:
        raise EnvironmentFault(
            f"{tool} refused {_refused(commands, done.stderr)!r} ({_reason(done.stderr)}): a lab needs a kernel with "
            f"network namespaces, veth, bridges and tbf, and the right to use them; run it on such a machine, {INSTEAD}"
        )
    return done.stdout


def _refused(commands: Sequence[str], complaint: str) -> str:
    """The line that `Command failed -:3` tells of."""
    number = complaint.rpartition("-:")[2].strip()
    return commands[int(number) - 1] if number.isdigit() and int(number) <= len(commands) else "; ".join(commands)


def _reason(complaint: str) -> str:
    lines = [line for line in complaint.splitlines() if line and not line.startswith("Command failed")]
    return lines[0].removeprefix("Error: ").rstrip(".") if lines else "without a reason"


INTERFACES = Path("/sys/class/net")
LOOPBACK = "lo"


@dataclass(frozen=True)
class Counted:
    """Sent to other hosts since the interfaces were made, headers included."""

    bytes_sent: int
    packets_sent: int

    def __sub__(self, earlier: Counted) -> Counted:
        return Counted(self.bytes_sent - earlier.bytes_sent, self.packets_sent - earlier.packets_sent)


def counted(interfaces: Path = INTERFACES) -> Counted:
    """The sum over all interfaces but the loopback."""
    names = [path for path in interfaces.iterdir() if path.name != LOOPBACK]
    return Counted(_sum(names, "tx_bytes"), _sum(names, "tx_packets"))


def _sum(interfaces: list[Path], counter: str) -> int:
    return sum(int((path / "statistics" / counter).read_text()) for path in interfaces)
