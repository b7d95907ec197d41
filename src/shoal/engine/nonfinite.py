"""Where a value first was not finite: looked for once, when a run is about to stop for it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from shoal.data.sample import Batch, Tree
from shoal.engine.compute import Compute


def first_nonfinite(compute: Compute, batches: Iterable[Batch], *, forward: bool = True) -> str | None:
    """The first culprit: a parameter, a sample, a module's output, the loss, a gradient; None if all are finite.

    Without `forward`, modules are not run: a rank that holds a part of the model cannot run it alone.
    """
    for name, parameter in compute.model.named_parameters():
        if not _finite(parameter):
            return f"parameter {name}"
    for batch in batches:
        batch = compute.prepared(batch).batch
        found = _in_samples(batch) or (_in_forward(compute, batch) if forward else None)
        if found is not None:
            return found
    for name, parameter in compute.model.named_parameters():
        if parameter.grad is not None and not _finite(parameter.grad):
            return f"the gradient of parameter {name}"
    return None


def _in_samples(batch: Batch) -> str | None:
    for part, tree in (("inputs", batch.inputs), ("targets", batch.targets)):
        for leaf in _leaves(tree):
            if not _finite(leaf):
                bad = (~torch.isfinite(leaf)).flatten(1).any(1) if leaf.ndim > 1 else ~torch.isfinite(leaf)
                return f"the {part} of the sample at position {int(batch.positions[bad.cpu()][0])} of the data's order"
    return None


@torch.no_grad()
def _in_forward(compute: Compute, batch: Batch) -> str | None:
    found: list[str] = []

    def watch(name: str):
        def after(module: nn.Module, inputs: object, output: object) -> None:
            if not found and not all(_finite(leaf) for leaf in _leaves(output)):
                found.append(f"the output of module {name} ({type(module).__name__})")

        return after

    hooks = [module.register_forward_hook(watch(name)) for name, module in compute.model.named_modules() if name]
    try:
        compute.randomness.microbatch(batch.positions)
        _, losses = compute.losses(batch)
    finally:
        for hook in hooks:
            hook.remove()
    if found:
        return found[0]
    return None if _finite(losses) else "the loss, from finite outputs of the model"


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _leaves(tree: Tree | object) -> Iterable[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for branch in tree.values():
            yield from _leaves(branch)
    elif isinstance(tree, tuple | list):
        for branch in tree:
            yield from _leaves(branch)
