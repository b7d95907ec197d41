"""What `shoal verify` cannot prove, as the run file alone tells. Imports no torch: nothing has been started yet."""

from __future__ import annotations

from shoal.codec.config import CodecConfig, DGCConfig
from shoal.errors import ConfigError
from shoal.runfile.run_file import RunFile
from shoal.sparsity.config import L0, TopKAST
from shoal.sync.config import GossipConfig, HogwildConfig, ServerConfig, SyncConfig


def require_provable(run_file: RunFile) -> None:
    """Raises `ConfigError` where there is nothing to compare the run with: time decides what replicas agree on, a codec
    loses numbers without keeping them, or the optimizer sends no gradients.
    """
    _refuse_timed(run_file.sync)
    if not replicas_differ(run_file.sync):  # else the codec is left out
        _refuse_lost_numbers(run_file.codec)
    if isinstance(run_file.sparsity, TopKAST | L0):
        raise ConfigError(
            f'sparsity.kind = "{run_file.sparsity.variant}": ranks keep weights aside that verify does not give to '
            'both sides; verify the layout with sparsity.kind = "rigl", or without [sparsity]'
        )
    if run_file.freeze is not None and run_file.freeze.changes:
        raise ConfigError(
            "freeze.later or freeze.progress: verify compares every gradient in every step; verify the layout with "
            "freeze.layers, or without [freeze]"
        )
    if run_file.optimizer.sends_momentum:
        kind = run_file.optimizer.variant
        raise ConfigError(
            f'optimizer.kind = "{kind}" sends coded momenta: verify compares gradients that are sent as they are; add '
            'optimizer.kind="adamw"'
        )


def replicas_differ(config: SyncConfig) -> bool:
    """Whether one process that takes all samples makes other steps, so that it plays the strategy instead."""
    return config.replicas_are != "lockstep"


def _refuse_timed(config: SyncConfig) -> None:
    if isinstance(config, HogwildConfig):
        raise ConfigError(
            'sync.kind = "hogwild": processes write the same parameters without locks, in an order that time decides '
            'and nobody records, so there is nothing to compare with: verify sync.kind = "server", or the layout with '
            'sync.kind = "allreduce"'
        )
    if isinstance(config, GossipConfig) and config.asynchronous:
        raise ConfigError(
            "sync.asynchronous = true: time decides in which step a share is added, so there is nothing to compare "
            "with: `shoal train --replay RUN_DIR` repeats such a run to the bit; verify it with sync.asynchronous = "
            "false"
        )
    if isinstance(config, ServerConfig) and config.admission != "sync" and config.bound != 0:
        raise ConfigError(
            f'sync.admission = "{config.admission}": time decides which gradients make an update, and in which order, '
            "so there is nothing to compare with: `shoal train --replay RUN_DIR` repeats such a run to the bit; verify "
            'sync.admission = "sync"'
        )


def _refuse_lost_numbers(config: CodecConfig) -> None:
    kind = config.variant
    if isinstance(config, DGCConfig):
        raise ConfigError(
            f'codec.kind = "{kind}" sends velocities: verify compares gradients; add codec.kind="none", or codec.kind='
            '"top_k", which sends gradients'
        )
    if kind != "none" and not config.feedback:
        raise ConfigError(
            f'codec.kind = "{kind}" without error feedback: nothing says what was not sent; add codec.kind="none", or '
            "use a codec with codec.feedback = true"
        )
