"""Optimizers written down plainly, in float64, on whole parameters: what the real ones are compared with.

Each is `step(x, g, state, t)` for update t, from 1; it changes `x` and the dictionary `state` of one parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Plain = Callable[[Tensor, Tensor, dict[str, Any], int], None]

LR, DECAY = 0.02, 0.1


def rmsprop(x: Tensor, g: Tensor, state: dict[str, Any], t: int) -> None:
    """s = a s + (1 - a) g^2,  m = a m + (1 - a) g,  b = mu b + g / (sqrt(s - m^2) + eps),  x -= lr b; decay in g."""
    g = g + DECAY * x
    state["s"] = 0.99 * state.get("s", 0) + 0.01 * g**2
    state["m"] = 0.99 * state.get("m", 0) + 0.01 * g
    state["b"] = 0.9 * state.get("b", 0) + g / ((state["s"] - state["m"] ** 2).sqrt() + 1e-8)
    x -= LR * state["b"]


def _moments(g: Tensor, state: dict[str, Any], beta2: float = 0.999) -> tuple[Tensor, Tensor]:
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g**2
    return state["m"], state["v"]


def nadam(x: Tensor, g: Tensor, state: dict[str, Any], t: int) -> None:
    """mu_t = b1 (1 - 0.96^(0.004 t) / 2), P_t = their product, and
    x -= lr ((1 - mu_t) g / (1 - P_t) + mu_(t+1) m / (1 - P_(t+1))) / (sqrt(v / (1 - b2^t)) + eps).
    """
    mu, following = (0.9 * (1 - 0.5 * 0.96 ** (0.004 * n)) for n in (t, t + 1))
    product = state["p"] = state.get("p", 1.0) * mu
    mean, square = _moments(g, state)
    x *= 1 - LR * DECAY
    step = (1 - mu) * g / (1 - product) + following * mean / (1 - product * following)
    x -= LR * step / ((square / (1 - 0.999**t)).sqrt() + 1e-8)


def radam(x: Tensor, g: Tensor, state: dict[str, Any], t: int) -> None:
    """rho = 2 / (1 - b2) - 1,  rho_t = rho - 2 t b2^t / (1 - b2^t); from rho_t = 5 on the step is Adam's times
    sqrt((rho_t - 4) (rho_t - 2) rho / ((rho - 4) (rho - 2) rho_t)), and before that the mean's alone.
    """
    mean, square = _moments(g, state)
    x *= 1 - LR * DECAY
    most = 2 / 0.001 - 1
    rho = most - 2 * t * 0.999**t / (1 - 0.999**t)
    step = mean / (1 - 0.9**t)
    if rho > 5:
        factor = ((rho - 4) * (rho - 2) * most / ((most - 4) * (most - 2) * rho)) ** 0.5
        step = step * factor * (1 - 0.999**t) ** 0.5 / (square.sqrt() + 1e-8)
    x -= LR * step


def lion(x: Tensor, g: Tensor, state: dict[str, Any], t: int) -> None:
    """x = (1 - lr w) x - lr sign(b1 m + (1 - b1) g),  m = b2 m + (1 - b2) g."""
    mean = state.get("m", torch.zeros_like(x))
    step = torch.sign(0.9 * mean + 0.1 * g)
    state["m"] = 0.99 * mean + 0.01 * g
    x *= 1 - LR * DECAY
    x -= LR * step


def _trust(x: Tensor, step: Tensor, *, most: float = float("inf")) -> float:
    own, length = float(x.norm()), float(step.norm())
    return min(own / length, most) if own > 0 and length > 0 else 1.0


def lars(x: Tensor, g: Tensor, state: dict[str, Any], t: int) -> None:
    """c = k |x| / (|g| + w |x| + eps),  v = mu v + c (g + w x),  x -= lr v."""
    own, length = float(x.norm()), float(g.norm())
    factor = 0.1 * own / (length + DECAY * own + 1e-8) if own > 0 and length > 0 else 1.0
    state["v"] = 0.9 * state.get("v", 0) + factor * (g + DECAY * x)
    x -= LR * state["v"]


def lamb(x: Tensor, g: Tensor, state: dict[str, Any], t: int) -> None:
    """u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + w x,  x -= lr |x| / |u| u."""
    mean, square = _moments(g, state)
    step = mean / (1 - 0.9**t) / ((square / (1 - 0.999**t)).sqrt() + 1e-6) + DECAY * x
    x -= LR * _trust(x, step) * step


def lamb_apart(x: Tensor, g: Tensor, state: dict[str, Any], t: int) -> None:
    """u = m / (sqrt(v) + eps),  x = (1 - lr w) x,  x -= lr min(|x| / |u|, 0.5) u."""
    mean, square = _moments(g, state)
    step = mean / (square.sqrt() + 1e-6)
    factor = _trust(x, step, most=0.5)
    x *= 1 - LR * DECAY
    x -= LR * factor * step
