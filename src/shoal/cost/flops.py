"""Floating-point operations, a multiply-add counted as two.

Forward of a layer over b sequences of s tokens: 2bs x (matmul parameters) + 4 b s^2 a d x kappa, kappa = 1/2 where
causal attention is counted as half. Backward is twice the forward; recomputation adds what it repeats. Logits 2bshV.

Two conventions, and every figure names its own: "causal" counts half of the attention square (this project's MFU);
"full" counts all of it (Narayanan et al. arXiv:2104.04473, Korthikanti et al. arXiv:2205.05198 appendix A):
72 B L s h^2 (1 + s/6h + V/12Lh) a step for a GPT without recomputation.
"""

from __future__ import annotations

from typing import Literal

from shoal.cost.parameters import matmul_parameters
from shoal.cost.transformer import Transformer

Recompute = Literal["none", "selective", "full"]
Convention = Literal["causal", "full"]


def attention_flops(model: Transformer, sequences: int, sequence: int, *, convention: Convention = "causal") -> float:
    """Scores and weighted values of one layer, forward."""
    square = 4.0 * sequences * sequence**2 * model.attention_width
    return square / 2 if convention == "causal" else square


def layer_flops(model: Transformer, sequences: int, sequence: int, *, convention: Convention = "causal") -> float:
    """One layer, forward."""
    matmul = 2.0 * sequences * sequence * matmul_parameters(model)
    return matmul + attention_flops(model, sequences, sequence, convention=convention)


def logit_flops(model: Transformer, sequences: int, sequence: int) -> float:
    """The output matrix, forward."""
    return 2.0 * sequences * sequence * model.hidden * model.vocabulary


def model_flops(model: Transformer, sequences: int, sequence: int, *, convention: Convention = "causal") -> float:
    """One step, forward and backward, nothing repeated: the numerator of MFU."""
    forward = model.layers * layer_flops(model, sequences, sequence, convention=convention)
    return 3 * (forward + logit_flops(model, sequences, sequence))


def hardware_flops(
    model: Transformer, sequences: int, sequence: int, *, recompute: Recompute, convention: Convention = "causal"
) -> float:
    """One step with what recomputation repeats: the numerator of HFU."""
    repeated = {
        "none": 0.0,
        "selective": attention_flops(model, sequences, sequence, convention=convention),
        "full": layer_flops(model, sequences, sequence, convention=convention),
    }[recompute]
    return model_flops(model, sequences, sequence, convention=convention) + model.layers * repeated
