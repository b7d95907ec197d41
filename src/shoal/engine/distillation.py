"""Distillation: a trained model, the teacher, says what the classes of each sample are worth (arXiv:1503.02531).

    loss = (1 - weight) loss + weight T^2 KL( softmax(teacher / T) || softmax(student / T) )

The teacher computes without gradients, in evaluation mode, on the samples of its own rank. Evaluation measures the
student's own loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.engine.config import DistillationConfig
from shoal.engine.loss import at_least_float32, call_model
from shoal.engine.outputs import described, prediction_in
from shoal.errors import UserCodeError


@dataclass(frozen=True)
class Distillation:
    """`teacher` is whole, in evaluation mode, and not trained."""

    config: DistillationConfig
    teacher: nn.Module

    def __call__(self, inputs: Any, outputs: Any, losses: Tensor) -> Tensor:
        """The losses of a forward that gave `outputs`, with the teacher's part. Raises `UserCodeError` where both have
        other classes.
        """
        if not torch.is_grad_enabled():
            return losses
        with torch.no_grad():
            wanted = prediction_in(call_model(self.teacher, inputs))
        own = prediction_in(outputs)
        if wanted is None or own is None or wanted.shape != own.shape:
            raise UserCodeError(
                f"distillation.teacher gives {described(wanted)}, and the model {described(outputs)}: both need logits "
                "of the same classes"
            )
        return (1 - self.config.weight) * losses + self.config.weight * divergence(own, wanted, self.config.temperature)


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 KL of both softened distributions; logits `[..., classes]` to `[...]`."""
    own = F.log_softmax(at_least_float32(student) / temperature, dim=-1)
    wanted = F.log_softmax(at_least_float32(teacher) / temperature, dim=-1)
    return temperature**2 * (wanted.exp() * (wanted - own)).sum(-1)
