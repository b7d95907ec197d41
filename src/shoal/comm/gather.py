"""Gathers named tensors or short texts of all ranks: for comparisons and error messages, not for training.

For named tensors each rank sends one header (names, types and shapes as JSON) and its bytes; rank 0 receives them from
one rank after the other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from shoal.comm.collective import Collective

Named = Sequence[tuple[str, Tensor]]
_SIZES, _HEADER, _PAYLOAD = 101, 102, 103  # tags


def gather_named(items: Named, group: Collective, *, device: torch.device) -> list[list[tuple[str, Tensor]]]:
    """At rank 0, what each rank passed, in rank order, on the CPU; an empty list on the others.

    It travels on `device`, one that the group's backend takes.
    """
    if group.rank != 0:
        _send(items, group, device)
        return []
    own = [(name, tensor.detach().cpu().clone()) for name, tensor in items]
    return [own] + [_receive(group, rank, device) for rank in range(1, group.size)]


def _send(items: Named, group: Collective, device: torch.device) -> None:
    entries = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in items]
    header = torch.frombuffer(bytearray(json.dumps(entries).encode()), dtype=torch.uint8)
    parts = [tensor.detach().cpu().contiguous().flatten().view(torch.uint8) for _, tensor in items if tensor.numel()]
    payload = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8)
    group.send(torch.tensor([header.numel(), payload.numel()], device=device), to=0, tag=_SIZES).wait()
    group.send(header.to(device), to=0, tag=_HEADER).wait()
    if payload.numel():
        group.send(payload.to(device), to=0, tag=_PAYLOAD).wait()


def _receive(group: Collective, source: int, device: torch.device) -> list[tuple[str, Tensor]]:
    sizes = torch.zeros(2, dtype=torch.int64, device=device)
    group.recv(sizes, source=source, tag=_SIZES).wait()
    header, payload = (torch.zeros(int(size), dtype=torch.uint8, device=device) for size in sizes)
    group.recv(header, source=source, tag=_HEADER).wait()
    if payload.numel():
        group.recv(payload, source=source, tag=_PAYLOAD).wait()
    payload = payload.cpu()
    items, at = [], 0
    for name, dtype_name, shape in json.loads(bytes(header.cpu().numpy())):
        dtype = getattr(torch, dtype_name)
        size = prod(shape) * dtype.itemsize
        items.append((name, payload[at : at + size].clone().view(dtype).view(shape)))
        at += size
    return items


LIMIT_BYTES = 1024


def gather_texts(text: str, group: Collective, *, device: torch.device) -> list[str]:
    """Every rank's text, in rank order, each cut to `LIMIT_BYTES`."""
    if group.size == 1:
        return [text]
    raw = text.encode()[:LIMIT_BYTES]
    own = torch.zeros(LIMIT_BYTES, dtype=torch.uint8)
    own[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else own[:0]
    everyone = torch.empty(group.size * LIMIT_BYTES, dtype=torch.uint8, device=device)
    group.all_gather(everyone, own.to(device)).wait()
    rows = everyone.view(group.size, LIMIT_BYTES).cpu().numpy()
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]


def gather_lines(lines: Sequence[str], group: Collective, device: torch.device) -> list[list[str]]:
    """Every rank's lines, in rank order, however many; characters beyond ASCII are escaped."""
    text, part = "\n".join(lines).encode("ascii", "backslashreplace").decode(), LIMIT_BYTES
    longest = max(int(length) for length in gather_texts(str(len(text)), group, device=device))
    found = [""] * group.size
    for start in range(0, longest, part):
        parts = gather_texts(text[start : start + part], group, device=device)
        found = [before + more for before, more in zip(found, parts, strict=True)]
    return [text.split("\n") for text in found]
