"""From a `[model]` table to the module. Call it under `torch.device("meta")`; `initialise` brings the storage."""

from __future__ import annotations

from torch import nn

from shoal.models.config import BuiltInModel, ConvNetConfig, GPTConfig, MoEConfig
from shoal.models.convnet import ConvNet
from shoal.models.gpt import GPT
from shoal.models.mixture import MixtureOptions
from shoal.models.mlp import MLP


def build(config: BuiltInModel) -> nn.Module:
    """One of Shoal's own models, on the default device of the moment."""
    if isinstance(config, GPTConfig):
        return GPT(
            vocabulary=config.vocabulary,
            layers=config.layers,
            width=config.width,
            heads=config.heads,
            kv_heads=config.key_value_heads,
            feed_forward=config.feed_forward,
            feed_forward_width=config.hidden_width,
            tied=config.tied,
            dropout=config.dropout,
            rope_base=config.rope_base,
            norm_eps=config.norm_eps,
            mixture=_mixture(config) if isinstance(config, MoEConfig) else None,
        )
    if isinstance(config, ConvNetConfig):
        return ConvNet(
            channels=config.channels,
            classes=config.classes,
            width=config.width,
            norm=config.norm,
            group_samples=config.group_samples,
        )
    return MLP(config.inputs, config.hidden, outputs=config.outputs, activation=config.activation)


def _mixture(config: MoEConfig) -> MixtureOptions:
    return MixtureOptions(
        experts=config.experts,
        top_k=config.top_k,
        expert_width=config.width_of_expert,
        shared_experts=config.shared_experts,
        gate=config.gate,
        normalise_gates=config.gates_normalised,
        capacity_factor=config.capacity_factor,
        balance=config.balance,
        balance_coefficient=config.balance_coefficient,
        bias_rate=config.bias_rate,
        router_z_loss=config.router_z_loss,
        every=config.moe_every,
        first_dense=config.first_dense,
    )


def parameter_count(module: nn.Module) -> int:
    """Numbers in the module's parameters, a tied parameter counted once."""
    return sum(parameter.numel() for parameter in module.parameters())
