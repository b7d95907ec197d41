"""The bottleneck in a sentence, with the change that should remove it. Pure.

What is compared is seconds of a step that would be gained. Waiting for data, for the wire and for a slow rank is lost
time and counts from a tenth of the step on; an operator counts that no model is expected to spend its time in, and the
host, from a quarter on. Each must be that much beyond the noise between rounds of steps (`evidence`); else nothing
stands out. Where nothing of that is there, the step is spent on the model's own products.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from shoal import units
from shoal.observe.profile.recording import Exposed, Share, interval
from shoal.observe.profile.split import Operator, TimeSplit, mean

Kind = Literal["data", "wire", "slow rank", "operator", "host", "compute", "nothing"]
NAMED: Mapping[Kind, str] = MappingProxyType(
    {
        "data": "waiting for data",
        "wire": "waiting for the wire",
        "slow rank": "waiting for a slow rank",
        "operator": "an operator",
        "host": "Python between operators",
    }
)
LOST_SHARE, SPENT_SHARE = 0.1, 0.25
READING_COMPUTES = 0.7
"""From this share of a core on, reading is computing and not waiting for a disk."""
FEWER_CORES = 0.8
"""A rank whose share of a core is below this part of the others' is not slow: it is kept from computing."""
MOST_READERS = 64
PRODUCTS = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "matmul",
    "linear",
    "conv",
    "attention",
    "gemm",
    "cutlass",
    "xmma",
    "flash",
)
"""What a model is expected to spend its time in: names of operators and kernels that hold one of these."""


@dataclass(frozen=True)
class Setup:
    """What the advice depends on. `codec_helps`: gradients between replicas are sent whole, and a codec may be set."""

    readers: int = 1
    reader_kind: Literal["threads", "processes"] = "threads"
    prefetch_steps: int = 2
    cores: int = 1
    codec_helps: bool = False
    may_compile: bool = False


@dataclass(frozen=True)
class Bottleneck:
    """`share` of the step that it takes on `rank` (None: on all). `change`: keys of the run file that should remove it,
    as they are given on the command line; () where it is not a key."""

    kind: Kind
    rank: int | None
    share: float
    sentence: str
    change: tuple[str, ...] = ()
    operator: str | None = None
    interval: Share | None = None
    """Where the share lies, as far as the noise between rounds tells; None: nothing was compared."""


@dataclass(frozen=True)
class Measured:
    """One rank, as the profile saw it. `sources`: a line of Python for an operator."""

    split: TimeSplit
    exposed: Exposed
    operators: Sequence[Operator]
    sources: Mapping[str, str]

    @property
    def work_s(self) -> float:
        """What it does itself in a mean step, and what it stands still for by itself."""
        return self.split.work_s + self.exposed.own_s


def bottleneck(
    ranks: Sequence[Measured], setup: Setup, *, rounds: Sequence[Sequence[Measured]] | None = None
) -> Bottleneck:
    """The worst of what is found, or that nothing stands out, or that the step computes.

    `rounds`: the same ranks in each round of steps, by which it is told from noise; None: it is taken as it is.
    """
    found = sorted(
        (one for one in _candidates(ranks, setup) if one.share >= _least(one.kind)), key=lambda one: -one.share
    )
    if rounds is None:
        return found[0] if found else _computes(ranks)
    shown = [replace(one, interval=interval([_share_in(each, one) for each in rounds])) for one in found]
    sure = [one for one in shown if one.interval is not None and one.interval.low >= _least(one.kind)]
    if sure:
        return sure[0]
    return _unsure(shown[0], len(rounds)) if shown else _computes(ranks)


def _unsure(likely: Bottleneck, rounds: int) -> Bottleneck:
    """What would be named if it were more than noise."""
    where = "" if likely.rank is None else f" on rank {likely.rank}"
    within = likely.interval
    if within is None or rounds < 2:
        why = "a single step is no evidence"
    else:
        low, high = units.percent(max(0.0, within.low)), units.percent(min(1.0, within.high))
        why = f"it lies between {low} and {high} of the step by these {rounds} rounds"
    sentence = f"nothing stands out: the most likely is {NAMED[likely.kind]}{where}, but {why}; more --steps tell"
    return Bottleneck("nothing", likely.rank, likely.share, sentence, interval=within)


def _share_in(ranks: Sequence[Measured], found: Bottleneck) -> float:
    """The share that `found` has in one round."""
    own = next((rank for rank in ranks if rank.split.rank == found.rank), ranks[0])
    match found.kind:
        case "data":
            return own.split.data_s / own.split.step_s
        case "wire":
            return _wire_s(own) / own.split.step_s
        case "slow rank":
            return _excess_s(own, ranks) / own.split.step_s
        case "operator":
            return mean([_own_s(rank, found.operator or "") / rank.split.step_s for rank in ranks])
        case _:
            return mean([rank.split.host_s / rank.split.step_s for rank in ranks])


def _least(kind: Kind) -> float:
    return SPENT_SHARE if kind in ("operator", "host") else LOST_SHARE


def _candidates(ranks: Sequence[Measured], setup: Setup) -> Iterator[Bottleneck]:
    yield _data(max(ranks, key=lambda rank: rank.split.data_s), setup)
    yield _wire(max(ranks, key=lambda rank: _wire_s(rank)), setup)
    if len(ranks) > 1:
        yield _slow_rank(ranks)
    yield from _operator(ranks)
    yield _host(ranks, setup)


def _data(rank: Measured, setup: Setup) -> Bottleneck:
    split = rank.split
    share = split.data_s / split.step_s
    needed = math.ceil(setup.readers / max(1 - share, 1 / MOST_READERS))
    readers = min(MOST_READERS, max(setup.readers + 1, needed))
    change: tuple[str, ...] = ()
    if split.data_cpu_share >= READING_COMPUTES:
        readers = min(readers, max(setup.readers, setup.cores))
        change = () if setup.reader_kind == "processes" else ('data.reader_kind="processes"',)
    if readers > setup.readers:
        change += (f"data.readers={readers}",)
    if readers > setup.prefetch_steps:  # each reads a step of its own
        change += (f"data.prefetch_steps={readers}",)
    repair = " ".join(change) or "its readers have all its cores already: prepare the data once, or do less a sample"
    sentence = f"rank {split.rank} waits {units.percent(share)} of its step for data: {repair}"
    return Bottleneck("data", split.rank, share, sentence, change)


def _wire_s(rank: Measured) -> float:
    waits_s = rank.exposed.wire_s + sum(rank.exposed.for_rank_s.values())
    return rank.exposed.wire_s if waits_s > 0 else rank.split.communication_s


def _wire(rank: Measured, setup: Setup) -> Bottleneck:
    wire_s, exposed = _wire_s(rank), rank.exposed
    share = wire_s / rank.split.step_s
    operation = max(exposed.by_operation_s, key=lambda name: exposed.by_operation_s[name], default="collectives")
    speed = f", {units.byte_size(exposed.sent_bytes / wire_s)}/s" if wire_s > 0 else ""
    if setup.codec_helps:
        change, repair = ('codec.kind="blockwise"',), 'codec.kind="blockwise" sends a quarter of the gradient\'s bytes'
    else:
        change, repair = (), "put ranks that talk most on one host (shoal plan ranks the layouts), or use a faster link"
    sentence = (
        f"rank {rank.split.rank} waits {units.percent(share)} of its step for the wire, most of it in {operation} "
        f"({units.byte_size(exposed.sent_bytes)} sent in a step{speed}): {repair}"
    )
    return Bottleneck("wire", rank.split.rank, share, sentence, change)


def _slow_rank(ranks: Sequence[Measured]) -> Bottleneck:
    slow = max(ranks, key=lambda rank: rank.work_s)
    others = [rank for rank in ranks if rank is not slow]
    usual_s = statistics.median_low([rank.work_s for rank in others])
    excess_s = _excess_s(slow, ranks)
    share = excess_s / slow.split.step_s
    times = slow.work_s / usual_s if usual_s > 0 else math.inf
    name = _operator_to_blame(slow, others, excess_s, times)
    sentence = (
        f"rank {slow.split.rank} works {times:.1f} times as long as the others, which wait {units.percent(share)} of "
        f"their step for it: {_why_slow(slow, others, name)}"
    )
    return Bottleneck("slow rank", slow.split.rank, share, sentence, operator=name)


def _excess_s(slow: Measured, ranks: Sequence[Measured]) -> float:
    """What `slow` works longer than the others, as far as one of them waits for it."""
    others = [rank for rank in ranks if rank is not slow]
    excess_s = slow.work_s - statistics.median_low([rank.work_s for rank in others])
    if any(rank.exposed.for_rank_s for rank in ranks):
        excess_s = min(excess_s, max(rank.exposed.for_rank_s.get(slow.split.rank, 0.0) for rank in others))
    return excess_s


def _operator_to_blame(slow: Measured, others: Sequence[Measured], excess_s: float, times: float) -> str | None:
    """The operator that is most of what this rank takes longer, None where all of them are slow alike, `times` each."""
    usual = {
        operator.name: statistics.median_low([_own_s(other, operator.name) for other in others])
        for operator in slow.operators
    }
    worst = max(slow.operators, key=lambda operator: operator.own_s - usual[operator.name], default=None)
    if worst is None or worst.own_s < 1.5 * times * usual[worst.name]:
        return None
    return worst.name if worst.own_s - usual[worst.name] > 0.5 * excess_s else None


def _why_slow(slow: Measured, others: Sequence[Measured], name: str | None) -> str:
    had, usual = slow.split.cpu_share, statistics.median([other.split.cpu_share for other in others])
    if name is not None:
        return f"{name}{_where(slow, name)} takes the difference: see why it does more there"
    if had < FEWER_CORES * usual:
        return (
            f"its process had a core {units.percent(had)} of that time, theirs {units.percent(usual)}: end what shares "
            "its cores, or raise the limit of its container"
        )
    return "all it does is slower: compare its host with the others' (shoal doctor)"


def _operator(ranks: Sequence[Measured]) -> Iterator[Bottleneck]:
    """The operator with the most time that is no product."""
    step_s = mean([rank.split.step_s for rank in ranks])
    names = {operator.name for rank in ranks for operator in rank.operators if not _is_product(operator.name)}
    if not names:
        return
    own_s = {name: mean([_own_s(rank, name) for rank in ranks]) for name in names}
    name = max(own_s, key=lambda name: own_s[name])
    at = next((where for rank in ranks if (where := _where(rank, name))), "")
    sentence = (
        f"the operator {name} takes {units.percent(own_s[name] / step_s)} of the step{at}: call it less there, or use "
        "another in its place"
    )
    yield Bottleneck("operator", None, own_s[name] / step_s, sentence, operator=name)


def _host(ranks: Sequence[Measured], setup: Setup) -> Bottleneck:
    share = mean([rank.split.host_s / rank.split.step_s for rank in ranks])
    change = ("run.compile=true",) if setup.may_compile else ()
    repair = "run.compile=true, or larger batch.micro_samples" if change else "larger batch.micro_samples"
    sentence = f"Python between operators takes {units.percent(share)} of the step: {repair}"
    return Bottleneck("host", None, share, sentence, change)


def _computes(ranks: Sequence[Measured]) -> Bottleneck:
    share = mean([rank.split.compute_s / rank.split.step_s for rank in ranks])
    own_s: dict[str, float] = {}
    for rank in ranks:
        for operator in rank.operators[:1]:
            own_s[operator.name] = own_s.get(operator.name, 0.0) + operator.own_s
    name = max(own_s, key=lambda name: own_s[name], default=None)
    most = f", {name} most of it" if name else ""
    sentence = f"operators take {units.percent(share)} of the step{most}; no wait stands out: more ranks shorten it"
    return Bottleneck("compute", None, share, sentence, operator=name)


def _own_s(rank: Measured, name: str) -> float:
    return next((operator.own_s for operator in rank.operators if operator.name == name), 0.0)


def _where(rank: Measured, name: str) -> str:
    return f" (called at {rank.sources[name]})" if name in rank.sources else ""


def _is_product(name: str) -> bool:
    return any(part in name.lower() for part in PRODUCTS)
