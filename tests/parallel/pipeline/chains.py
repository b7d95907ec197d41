"""Small chains in float64 for the pipelines' tests, their data, and what one process makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.models.config import GPTConfig
from shoal.models.gpt import GPT
from shoal.models.layers import set_sample_keys
from shoal.models.roles import Part

SEED, SAMPLES, SEQUENCE, VOCABULARY, WIDTH = 11, 2, 5, 13, 8


class Perceptron(nn.Module):
    """Eight layers of different widths; weights used twice, a bias that is added, a frozen layer and an output that
    is a view: what a split backward could trip over."""

    def __init__(self, *, frozen: int = 0, recompute: bool = False) -> None:
        super().__init__()
        widths = [WIDTH, 12, 8, 10, 8, 6, 9, 8, VOCABULARY]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.again = nn.Linear(8, 8)
        self.recompute = recompute
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)

    def context(self, inputs: Tensor) -> Tensor:
        return inputs

    def parts(self) -> list[Part]:
        names = [(f"layers.{i}",) if i != 1 else ("layers.1", "again") for i in range(len(self.layers))]
        return [Part(f"layers.{i}", names[i], partial(self._layer, i)) for i in range(len(self.layers))]

    def _layer(self, index: int, x: Tensor | None, context: Tensor) -> Tensor:
        x = context if x is None else x
        run = partial(self._run, index)
        return checkpoint(run, x, use_reentrant=False) if self.recompute else run(x)

    def _run(self, index: int, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[index](x))
        if index == 1:
            x = self.again(torch.sin(self.again(x))) + self.again.bias
        return x.transpose(0, 1).transpose(0, 1)


def gpt(*, tied: bool = False, dropout: float = 0.0, layers: int = 6) -> GPT:
    model = GPT(
        GPTConfig(
            vocabulary=VOCABULARY, layers=layers, width=WIDTH, heads=2, kv_heads=1, feed_forward="swiglu",
            feed_forward_width=12, tied=tied, dropout=dropout,
        )
    )  # fmt: skip
    nn.init.normal_(model.embedding.weight)  # zero as it is made, and then so is all that stages send each other
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "perceptron": Perceptron,
    "frozen": partial(Perceptron, frozen=3),
    "all but the head frozen": partial(Perceptron, frozen=7),
    "recomputed": partial(Perceptron, recompute=True),
    "gpt": gpt,
    "tied gpt": partial(gpt, tied=True),
    "gpt with dropout": partial(gpt, dropout=0.3),
}


def model(kind: str) -> Any:
    """The same weights wherever it is called."""
    torch.manual_seed(SEED)
    return MODELS[kind]().to(torch.float64)


@dataclass(frozen=True)
class Data:
    """Microbatches: inputs and targets, each with keys of its samples."""

    inputs: list[Tensor]
    targets: list[Tensor]
    keys: list[Tensor]

    def loss(self, output: Tensor, microbatch: int) -> Tensor:
        """A sum over the microbatch, divided by the tokens of all microbatches."""
        tokens = sum(target.numel() for target in self.targets)
        return F.cross_entropy(output.flatten(0, 1), self.targets[microbatch].flatten(), reduction="sum") / tokens


def data(kind: str, microbatches: int) -> Data:
    """Seeded by the number of the microbatch."""
    inputs, targets, keys = [], [], []
    for microbatch in range(microbatches):
        made = torch.Generator().manual_seed(100 + microbatch)
        tokens = torch.randint(VOCABULARY, (SAMPLES, SEQUENCE), generator=made)
        floats = torch.randn(SAMPLES, SEQUENCE, WIDTH, dtype=torch.float64, generator=made)
        inputs.append(tokens if "gpt" in kind else floats)
        targets.append(torch.randint(VOCABULARY, (SAMPLES, SEQUENCE), generator=made))
        keys.append(torch.randint(1 << 40, (SAMPLES,), generator=made))
    return Data(inputs, targets, keys)


def one_process(kind: str, microbatches: int) -> tuple[float, dict[str, Tensor]]:
    """The oracle: the sum of the losses, and every trained parameter's gradient by name."""
    whole, batch = model(kind), data(kind, microbatches)
    total = 0.0
    for microbatch, inputs in enumerate(batch.inputs):
        set_sample_keys(whole.modules(), batch.keys[microbatch])
        x, context = None, whole.context(inputs)
        for part in whole.parts():
            x = part.run(x, context)
        assert x is not None
        loss = batch.loss(x, microbatch)
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
