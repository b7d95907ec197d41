"""Which server has which elements of a model's parameters. Pure.

All elements in a row, tensor by tensor, are cut into one part for each server, as even as whole cache lines allow; so
a large tensor is divided between servers, and a server has the ends of two tensors and whole ones between them.

    elements   | w0 ..... | w1 .. | w2 ........... |
    parts      | server 0     | server 1           |

An optimizer that works on whole matrices needs each tensor on one server: `whole` gives them out largest first, each
to the server with the least so far (Graham's LPT rule).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn import Parameter

from shoal.state import Owned, Trained, owned_run, owned_whole

ALIGNMENT = 16
"""Elements: parts begin on a cache line."""


class ParameterRun(NamedTuple):
    """The elements `start` .. `stop` of tensor number `tensor`, row by row."""

    tensor: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements in it."""
        return self.stop - self.start


def partition(lengths: Sequence[int], servers: int, *, whole: bool = False) -> tuple[tuple[ParameterRun, ...], ...]:
    """The runs of every server, in the order of tensors; none for servers beyond the elements. `lengths` in elements.

    `whole`: no tensor is divided.
    """
    return _whole(lengths, servers) if whole else _even(lengths, servers)


def _even(lengths: Sequence[int], servers: int) -> tuple[tuple[ParameterRun, ...], ...]:
    total = sum(lengths)
    lines = -(-total // ALIGNMENT)
    cuts = [min(total, lines * server // servers * ALIGNMENT) for server in range(servers + 1)]
    parts: list[list[ParameterRun]] = [[] for _ in range(servers)]
    begin = 0
    for tensor, length in enumerate(lengths):
        for server in range(servers):
            start, stop = max(begin, cuts[server]), min(begin + length, cuts[server + 1])
            if start < stop:
                parts[server].append(ParameterRun(tensor, start - begin, stop - begin))
        begin += length
    return tuple(map(tuple, parts))


def _whole(lengths: Sequence[int], servers: int) -> tuple[tuple[ParameterRun, ...], ...]:
    parts: list[list[ParameterRun]] = [[] for _ in range(servers)]
    loads = [0] * servers
    for tensor in sorted(range(len(lengths)), key=lambda tensor: (-lengths[tensor], tensor)):
        server = min(range(servers), key=lambda server: (loads[server], server))
        parts[server].append(ParameterRun(tensor, 0, lengths[tensor]))
        loads[server] += lengths[tensor]
    return tuple(tuple(sorted(part)) for part in parts)


def owned_pieces(owned: Sequence[Owned], runs: Sequence[ParameterRun], values: Tensor) -> list[Owned]:
    """What a server updates, as parts of the unsplit parameters `owned`: views of `values` [numel], the elements of
    `runs`, one behind the other.
    """
    pieces, at = [], 0
    for run in runs:
        of, place = owned[run.tensor], slice(at, at + run.numel)
        at += run.numel
        whole = run.numel == of.parameter.numel()
        shape = of.parameter.shape if whole else (run.numel,)
        piece = Parameter(values[place].view(shape))
        if whole:
            pieces.append(owned_whole(Trained(of.holding, of.parameter), piece))
        else:
            pieces.append(owned_run(of.holding, piece, run.start, run.stop))
    return pieces
