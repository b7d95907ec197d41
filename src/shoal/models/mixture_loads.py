"""How evenly the tokens of a step went over the experts: what is measured of every mixture."""

from __future__ import annotations

from torch import Tensor, nn

from shoal.models.mixture import Mixture


def loads(model: nn.Module) -> dict[str, Tensor]:
    """Tokens for each expert in the last committed step over all ranks, int64 `[experts]`, by the mixture's name."""
    return {mixture.name: mixture.router.last_loads for mixture in _mixtures(model)}


def load_figures(model: nn.Module) -> dict[str, float]:
    """Measurements of the last step, over the mixtures that are here: the worst and the mean of largest over mean load,
    and the share of choices that found no room, where there is a capacity.

    Empty where there is no mixture, or no step was committed yet.
    """
    ratios = [float(load.max() / load.double().mean()) for load in loads(model).values() if bool(load.any())]
    if not ratios:
        return {}
    figures = {"moe/load_max_over_mean": max(ratios), "moe/load_max_over_mean_average": sum(ratios) / len(ratios)}
    bounded = [mixture.router for mixture in _mixtures(model) if mixture.options.capacity_factor is not None]
    if bounded:
        chosen = sum(int(router.last_loads.sum()) for router in bounded)
        figures["moe/dropped_share"] = sum(int(router.last_dropped) for router in bounded) / chosen
    return figures


def expert_loads(model: nn.Module) -> dict[str, float]:
    """The loads of the last step as measurements: `moe/load/<mixture>/<expert>`, experts counted from 0."""
    return {
        f"moe/load/{name}/{expert}": tokens
        for name, load in loads(model).items()
        for expert, tokens in enumerate(load.tolist())
    }


def _mixtures(model: nn.Module) -> list[Mixture]:
    return [module for module in model.modules() if isinstance(module, Mixture)]
