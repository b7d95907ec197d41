"""How evenly the tokens of a step went over the experts: what is measured of every mixture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from shoal.models.mixture import Mixture


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
    ratios = [float(load.max() / load.double().mean()) for load in loads(mixtures).values() if bool(load.any())]
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
