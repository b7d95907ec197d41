"""Measures the links between all ranks of a group: a latency and a rate for each direction of each pair, and the gap.

One pair at a time, while the others wait at a barrier, so that nobody shares a link. A tiny message there and back
takes twice the latency; a larger one there and a tiny one back gives the rate, several tiny ones there and one back
what each further message costs. Medians, the same on all ranks.
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
_TAG = 900_001


def probe(group: Collective, *, device: torch.device, size_bytes: int = 1 << 18, repeats: int = 5) -> Links:
    """The links of `group`, its hosts read from them. Every rank has to call it; n (n-1) measurements.

    `size_bytes` has to exceed what the network lets through in a burst.
    """
    own = torch.ones(group.size, 3, dtype=torch.float64, device=device)
    for source, target in permutations(range(group.size), 2):
        if group.rank == source:
            own[target] = torch.tensor(_time(group, target, device, size_bytes, repeats), dtype=torch.float64)
        elif group.rank == target:
            _answer(group, source, device, size_bytes, repeats)
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
    medians = []
    for size, count in _rounds(size_bytes):
        message, reply = _bytes(size, device), _bytes(1, device)
        times = []
        for _ in range(repeats + 1):
            begin_s = time.perf_counter()
            sent = [group.send(message, to=target, tag=_TAG) for _ in range(count)]
            group.recv(reply, source=target, tag=_TAG).wait()
            for handle in sent:
                handle.wait()
            times.append(time.perf_counter() - begin_s)
        medians.append(statistics.median(times[1:]))  # the first opens connections and touches memory
    tiny_s, large_s, many_s = medians
    rate = size_bytes / max(large_s - tiny_s, LEAST_SHARE * large_s)
    return tiny_s / 2, rate, max(0.0, many_s - tiny_s) / (MANY - 1)


def _answer(group: Collective, source: int, device: torch.device, size_bytes: int, repeats: int) -> None:
    for size, count in _rounds(size_bytes):
        messages, reply = [_bytes(size, device) for _ in range(count)], _bytes(1, device)
        for _ in range(repeats + 1):
            for handle in [group.recv(message, source=source, tag=_TAG) for message in messages]:
                handle.wait()
            group.send(reply, to=source, tag=_TAG).wait()


def _rounds(size_bytes: int) -> list[tuple[int, int]]:
    """(bytes of a message, how many of them before the answer)."""
    return [(1, 1), (size_bytes, 1), (1, MANY)]


def _bytes(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)
