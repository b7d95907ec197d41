"""Short texts between ranks, as tensors: for sentences about what went wrong, not for data."""

from __future__ import annotations

import torch

from shoal.comm.collective import Collective

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
