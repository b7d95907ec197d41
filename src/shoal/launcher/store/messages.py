"""What a rank asks the store, and what it answers: frames of MessagePack (`launcher.frames`), matched by number.

Sizes are bounded: a value has at most `MOST_VALUE_BYTES`, and a reply carries as many values as fit into
`REPLY_BYTES`, but at least one; the rest is asked for again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from shoal.errors import EnvironmentFault
from shoal.launcher.handshake import make_token

Operation = Literal[
    "set", "get", "wait", "check", "add", "append", "compare_set", "delete_key", "num_keys", "list_keys"
]

SERVICE = b"store"
"""What the store's key is derived for (`handshake.key_for`)."""
MOST_VALUE_BYTES = 16 << 20
MOST_FRAME_BYTES = 2 * MOST_VALUE_BYTES + (1 << 20)
"""Of two values, which `compare_set` has, and keys."""
REPLY_BYTES = 8 << 20


class Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`amount` is what `add` adds. `get` and `wait` wait for all `keys`, `timeout_s` seconds at most."""

    number: int
    operation: Operation
    keys: Sequence[str] = ()
    values: Sequence[bytes] = ()
    amount: int = 0
    timeout_s: float = 0.0


class Reply(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """To the request of that number. `found`: whether the keys were there in time; `amount`: a count or a sum."""

    number: int
    found: bool = True
    values: Sequence[bytes] = ()
    amount: int = 0


REQUESTS = msgspec.msgpack.Decoder(Request)
REPLIES = msgspec.msgpack.Decoder(Reply)


# Which token the processes of a job prove to each other.
#
#     SHOAL_JOB_TOKEN    a file, which is written where there is none. Shoal's launchers set it: on one host to a file
#                        that ends with the run, on several to `token` in the folder of the launchers' logs
#     else               the user's own, $XDG_STATE_HOME/shoal/token or ~/.local/state/shoal/token, which the first
#                        process that needs it writes: hosts that share home directories share it
#
# Only the owner can read these files. So another user of a host, or of the network, has no part in a run.


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
