"""The rules between tables of a run file: what no table can know by itself. Imports no torch.

A rule returns one sentence, with what was found, the rule and the repair, or None.
"""

from __future__ import annotations

from shoal.errors import ConfigError
from shoal.runfile.batch_rules import batch_refusal
from shoal.runfile.codec_rules import codec_refusal, pipeline_codec_refusal, shard_codec_refusal
from shoal.runfile.elastic_rules import elastic_refusal
from shoal.runfile.federated_rules import federated_refusal
from shoal.runfile.gradient_rules import gradients_refusal, wire_refusal
from shoal.runfile.layout_rules import layout_refusal, pipedream_refusal
from shoal.runfile.memory_rules import memory_refusal
from shoal.runfile.observe_rules import layer_norms_refusal, noise_refusal, watch_refusal
from shoal.runfile.rule import in_order
from shoal.runfile.run_file import RunFile
from shoal.runfile.sparsity_rules import partly_trained_refusal
from shoal.runfile.sync_rules import division_refusal, sync_refusal
from shoal.runfile.training_rules import (
    float8_refusal,
    loss_chunks_refusal,
    masters_refusal,
    norm_refusal,
    optimizer_refusal,
)

refusal = in_order(
    batch_refusal,
    layout_refusal,
    norm_refusal,
    float8_refusal,
    masters_refusal,
    loss_chunks_refusal,
    memory_refusal,
    pipedream_refusal,
    noise_refusal,
    layer_norms_refusal,
    gradients_refusal,
    codec_refusal,
    shard_codec_refusal,
    pipeline_codec_refusal,
    wire_refusal,
    sync_refusal,
    division_refusal,
    watch_refusal,
    elastic_refusal,
    optimizer_refusal,
    partly_trained_refusal,
    federated_refusal,
)
"""The first rule between the tables that is broken, as a sentence; None where all hold."""


def check_across(run_file: RunFile, *, file: str) -> None:
    """The rules between tables. Raises `ConfigError` for the first that is broken."""
    sentence = refusal(run_file)
    if sentence is not None:
        raise ConfigError(f"{file}: {sentence}")
