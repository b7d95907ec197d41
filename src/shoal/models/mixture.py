"""A mixture of experts in place of a feed-forward (Shazeer et al., arXiv:1701.06538; Mixtral, arXiv:2401.04088).

    y_t = sum over the chosen experts e of gate_te * expert_e(x_t)  +  shared(x_t)

The shared experts (DeepSeekMoE, arXiv:2401.06066) see every token. What a token's way depends on, the choice and the
capacity, and the losses of the router are functions of its own sequence: no batch and no layout can change them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models.layers import GELU, SwiGLU
from shoal.models.router import (
    NEVER,
    Gate,
    Router,
    TakesAuxiliary,
    balance_terms,
    capacity_of,
    injected,
    top_k,
    within_capacity,
    z_terms,
)
from shoal.models.token_exchange import LocalExchange, TokenExchange, through_experts

# Recorded routes: which experts each token went to, by (layer, sample, place in the sample).
#
# Two layouts sum in different orders, so scores that are equal but for rounding may be ranked differently, and then the
# outputs differ by more than rounding. A comparison therefore records the choices of one run and replays them in the
# other; where the other would have chosen otherwise by more than a near-tie, that is a difference of its own.


UNKNOWN = -1


class RouteTap(Protocol):
    """What stands between a router's choice and its use."""

    def __call__(self, layer: str, *, samples: Tensor, places: Tensor, preferences: Tensor, chosen: Tensor) -> Tensor:
        """The experts to use, `[batch, seq, top_k]` as `chosen`; `samples` `[batch]`, `places` `[batch, seq]`."""
        ...


class TakesRoutes(nn.Module):
    """The base of a module whose choices may be recorded and replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.tap: RouteTap | None = None


@dataclass(eq=False)
class Routes:
    """A record: `tables[layer][sample]` is int64 `[places, top_k]`, `UNKNOWN` at places that nobody recorded."""

    tables: dict[str, dict[int, Tensor]] = field(default_factory=dict)

    def record(self, layer: str, *, samples: Tensor, places: Tensor, chosen: Tensor) -> None:
        """Writes down `chosen` `[batch, seq, top_k]`; a negative sample is filler."""
        table = self.tables.setdefault(layer, {})
        for sample, at, experts in zip(samples.tolist(), places.cpu(), chosen.cpu(), strict=True):
            if sample < 0:
                continue
            longest = max(int(at.max()) + 1 if at.numel() else 0, len(table.get(sample, ())))
            rows = torch.full((longest, experts.shape[-1]), UNKNOWN)
            if sample in table:
                rows[: len(table[sample])] = table[sample]
            rows[at] = experts
            table[sample] = rows

    def find(self, layer: str, *, samples: Tensor, places: Tensor) -> Tensor:
        """What was written, `[batch, seq, top_k]`. Raises `KeyError` for a layer, sample or place that was not."""
        rows = []
        for sample, at in zip(samples.tolist(), places.cpu(), strict=True):
            table = self.tables.get(layer, {}).get(sample)
            if table is None or (at.numel() and int(at.max()) >= len(table)) or bool((table[at] == UNKNOWN).any()):
                raise KeyError(f"no routes of sample {sample} in {layer} were recorded for all of these places")
            rows.append(table[at])
        return torch.stack(rows).to(places.device) if rows else places.new_zeros(0, 1, 1)

    def merge(self, other: Mapping[str, Mapping[int, Tensor]]) -> None:
        """Adds the tables of another record, such as another rank's; what it knows wins."""
        for layer, table in other.items():
            for sample, rows in table.items():
                known = (rows != UNKNOWN).all(-1).nonzero()[:, 0]
                self.record(layer, samples=torch.tensor([sample]), places=known[None], chosen=rows[known][None])


@dataclass(eq=False)
class RecordRoutes:
    """A tap that writes down what is chosen, and leaves it."""

    routes: Routes

    def __call__(self, layer: str, *, samples: Tensor, places: Tensor, preferences: Tensor, chosen: Tensor) -> Tensor:
        self.routes.record(layer, samples=samples, places=places, chosen=chosen)
        return chosen


class RouteDifference(NamedTuple):
    """A token that would have gone elsewhere; `gap`: by how much its own last choice was preferred to the record's."""

    layer: str
    sample: int
    place: int
    gap: float


@dataclass(eq=False)
class ReplayRoutes:
    """A tap that uses the record. `differences` lists the tokens whose own choice differs by more than `margin`.

    `replayed` counts those whose own choice was another at all.
    """

    routes: Routes
    margin: float
    differences: list[RouteDifference] = field(default_factory=list)
    replayed: int = 0

    def __call__(self, layer: str, *, samples: Tensor, places: Tensor, preferences: Tensor, chosen: Tensor) -> Tensor:
        recorded, known = chosen.clone(), samples >= 0  # filler goes where it likes
        recorded[known] = self.routes.find(layer, samples=samples[known], places=places[known])
        other = (recorded.sort(-1).values != chosen.sort(-1).values).any(-1)
        self.replayed += int(other.sum())
        gaps = preferences.gather(-1, chosen).amin(-1) - preferences.gather(-1, recorded).amin(-1)
        for row, column in (other & ~(gaps <= self.margin)).nonzero().tolist():
            place, gap = int(places[row, column]), float(gaps[row, column])
            self.differences.append(RouteDifference(layer, int(samples[row]), place, gap))
        return recorded


def set_routes(model: nn.Module, tap: RouteTap | None) -> None:
    """Puts `tap` between choice and use in every mixture of `model`; None takes it away.

    Samples are told apart by `Auxiliary.samples`, which must then be given.
    """
    for module in model.modules():
        if isinstance(module, TakesRoutes):
            module.tap = tap


# Experts: feed-forward layers of one shape, their weights stacked `[experts, outputs, inputs]`.
#
# Tokens arrive sorted by expert, so each expert multiplies one contiguous slice: a grouped matrix product.


ALIGNED_FEATURES = 8
"""Rows of bfloat16 begin at 16 bytes in the fused product."""


class Experts(nn.Module):
    """The feed-forward of `shoal.models.layers`, `number` times over. `gate` is None for plain GELU."""

    gate: nn.Parameter | None

    def __init__(self, number: int, *, width: int, hidden: int, feed_forward: Literal["swiglu", "gelu"]) -> None:
        super().__init__()
        gated = feed_forward == "swiglu"
        self.register_parameter("gate", nn.Parameter(torch.zeros(number, hidden, width)) if gated else None)
        self.up = nn.Parameter(torch.zeros(number, hidden, width))
        self.down = nn.Parameter(torch.zeros(number, width, hidden))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """`rows` `[m, width]` sorted by expert, `counts` int64 `[experts]` of them for each; as `rows`."""
        up = grouped_linear(rows, self.up, counts)
        hidden = F.gelu(up) if self.gate is None else F.silu(grouped_linear(rows, self.gate, counts)) * up
        return grouped_linear(hidden, self.down, counts)


def grouped_linear(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """`rows` `[m, inputs]` times `weights[g].T` for the `counts[g]` rows of each group g in turn; `[m, outputs]`.

    An expert without rows takes part all the same, so that every weight has a gradient.
    """
    if _fused(rows, weights):
        offsets = counts.cumsum(0).to(torch.int32)
        return F.grouped_mm(rows, weights.to(rows.dtype).transpose(-2, -1), offs=offsets)
    parts = rows.split(counts.tolist())
    return torch.cat([part @ weight.T for part, weight in zip(parts, weights.unbind(0), strict=True)])


def _fused(rows: Tensor, weights: Tensor) -> bool:
    """Is there one kernel for all groups? It takes bfloat16 on GPUs, and rows that are aligned."""
    aligned = all(features % ALIGNED_FEATURES == 0 for features in weights.shape[1:])
    return rows.is_cuda and rows.dtype == torch.bfloat16 and aligned and len(rows) > 0


Balance = Literal["auxiliary", "bias", "none"]


@dataclass(frozen=True, kw_only=True)
class MixtureOptions:
    """What a mixture is, beside the width of the model. The keys are those of `MoEConfig`, defaults resolved."""

    experts: int
    top_k: int
    expert_width: int
    shared_experts: int = 0
    gate: Gate = "softmax"
    normalise_gates: bool = True
    capacity_factor: float | None = None
    balance: Balance = "none"
    balance_coefficient: float = 0.0
    bias_rate: float = 0.0
    router_z_loss: float = 0.0
    every: int = 1
    first_dense: int = 0

    @property
    def balances_by_loss(self) -> bool:
        """Is there a balance loss?"""
        return self.balance == "auxiliary" and self.balance_coefficient > 0

    @property
    def has_losses(self) -> bool:
        """Has the router any loss of its own?"""
        return self.balances_by_loss or self.router_z_loss > 0

    def holds(self, block: int) -> bool:
        """Is the feed-forward of this block, counted from 0, a mixture?"""
        return block >= self.first_dense and (block - self.first_dense + 1) % self.every == 0


@dataclass(frozen=True)
class Routing:
    """Where the tokens of one forward go: all `[batch, seq, ...]` of the tokens that this rank routes.

    `counts` int64 `[batch, experts]` and `lengths` int64 `[batch]` leave padding out; they are over whole sequences
    where anything asks for that. `own` `[experts]` are the counts of these tokens alone.
    """

    logits: Tensor
    scores: Tensor
    chosen: Tensor
    real: Tensor
    counts: Tensor
    lengths: Tensor
    own: Tensor


class Mixture(TakesAuxiliary, TakesRoutes):
    """`[batch, seq, width]` to the same shape. `name` tells the layers of a model apart."""

    def __init__(
        self, width: int, options: MixtureOptions, *, feed_forward: Literal["swiglu", "gelu"], name: str
    ) -> None:
        super().__init__()
        self.options, self.name = options, name
        self.router = Router(
            width,
            options.experts,
            gate=options.gate,
            normalised=options.normalise_gates,
            bias_rate=options.bias_rate if options.balance == "bias" else None,
        )
        self.experts = Experts(options.experts, width=width, hidden=options.expert_width, feed_forward=feed_forward)
        dense, shared = (SwiGLU if feed_forward == "swiglu" else GELU), options.shared_experts * options.expert_width
        self.shared: nn.Module | None = dense(width, shared) if shared else None
        self.exchange: TokenExchange = LocalExchange()

    @property
    def stacked(self) -> list[str]:
        """See `SendsTokens`."""
        return [f"experts.{name}" for name, _ in self.experts.named_parameters()]

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """`positions` `[batch, seq]` (int64) are the tokens' places in their samples; default 0, 1, 2, ...

        Raises `RuntimeError` in training where the router has a loss and no `Auxiliary` was set.
        """
        mine = self.exchange.split(x)
        places = self.exchange.positions(positions, x)
        routing = self._route(mine, places)
        gates = self.router.gates(routing.scores, routing.chosen)
        kept = self._kept(routing, places, seq=x.shape[1])
        self._count(routing, kept)
        done = self._through_experts(mine, routing.chosen, gates, kept)
        if self.training and self.options.has_losses:
            done = self._with_losses(done, routing)
        out = self.exchange.join(done, seq=x.shape[1])
        return out if self.shared is None else out + self.shared(x)

    def _route(self, x: Tensor, places: Tensor) -> Routing:
        logits, scores = self.router(x)
        chosen = self._chosen(self.router.preferences(scores), places)
        real = self._real(places)
        counts = places.new_zeros(x.shape[0], self.options.experts)
        counts.scatter_add_(1, chosen.flatten(1), real[..., None].expand_as(chosen).flatten(1).long())
        whole = torch.cat((counts, real.sum(1, keepdim=True)), dim=1)
        if self.options.capacity_factor is not None or (self.training and self.options.has_losses):
            whole = self.exchange.sum_over_sequence(whole)
        return Routing(logits, scores, chosen, real, whole[:, :-1], whole[:, -1], counts.sum(0))

    def _chosen(self, preferences: Tensor, places: Tensor) -> Tensor:
        chosen = top_k(preferences, self.options.top_k)
        if self.tap is None:
            return chosen
        if self.announced is None or self.announced.samples is None:
            raise RuntimeError(
                f"{self.name} has its routes recorded or replayed and does not know its samples; call set_auxiliary("
                f"model, ..., samples=positions) before each forward"
            )
        samples = self.announced.samples
        return self.tap(self.name, samples=samples, places=places, preferences=preferences, chosen=chosen)

    def _real(self, places: Tensor) -> Tensor:
        """Which tokens are no padding, bool as `places`."""
        if self.announced is None or self.announced.real is None:
            return torch.ones_like(places, dtype=torch.bool)
        return self.exchange.part(self.announced.real)

    def _kept(self, routing: Routing, places: Tensor, *, seq: int) -> Tensor | None:
        """The choices that find room, bool as `routing.chosen`; None: all."""
        options = self.options
        if options.capacity_factor is None:
            return None
        capacity = capacity_of(
            routing.lengths, factor=options.capacity_factor, top_k=options.top_k, experts=options.experts
        )
        return within_capacity(
            routing.chosen, places, real=routing.real, capacity=capacity, experts=options.experts,
            gather=partial(self.exchange.gather_over_sequence, fill=NEVER, seq=seq),
        )  # fmt: skip

    def _count(self, routing: Routing, kept: Tensor | None) -> None:
        """Loads and dropped choices of this forward, in training; a recomputation counts nothing."""
        if not self.training or (self.announced is not None and self.name in self.announced.counted):
            return
        self.router.count(routing.own, kept=None if kept is None else kept.sum())
        if self.announced is not None:
            self.announced.counted.add(self.name)

    def _through_experts(self, x: Tensor, chosen: Tensor, gates: Tensor, kept: Tensor | None) -> Tensor:
        """Each token through its experts, and the weighted sum; a choice without room adds nothing."""
        done = through_experts(
            x.to(_compute_dtype(x)).flatten(0, 1), chosen.flatten(0, 1), gates.flatten(0, 1),
            number=self.options.experts, exchange=self.exchange, experts=self.experts,
            kept=None if kept is None else kept.flatten(0, 1),
        )  # fmt: skip
        return done.to(_compute_dtype(x)).unflatten(0, x.shape[:2])

    def _with_losses(self, out: Tensor, routing: Routing) -> Tensor:
        """`out`, and in its backward the gradient of the router's own losses."""
        options, losses = self.options, []
        if options.balances_by_loss:
            shares = self.router.shares(routing.scores).masked_fill(~routing.real[..., None], 0)
            terms = balance_terms(shares, counts=routing.counts, lengths=routing.lengths, top_k=options.top_k)
            losses.append(options.balance_coefficient * terms)
        if options.router_z_loss:
            z = z_terms(routing.logits, real=routing.real, lengths=routing.lengths)
            losses.append(options.router_z_loss * z)
        if self.announced is None:
            raise RuntimeError(
                f"{self.name} has an auxiliary loss and no weights of the sequences; in training call "
                f"set_auxiliary(model, weights, scale) before each forward"
            )
        return injected(out, torch.stack(losses).sum(0), self.announced, name=self.name)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """What the experts compute in: rows are rounded before they travel, not after."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


# How evenly the tokens of a step went over the experts: what is measured of every mixture.


def mixtures_of(model: nn.Module) -> list[Mixture]:
    """Those of `model`, in its order."""
    return [module for module in model.modules() if isinstance(module, Mixture)]


def loads(mixtures: Iterable[Mixture]) -> dict[str, Tensor]:
    """Tokens for each expert in the last committed step over all ranks, int64 `[experts]`, by the mixture's name."""
    return {mixture.name: mixture.router.last_loads for mixture in mixtures}


def load_figures(mixtures: Sequence[Mixture]) -> dict[str, float]:
    """Measurements of the last step, over these mixtures: the worst and the mean of largest over mean load,
    and the share of choices that found no room, where there is a capacity.

    Empty where there is no mixture, or no step was committed yet.
    """
    if not mixtures:
        return {}
    each = [load.max() / load.double().mean() for load in loads(mixtures).values()]
    ratios = [ratio for ratio in torch.stack(each).tolist() if not math.isnan(ratio)]  # read once; no load: 0 / 0
    if not ratios:
        return {}
    figures = {"moe/load_max_over_mean": max(ratios), "moe/load_max_over_mean_average": sum(ratios) / len(ratios)}
    bounded = [mixture.router for mixture in mixtures if mixture.options.capacity_factor is not None]
    if bounded:
        chosen = sum(int(router.last_loads.sum()) for router in bounded)
        figures["moe/dropped_share"] = sum(int(router.last_dropped) for router in bounded) / chosen
    return figures


def expert_loads(mixtures: Iterable[Mixture]) -> dict[str, float]:
    """The loads of the last step as measurements: `moe/load/<mixture>/<expert>`, experts counted from 0."""
    return {
        f"moe/load/{name}/{expert}": tokens
        for name, load in loads(mixtures).items()
        for expert, tokens in enumerate(load.tolist())
    }
