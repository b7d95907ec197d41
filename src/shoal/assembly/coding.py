"""From `[codec]`, `[shard_codec]` and the optimizer to the exchanges of a run: how sums between ranks are coded, and
what of them follows the links.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from shoal.codec.codec import Codec
from shoal.codec.config import AutoConfig, CodecConfig, DGCConfig, ShardCodecConfig, SignConfig
from shoal.comm.collective import Collective
from shoal.comm.exchanges.choice import Choice
from shoal.comm.exchanges.coded import Coded, CodedExchanges, NewChoice
from shoal.comm.exchanges.exchange import PieceCodecs
from shoal.comm.exchanges.momentum import MomentumCorrected, MomentumSum
from shoal.comm.link_watch import LinkWatch
from shoal.comm.mesh import Mesh
from shoal.comm.seam import Seam
from shoal.config.check import Table, implementation_of
from shoal.errors import ConfigError
from shoal.optim.config import OneBit, OptimizerConfig
from shoal.runfile.run_file import RunFile
from shoal.sync.config import AllReduceConfig
from shoal.sync.event_order import CODEC, LINKS, Rounds
from shoal.sync.strategy import Sync


class _Parts(NamedTuple):
    """What a coded exchange is made of: the codec, or what chooses one, and the class of the exchange."""

    codec: Codec | NewChoice
    new: Callable[..., Coded] = Coded


def follows_links(run_file: RunFile) -> bool:
    """Whether what a run chooses by its links is chosen anew when they change: the algorithms of groups, or the size of
    buckets. Ranks look at their links between two steps that all of them take together, with nothing under way.
    """
    asked = run_file.wire.algorithm == "auto" or run_file.gradients.bucket == "auto"
    together = isinstance(run_file.sync, AllReduceConfig) and not run_file.pipeline.asynchronous
    return asked and together and run_file.gradients.schedule == "order"


def build_link_watch(run_file: RunFile, mesh: Mesh, sync: Sync, search: Any, rounds: Rounds | None) -> LinkWatch | None:
    """None where nothing follows the links: on one rank, and on GPUs, whose waits the host does not see. `search` is
    what finds the size of buckets; None: it is fixed.
    """
    ranks = set(mesh.layout.group(sync.lockstep_axes, mesh.rank))
    if len(ranks) == 1 or mesh.device.type != "cpu" or not follows_links(run_file):
        return None

    def opened() -> dict[str, tuple[Sequence[int], Seam]]:
        return {label: found for label, found in mesh.opened().items() if ranks.issuperset(found[0])}

    settings = {} if rounds is None else {"decided": partial(_links_decided, rounds), "repeats": rounds.repeats}
    return LinkWatch(mesh.axis(*sync.lockstep_axes), mesh.ledger, opened, search, **settings)


def _links_decided(rounds: Rounds, said: str) -> str:
    return rounds.decide(f"{LINKS}{said}", first=True).removeprefix(LINKS)


def _velocities(config: DGCConfig, mesh: Mesh, rounds: Rounds | None) -> _Parts:
    new = partial(MomentumCorrected, momentum=config.momentum, clip_norm=config.clip_norm)
    return _Parts(implementation_of(config)(config), new)


def _choice(config: AutoConfig, mesh: Mesh, rounds: Rounds | None, *, watched: bool = False) -> _Parts:
    """`watched`: a step has decided by its links (`build_link_watch`) before it asks for a codec."""
    if mesh.device.type != "cpu":
        raise ConfigError(
            f'codec.kind = "auto" on {mesh.device.type}: it measures processors and their links so far; name a codec, '
            'or set run.device = "cpu"'
        )
    candidates = {name: implementation_of(one)(one) for name, one in config.codecs.items()}
    every = config.measure_every if mesh.spans_hosts else None
    made = count()

    def new(group: Collective) -> Choice:
        first, settings = next(made) == 0 and not watched, {"every": every, "most_growth": config.most_growth}
        if rounds is None:
            return Choice(candidates, group, **settings)
        decided = partial(_decided, rounds, first=first)
        return Choice(candidates, group, **settings, decided=decided, repeats=rounds.repeats)

    return _Parts(new)


def _decided(rounds: Rounds, name: str, *, first: bool) -> str:
    return rounds.decide(f"{CODEC}{name}", first=first).removeprefix(CODEC)


def _gradients(config: Table, mesh: Mesh, rounds: Rounds | None) -> _Parts:
    return _Parts(implementation_of(config)(config))


_SPECIAL: Mapping[type[Table], Callable[[Any, Mesh, Rounds | None], _Parts]] = {
    DGCConfig: _velocities,
    AutoConfig: _choice,
}
"""Tables of `[codec]` that need more than their codec; all others are coded sums of gradients."""


def is_coded(codec: CodecConfig, optimizer: OptimizerConfig) -> bool:
    """Whether ranks sum something coded: by `[codec]`, or because the optimizer sends its momentum."""
    return optimizer.sends_momentum or bool(codec.implemented_by) or type(codec) in _SPECIAL


def coded_exchanges(run_file: RunFile, mesh: Mesh, rounds: Rounds | None) -> CodedExchanges | None:
    """What makes exchanges between ranks of `mesh` with the codec of `[codec]`, or of an optimizer that sends its
    momentum; None where all is sent as it is. `rounds` records what is chosen by the clock, or repeats it. Raises
    `ConfigError` where a choice cannot measure the device of this rank.
    """
    if not is_coded(run_file.codec, run_file.optimizer):
        return None
    config, optimizer = run_file.codec, run_file.optimizer
    feedback = config.feedback
    if isinstance(optimizer, OneBit):
        sign, feedback = SignConfig(block=optimizer.block), True
        new = partial(MomentumSum, beta=optimizer.beta1, exact=optimizer.exact)
        parts = _Parts(implementation_of(sign)(sign), new)
    elif isinstance(config, AutoConfig):
        parts = _choice(config, mesh, rounds, watched=follows_links(run_file))
    else:
        parts = _SPECIAL.get(type(config), _gradients)(config, mesh, rounds)
    # Of the ranks of a host one keeps what all have not sent: which one changes with the members of an elastic run.
    levels = {} if run_file.elastic is not None else {"levels": mesh.levels}
    later = mesh.axis("replicate", lane="later rounds") if run_file.gradients.schedule == "priority" else None
    return CodedExchanges(parts.codec, feedback=feedback, seed=run_file.run.seed, new=parts.new, later=later, **levels)


def piece_codecs(config: ShardCodecConfig) -> PieceCodecs:
    """The codecs of what the ranks of `layout.shard` send each other."""
    weights, gradients = (config.codec(what) for what in ("weights", "gradients"))
    return PieceCodecs(
        None if weights is None else implementation_of(weights)(weights),
        None if gradients is None else implementation_of(gradients)(gradients),
    )


def check_shrinks(run_file: RunFile, coded: CodedExchanges | None) -> None:
    """Raises `ConfigError` where a codec that was chosen by hand makes no payload smaller."""
    if coded is not None and not isinstance(run_file.codec, AutoConfig) and not coded.shrinks():
        kind = run_file.codec.variant
        raise ConfigError(
            f'codec.kind = "{kind}" makes nothing smaller here: with its settings and these parameters every payload '
            "has as many bytes as the gradient; lower codec.rank or codec.fraction, or leave [codec] out"
        )
