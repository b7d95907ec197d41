"""A real sshd on a free port of loopback, with keys of its own: nothing of the host's own ssh is touched.

python -m tests.services.sshd install            apt-get, as root
python -m tests.services.sshd run FOLDER         until Ctrl-C; prints the command that reaches it

with sshd(folder) as command:
    subprocess.run([*shlex.split(command), "127.0.0.1", "hostname"])
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.ports import free_port
from tests.waiting import HANG_S

PACKAGES = ("openssh-server", "openssh-client")


def why_not() -> str | None:
    """Why none can be started here; None where it can."""
    missing = [name for name in ("sshd", "ssh", "ssh-keygen") if _program(name) is None]
    if missing:
        return f"OpenSSH is not installed ({', '.join(missing)} missing): python -m tests.services.sshd install"
    if os.getuid() != 0:
        return "sshd separates privileges, so it has to be started as root"
    return None


def install() -> None:
    """Debian's packages; their own service stays stopped."""
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    subprocess.run(["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES], check=True, env=environ)


@contextlib.contextmanager
def sshd(folder: Path) -> Iterator[str]:
    """Runs until the end of the block; the `ssh` command that reaches it, to which host and command are added."""
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    port = free_port()
    # sshd refuses to start without the folder in which it confines the part that talks to strangers.
    Path("/run/sshd").mkdir(exist_ok=True)
    options = {
        "ListenAddress": "127.0.0.1",
        "Port": port,
        "HostKey": folder / "host_key",
        "AuthorizedKeysFile": folder / "user_key.pub",
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "PermitRootLogin": "prohibit-password",
        "PidFile": "none",
    }
    (folder / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in options.items()))
    program = _program("sshd")
    assert program is not None
    with (folder / "sshd.log").open("wb") as log:
        daemon = subprocess.Popen([program, "-D", "-e", "-f", folder / "sshd_config"], stdout=log, stderr=log)
    try:
        _wait(port, folder / "sshd.log")
        yield (
            f"ssh -p {port} -i {folder}/user_key -o IdentitiesOnly=yes -o BatchMode=yes -o LogLevel=ERROR "
            f"-o StrictHostKeyChecking=no -o UserKnownHostsFile={folder}/known_hosts"
        )
    finally:
        daemon.terminate()
        daemon.wait(HANG_S)


def _wait(port: int, log: Path) -> None:
    end_s = time.monotonic() + HANG_S
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        assert time.monotonic() < end_s, f"sshd did not start:\n{log.read_text()}"
        time.sleep(0.05)


def _program(name: str) -> str | None:
    """Debian keeps daemons where plain users' PATH does not look."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


if __name__ == "__main__":
    if sys.argv[1] == "install":
        install()
    else:
        place = Path(sys.argv[2]).resolve()
        place.mkdir(parents=True, exist_ok=True)
        with sshd(place) as running, contextlib.suppress(KeyboardInterrupt):
            print(running, flush=True)
            while True:
                time.sleep(3600)
