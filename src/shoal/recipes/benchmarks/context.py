"""A long sequence over context ranks: what a rank keeps for the backward beside one process, and the loss of both.

Counted are the storages that autograd saves, each once, at the end of the forward: the most there are. Of n ranks each
keeps 1 / n; Ulysses also keeps its result on both sides of the exchange.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import Store

from shoal.comm.config import WireConfig
from shoal.comm.mesh import build_mesh
from shoal.engine.proof import SINGLE
from shoal.launch.environment import Place
from shoal.memory.tracker import SavedActivations
from shoal.models.build import build
from shoal.models.config import GPTConfig
from shoal.models.initialise import initialise
from shoal.parallel.context.put import KINDS, put_context
from shoal.parallel.context.shard import positions
from shoal.recipes.benchmarks.paired import check
from shoal.topology.layout import Layout

MODEL = GPTConfig(layers=2, width=32, heads=4)
ABOVE_THE_SHARE = 1.1
"""Of a rank, over the n-th part of what one process keeps."""
TIMEOUT_S = 600.0

Side = tuple[float, float, float]
"""Loss of the sequence, most bytes that a rank kept, seconds of the forward."""


def by_kind(place: Place, store: Store, *, tokens: int) -> dict[str, Side]:
    """Each kind of context parallelism over all ranks; the same on each."""
    layout = Layout(context=place.world_size)
    mesh = build_mesh(layout, place.rank, store=store, device=torch.device("cpu"), wire=WireConfig(timeout_s=TIMEOUT_S))
    here, found = positions(tokens, size=place.world_size, rank=place.rank), {}
    for kind in sorted(KINDS):
        model = _model()
        put_context(model, mesh.axis("context"), kind)
        loss, kept_bytes, seconds = _forward(model, _sequence(tokens), here)
        total, most = torch.tensor(loss, dtype=torch.float64), torch.tensor([kept_bytes, seconds], dtype=torch.float64)
        mesh.world.all_reduce(total).wait()
        mesh.world.all_reduce(most, "max").wait()
        found[kind] = (float(total), float(most[0]), float(most[1]))
    return found


def alone(*, tokens: int) -> Side:
    """One process with the whole sequence."""
    return _forward(_model(), _sequence(tokens), torch.arange(tokens))


def compared(kinds: dict[str, Side], whole: Side, *, tokens: int, ranks: int) -> dict[str, Any]:
    """A row for each kind, and its checks."""
    rows, checks = [], []
    for kind, (loss, kept_bytes, seconds) in {"one process": whole, **kinds}.items():
        share, off = kept_bytes / whole[1], abs(loss / whole[0] - 1)
        rows.append(
            {
                "context": kind,
                "ranks": ranks if kind in kinds else 1,
                "tokens": tokens,
                "activation_bytes": int(kept_bytes),
                "share": round(share, 4),
                "loss": loss / tokens,
                "loss_relative_error": off,
                "forward_s": round(seconds, 2),
            }
        )
        if kind in kinds:
            name = f"context = {ranks}, {kind}, {tokens} tokens"
            checks.append(
                check(f"{name}: activations of a rank over its share", share * ranks, ABOVE_THE_SHARE, at_most=True)
            )
            checks.append(check(f"{name}: loss against one process", off, SINGLE.loss, at_most=True))
    return {"rows": rows, "checks": checks}


def _forward(model: nn.Module, sequence: Tensor, places: Tensor) -> Side:
    """The summed loss of the tokens at `places`, with a graph whose saved tensors are counted."""
    begin_s = time.perf_counter()
    with SavedActivations(apart=model.parameters()) as saved:
        logits = model(sequence[:, places], places[None])
        loss = F.cross_entropy(logits.flatten(0, 1), sequence[:, places + 1].flatten(), reduction="sum")
    return float(loss.detach()), saved.peak_bytes, time.perf_counter() - begin_s


def _model() -> nn.Module:
    model = build(MODEL)
    initialise(model, seed=0, device="cpu")
    return model


def _sequence(tokens: int) -> Tensor:
    """`[1, tokens + 1]`, int64, the same everywhere."""
    return torch.randint(0, MODEL.vocabulary, (1, tokens + 1), generator=torch.Generator().manual_seed(0))
