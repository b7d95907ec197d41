"""What `run.compile` hands to `torch.compile`: the model and the loss together, or each block by itself.

Together, Inductor fuses the cast of the logits, the log-softmax and its backward: logits are never written in float32.
Blocks alone start faster, as equal ones are compiled once, and leave room between them: under ZeRO-3 the weights of a
block are gathered before its program begins and released when it has ended (as torchtitan does). Hooks of a block are
called around its program, never traced.

Training asks for the sum of the losses and nothing else: an output that nobody differentiates by would cost a gradient
of zeros as large as the logits. An evaluation has a program of its own, which returns the outputs too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from shoal.engine.loss import Loss, call_model, weighted_sum


class LossPrograms:
    """`model` and `loss` in one program each for training and for evaluation. `whole`: the model is compiled with the
    loss; else it is called as it is, and the loss is compiled alone.
    """

    def __init__(self, model: nn.Module, loss: Loss, *, whole: bool) -> None:
        def summed(outputs: Any, targets: Any, weights: Tensor, ones: bool) -> Tensor:
            return weighted_sum(loss(outputs, targets), weights, ones=ones)

        def trained(inputs: Any, targets: Any, weights: Tensor, ones: bool) -> Tensor:
            return weighted_sum(loss(call_model(model, inputs), targets), weights, ones=ones)

        def evaluated(inputs: Any, targets: Any) -> tuple[Any, Tensor]:
            outputs = call_model(model, inputs)
            return outputs, loss(outputs, targets)

        self._model = model
        self._trained = torch.compile(trained) if whole else None
        self._summed = torch.compile(summed)
        self._evaluated = torch.compile(evaluated) if whole else evaluated

    def loss_sum(self, inputs: Any, targets: Any, weights: Tensor, *, ones: bool) -> Tensor:
        """`sum(losses * weights)`, a scalar; `ones`: every weight is 1."""
        if self._trained is not None:
            return self._trained(inputs, targets, weights, ones)
        return self._summed(call_model(self._model, inputs), targets, weights, ones)

    def evaluated(self, inputs: Any, targets: Any) -> tuple[Any, Tensor]:
        """The outputs, and the loss of each sample or position."""
        return self._evaluated(inputs, targets)


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compiles the `forward` of each, in place."""
    for block in blocks:
        block.forward = _OutsideModes(block.forward)


class _OutsideModes:
    """A compiled forward. Under a mode that looks at each call it is the plain one: ZeRO-3 looks at a run's first
    forward for weights that are read while they are not there.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._plain, self._compiled = forward, torch.compile(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._plain if _get_current_function_mode_stack() else self._compiled
        return forward(*args, **kwargs)
