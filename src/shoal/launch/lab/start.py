"""Running ranks in a lab: each on its host, all of them supervised like ranks of this machine.

Where the lab's network is "throttle", the hosts are names and the links are kept to by the ranks themselves, who are
told the rates.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from shoal.launch.environment import Environ
from shoal.launch.lab.lab_file import Lab
from shoal.launch.lab.network import Network, network
from shoal.launch.rank_process import HostEntry
from shoal.launch.root_cause import ExitCode
from shoal.launch.spawn import run_ranks
from shoal.launch.supervision import Patience, say

RATES = "SHOAL_LAB_RATES"
"""The variable that tells throttled ranks their hosts and the rates between them."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def run_in_lab(
    lab: Lab,
    command: Sequence[str],
    *,
    run_directory: Path,
    environ: Environ,
    keep_fds: Sequence[int] = (),
    patience: Patience | None = None,
) -> ExitCode:
    """`shoal.launch.spawn.run_ranks` with the ranks on the hosts of `lab`, which is gone afterwards.

    Call it from the main thread. Raises `EnvironmentFault` where there can be no lab.
    """
    environ = {"TORCH_CPP_LOG_LEVEL": "ERROR", **environ}  # addresses of a lab have no names, which torch warns of
    common: dict[str, Any] = {
        "processes": lab.ranks,
        "run_directory": run_directory,
        "environ": environ,
        "keep_fds": keep_fds,
        "patience": patience,
    }
    if lab.network == "throttle":
        say(
            f"lab: {len(lab.hosts)} hosts by name only; ranks keep to the rates between them by themselves, which is "
            'an approximation (lab.network = "kernel" shapes real links)'
        )
        return run_ranks(command, **common, entry_of=lambda rank: throttled_entry(lab, rank))
    with unwinding(), network(lab) as net:
        return run_ranks(command, **common, entry_of=lambda rank: kernel_entry(net, rank))


def kernel_entry(net: Network, rank: int) -> HostEntry:
    """A rank in the namespace of its host."""
    host = net.lab.host_of[rank]
    return HostEntry(net.enter(host), {**_place(net.lab, rank), **net.environ(host)})


def throttled_entry(lab: Lab, rank: int) -> HostEntry:
    """A rank of this machine that takes itself for one of a lab's host, and keeps to its rates."""
    host = lab.hosts[lab.host_of[rank]]
    rates = json.dumps({"hosts": lab.host_of, "bytes_s": lab.bytes_s()})
    return HostEntry((), {**_place(lab, rank), "SHOAL_HOST": host.name, RATES: rates})


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """A signal that would end the process becomes an exception, once, so that what was made is removed."""
    raised: list[int] = []

    def unwind(number: int, frame: FrameType | None) -> None:
        if not raised:
            raised.append(number)
            raise SystemExit(128 + number)

    chosen = [number for number in _STOP_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in chosen:
        signal.signal(number, unwind)
    try:
        yield
    finally:
        for number in chosen:
            signal.signal(number, signal.SIG_DFL)


def _place(lab: Lab, rank: int) -> Mapping[str, str]:
    host = lab.hosts[lab.host_of[rank]]
    place = {"LOCAL_RANK": rank - host.ranks.start, "LOCAL_WORLD_SIZE": len(host.ranks), "GROUP_RANK": host.number}
    return {name: str(value) for name, value in place.items()}
