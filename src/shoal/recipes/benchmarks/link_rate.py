"""How much of a link's rate a large all-reduce gets: 2 (n-1)/n S bytes each way, over the time on the slowest rank.

Headers alone cost 1 - 1448/1514 = 4.4 % of the rate. Gloo's ring works in segments of at most 1 MiB, the first of which
goes before another can come back: of 50 segments that costs some 2 %, of 12 more than 5.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import torch

from shoal.comm.volume import bytes_sent, wire_bytes
from shoal.launch.environment import Place
from shoal.launch.lab.lab_file import MBIT_BYTES, Lab
from shoal.recipes.benchmarks.link_group import meet
from shoal.recipes.benchmarks.machine import Result
from shoal.recipes.benchmarks.paired import check
from shoal.recipes.benchmarks.turns import slowest

SECONDS, TURNS, SHARE = 2.5, 3, 0.9


def measure(lab: Lab, place: Place, *, name: str, environ: Mapping[str, str]) -> Result | None:
    """One row: all-reduces that take some seconds each."""
    meeting = meet(place, environ)
    clock, group = meeting.group("clock", transport="gloo"), meeting.group("measured", transport="gloo")
    rate = lab.rate_mbit(0, 1) * MBIT_BYTES
    tensor = torch.zeros(int(rate * SECONDS / 4))
    times = [slowest(lambda: group.all_reduce(tensor).wait(), clock) for _ in range(TURNS + 1)][1:]
    if place.rank != 0:
        return None
    sent = bytes_sent("all_reduce", tensor.nbytes, size=group.size, backend="gloo")
    share = sent / statistics.median(times) / rate
    row = {
        "part": "rate",
        "mbit": lab.rate_mbit(0, 1),
        "bytes": tensor.nbytes,
        "seconds": round(statistics.median(times), 4),
        "all_seconds": [round(seconds, 4) for seconds in times],
        "share_of_rate": round(share, 4),
        "share_with_headers": round(share * wire_bytes(sent) / sent, 4),
    }
    return {"rows": [row], "checks": [check(f"share of {lab.rate_mbit(0, 1):g} Mbit/s that arrives", share, SHARE)]}
