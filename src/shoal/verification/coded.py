"""The proof of a layout whose gradients are coded: what was sent, and what was kept back, make the gradient.

    sum over ranks of decode(encode(g_r + e_r)) + sum of e_r (new) - sum of e_r (old) = sum of g_r

holds for every codec with error feedback, however much it leaves out. So a gradient of the layout is compared with the
reference's after what the ranks have kept back in this step is added to it. The optimizers of both take the gradient
that was decoded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shoal.assembly.run import Run
from shoal.comm.exchanges.coded import Coded
from shoal.engine.proof import HeldBox
from shoal.topology.box import Box
from shoal.verification.reference import collected

NOTE = 'codec.kind = "{}" is lossy: gradients were compared after adding what its error feedback had kept back'


def kept_back(run: Run) -> list[HeldBox]:
    """What each rank has kept back of its gradients in the step under way, less what it had kept before: the parts of
    all ranks at rank 0. All ranks call it, between the exchange of gradients and the update.
    """
    own: list[tuple[str, Box, Tensor]] = []
    owned = {one.name: one for one in run.generation.gradients.owned}
    for exchange in () if run.generation.coded is None else run.generation.coded.made:
        change = exchange.kept_back() if isinstance(exchange, Coded) else None  # pushes are no sums
        if change is None:
            continue
        for segment in exchange.segments:
            flat = change[segment.slice]
            for region in owned[segment.name].regions_of(segment.skipped, segment.numel):
                part = flat[region.start : region.start + region.box.numel]
                own.append((segment.name, region.box, part.view(region.box.shape)))
    return collected(run, own)


def completed(gradients: Sequence[HeldBox], kept: Sequence[HeldBox], like: Mapping[str, Tensor]) -> list[HeldBox]:
    """The gradients with what all ranks together have kept back of them; `like` has the whole tensors' shapes."""
    if not kept:
        return list(gradients)
    totals = {name: torch.zeros(like[name].shape, dtype=torch.float64) for name in {part.name for part in kept}}
    for part in kept:
        totals[part.name][part.box.slices] += part.values.double().cpu()
    return [
        part._replace(values=part.values.double().cpu() + totals[part.name][part.box.slices])
        if part.name in totals
        else part
        for part in gradients
    ]


def norm_of(gradients: Mapping[str, Tensor]) -> float:
    """The two-norm of all whole tensors together."""
    return math.sqrt(math.fsum(float(gradient.double().norm()) ** 2 for gradient in gradients.values()))
