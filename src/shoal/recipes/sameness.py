"""Every rank must have built the same model and the same data: a script that draws them unseeded does not.

Rank 0 says what it has, line by line; another rank that has something else is named, with the first line that differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from shoal.data.build import Dataset
from shoal.data.sample import Source, map_tree, parse_sample
from shoal.errors import UserCodeError


def require_same(
    rank: int, announce: Callable[[str, Callable[[], str]], str], own: Mapping[str, Sequence[str]]
) -> None:
    """Raises `UserCodeError` on the rank whose lines are not rank 0's."""
    for what, lines in own.items():
        wanted = announce(f"same/{what}", lambda lines=lines: "\n".join(lines)).split("\n")
        pairs = [(a, b) for a, b in zip(wanted, lines, strict=False) if a != b]
        if pairs or len(wanted) != len(lines):
            mine, theirs = pairs[0][::-1] if pairs else (f"{len(lines)} entries", f"{len(wanted)}")
            raise UserCodeError(
                f"rank {rank} has another {what} than rank 0: '{mine}', not '{theirs}'. Every rank runs the same code: "
                "what it draws at random must be seeded, and must not depend on the rank"
            )


def shapes_of(model: nn.Module) -> list[str]:
    """A line for each parameter and buffer: name, shape, dtype."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for name, tensor in tensors]


def samples_of(data: Dataset) -> list[str]:
    """Lines for the first, the middle and the last sample of the training and the held-out data, by their hash."""
    if data.endless:
        return ["a stream"]
    held_out = _lines("held-out", data.held_out) if data.held_out is not None else []
    return _lines("training", data.train) + held_out


def _lines(name: str, source: Source) -> list[str]:
    chosen = sorted({0, len(source) // 2, len(source) - 1})
    return [f"{name} data of {len(source)} samples"] + [f"{name} sample {i}: {_stable_hash(source, i)}" for i in chosen]


def _stable_hash(source: Source, index: int) -> str:
    """The sample's hash, if it has one: an augmented sample differs at every reading, and the feed tells of errors."""
    try:
        first, second = _hash(source, index), _hash(source, index)
    except Exception:
        return "unreadable"
    return first if first == second else "random"


def _hash(source: Source, index: int) -> str:
    sample, digest = parse_sample(source[index]), hashlib.blake2b(digest_size=8)

    def add(leaf: Tensor) -> Tensor:
        digest.update(repr((leaf.dtype, leaf.shape)).encode())
        digest.update(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return leaf

    map_tree(add, sample.inputs)
    map_tree(add, sample.targets)
    return digest.hexdigest()
