"""From `[codec]` to the exchanges of a run: how sums between ranks are coded."""

from __future__ import annotations

from functools import partial

from shoal.codec.config import AutoConfig, DGCConfig, NoCodec
from shoal.comm.exchanges.choice import Choice
from shoal.comm.exchanges.coded import Coded, CodedExchanges
from shoal.comm.exchanges.momentum_corrected import MomentumCorrected
from shoal.comm.exchanges.pieces import PieceCodecs
from shoal.comm.mesh import Mesh
from shoal.config.table import implementation_of
from shoal.runfile.run_file import RunFile


def coded_exchanges(run_file: RunFile, mesh: Mesh) -> CodedExchanges | None:
    """What makes exchanges between ranks of `mesh` with the codec of `[codec]`; None without one."""
    config = run_file.codec
    if isinstance(config, NoCodec):
        return None
    new = Coded
    if isinstance(config, DGCConfig):
        new = partial(MomentumCorrected, momentum=config.momentum, clip_norm=config.clip_norm)
    if isinstance(config, AutoConfig):
        candidates = {name: implementation_of(one)(one) for name, one in config.candidates.items()}
        every = config.measure_every if mesh.spans_hosts else None
        codec = partial(Choice, candidates, every=every)
    else:
        codec = implementation_of(config)(config)
    return CodedExchanges(codec, feedback=config.feedback, seed=run_file.run.seed, levels=mesh.levels, new=new)


def piece_codecs(run_file: RunFile) -> PieceCodecs:
    """The codecs of what the ranks of `layout.shard` send each other, by `[shard_codec]`."""
    weights, gradients = (run_file.shard_codec.codec(what) for what in ("weights", "gradients"))
    return PieceCodecs(
        None if weights is None else implementation_of(weights)(weights),
        None if gradients is None else implementation_of(gradients)(gradients),
    )
