"""Measures the links between all ranks of a group: a latency and a rate for each direction of each pair, and the gap.

One pair measures at a time while the others wait at a barrier, so that nobody shares a link. A tiny message there and
back takes twice the latency; a larger one there and a tiny one back gives the rate; several tiny ones there and one
back give what each further message costs. Inside a host the larger message hardly takes longer than the tiny one: then
a still larger one is sent, because a rate is a difference of two times and must not be their noise. Medians are taken;
all ranks get the same numbers.
"""

from __future__ import annotations

import statistics
import time
from itertools import permutations

import torch

from shoal.comm.collective import Collective
from shoal.topology.links import Links, Matrix, measured

LEAST_SHARE = 0.1
"""Of a timing that counts as transfer when noise makes the latency look like all of it."""
MANY = 8
"""Tiny messages at once, to see what each costs beside the latency."""
DOMINATES = 4.0
"""A transfer is measured well when it takes this many times as long as a tiny message."""
GROWTH, MOST_BYTES = 8, 1 << 24
_TAG, _TOLD = 900_001, 900_002


def probe(group: Collective, *, device: torch.device, size_bytes: int = 1 << 18, repeats: int = 5) -> Links:
    """The links of `group`, its hosts read from them. Every rank has to call it; n (n-1) measurements.

    `size_bytes`, the first size of the larger message, has to exceed what the network lets through in a burst.
    """
    own = torch.ones(group.size, 3, dtype=torch.float64, device=device)
    for source, target in permutations(range(group.size), 2):
        if group.rank == source:
            own[target] = torch.tensor(_time(group, target, device, size_bytes, repeats), dtype=torch.float64)
        elif group.rank == target:
            _answer(group, source, device, repeats)
        group.barrier().wait()
    everyone = torch.empty(group.size * group.size, 3, dtype=torch.float64, device=device)
    group.all_gather(everyone, own).wait()
    latency, rate, gap = everyone.view(group.size, group.size, 3).cpu().unbind(-1)
    apart = ~torch.eye(group.size, dtype=torch.bool)
    return measured(_matrix(latency), _matrix(rate), gap_s=float(gap[apart].median()) if group.size > 1 else 0.0)


def _matrix(tensor: torch.Tensor) -> Matrix:
    return tuple(tuple(row) for row in tensor.tolist())


def _time(
    group: Collective, target: int, device: torch.device, size_bytes: int, repeats: int
) -> tuple[float, float, float]:
    """(latency_s, bytes_s, gap_s) towards `target`."""
    tiny_s = _median_s(group, target, device, 1, 1, repeats)
    many_s = _median_s(group, target, device, 1, MANY, repeats)
    large_s = _median_s(group, target, device, size_bytes, 1, repeats)
    while large_s < DOMINATES * tiny_s and size_bytes * GROWTH <= MOST_BYTES:
        size_bytes *= GROWTH
        large_s = _median_s(group, target, device, size_bytes, 1, repeats)
    _tell(group, target, device, 0, 0)
    rate = size_bytes / max(large_s - tiny_s, LEAST_SHARE * large_s)
    return tiny_s / 2, rate, max(0.0, many_s - tiny_s) / (MANY - 1)


def _median_s(group: Collective, target: int, device: torch.device, size: int, count: int, repeats: int) -> float:
    """Seconds for `count` messages of `size` bytes there and a tiny one back."""
    _tell(group, target, device, size, count)
    message, reply, times = _bytes(size, device), _bytes(1, device), []
    for _ in range(repeats + 1):
        begin_s = time.perf_counter()
        sent = [group.send(message, to=target, tag=_TAG) for _ in range(count)]
        group.recv(reply, source=target, tag=_TAG).wait()
        for handle in sent:
            handle.wait()
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times[1:])  # the first opens connections and touches memory


def _tell(group: Collective, target: int, device: torch.device, size: int, count: int) -> None:
    """What comes next: a size and how many of it; none at the end."""
    group.send(torch.tensor([size, count], device=device), to=target, tag=_TOLD).wait()


def _answer(group: Collective, source: int, device: torch.device, repeats: int) -> None:
    """The other side of `_median_s`, until `source` tells the end."""
    told = torch.zeros(2, dtype=torch.int64, device=device)
    while True:
        group.recv(told, source=source, tag=_TOLD).wait()
        size, count = (int(number) for number in told)
        if count == 0:
            return
        messages, reply = [_bytes(size, device) for _ in range(count)], _bytes(1, device)
        for _ in range(repeats + 1):
            for handle in [group.recv(message, source=source, tag=_TAG) for message in messages]:
                handle.wait()
            group.send(reply, to=source, tag=_TAG).wait()


def _bytes(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)
