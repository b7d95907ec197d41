"""Which token the processes of a job prove to each other.

    SHOAL_JOB_TOKEN    a file, which is written where there is none. Shoal's launchers set it: on one host to a file
                       that ends with the run, on several to `token` in the folder of the launchers' logs
    else               the user's own, $XDG_STATE_HOME/shoal/token or ~/.local/state/shoal/token, which the first
                       process that needs it writes: hosts that share home directories share it

Only the owner can read these files. So another user of a host, or of the network, has no part in a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shoal.errors import EnvironmentFault
from shoal.launch.handshake import make_token

JOB_TOKEN = "SHOAL_JOB_TOKEN"
"""The variable that names the file of the job's token."""


def job_token(environ: Mapping[str, str]) -> bytes:
    """The token of this process's job. Raises `EnvironmentFault` where it can be neither read nor written."""
    if environ.get(JOB_TOKEN):
        return make_token(Path(environ[JOB_TOKEN]))
    state = environ.get("XDG_STATE_HOME")
    try:
        path = (Path(state) if state else Path.home() / ".local" / "state") / "shoal" / "token"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (OSError, RuntimeError) as error:
        raise EnvironmentFault(
            f"the token that ranks prove to each other can be kept in no folder of this user ({error}): "
            f"set {JOB_TOKEN} to the path of a file on every rank"
        ) from error
    return make_token(path)
