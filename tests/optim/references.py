"""Optimizers written down plainly, in float64, on whole parameters: what the real ones are compared with.

Each is `step(x, g, state, t)` for update t, from 1; it changes `x` and the dictionary `state` of one parameter. One
that has the name of a kind is that kind's, with the options that `OPTIONS` has for it: `test_equations.py` finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.maths.counter import key_of, normal

Plain = Callable[[Tensor, Tensor, dict[str, Any], int], None]

LR, DECAY = 0.02, 0.1

_BETAS = {"beta1": 0.95, "beta2": 0.95}
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"beta2": 0.999},
    "sgd": {"momentum": 0.9, "nesterov": True},
    "rmsprop": {"momentum": 0.9, "centered": True},
    "lars": {"coefficient": 0.1},
    "muon": {"adamw": (), **_BETAS},
    "dion": {"adamw": (), "rank_fraction": 0.45, **_BETAS},
    "soap": {"adamw": (), "every": 3, **_BETAS},
    "shampoo": {"adamw": (), "every": 2, "start": 2, "block": 4, **_BETAS},
}


def adamw(x: Tensor, g: Tensor, state: dict[str, Any], t: int) -> None:
    """x = (1 - lr w) x - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)."""
    mean, square = _moments(g, state)
    x *= 1 - LR * DECAY
    x -= LR * mean / (1 - 0.9**t) / ((square / (1 - 0.999**t)).sqrt() + 1e-8)


def sgd(x: Tensor, g: Tensor, state: dict[str, Any], t: int) -> None:
    """b = mu b + g,  x -= lr (g + mu b); the first b is g; decay in g."""
    g = g + DECAY * x
    state["b"] = 0.9 * state.get("b", 0) + g
    x -= LR * (g + 0.9 * state["b"])


def adagrad(x: Tensor, g: Tensor, state: dict[str, Any], t: int) -> None:
    """s = s + g^2,  x -= lr g / (sqrt(s) + eps); decay in g."""
    g = g + DECAY * x
    state["s"] = state.get("s", 0) + g**2
    x -= LR * g / (state["s"].sqrt() + 1e-10)


def adan(x: Tensor, g: Tensor, state: dict[str, Any], t: int) -> None:
    """d = g - g_before,  m, v, n = means of g, d and (g + 0.92 d)^2,  x = (x - lr (m + 0.92 v) / (sqrt(n) + eps)) /
    (1 + lr w).
    """
    change = g - state.get("g", g)
    state["g"] = g.clone()
    means = []
    for name, kept, number in (("m", 0.98, g), ("v", 0.92, change), ("n", 0.99, (g + 0.92 * change) ** 2)):
        state[name] = kept * state.get(name, 0) + (1 - kept) * number
        means.append(state[name] / (1 - kept**t))
    x -= LR * (means[0] + 0.92 * means[1]) / (means[2].sqrt() + 1e-8)
    x /= 1 + LR * DECAY


def muon(x: Tensor, g: Tensor, state: dict[str, Any], t: int) -> None:
    """m = 0.95 m + 0.05 g,  u = 0.95 m + 0.05 g over its norm, five times u = 3.4445 u - 4.775 G u + 2.0315 G^2 u with
    G = u u^T,  x -= lr 0.2 sqrt(max(rows, columns)) u; vectors as Adam has them.
    """
    if x.ndim < 2:
        x -= LR * (adam_step(g, state, t) + DECAY * x)
        return
    state["m"] = 0.95 * state.get("m", 0) + 0.05 * g
    step = 0.95 * state["m"] + 0.05 * g
    step = step / step.norm()
    for _ in range(5):
        gram = step @ step.T
        step = 3.4445 * step - 4.775 * gram @ step + 2.0315 * gram @ gram @ step
    x *= 1 - LR * DECAY
    x -= LR * 0.2 * max(x.shape) ** 0.5 * step


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


def adafactor(x: Tensor, g: Tensor, state: dict[str, Any], t: int) -> None:
    """R, C = means of g^2 with b = 1 - t^-0.8,  V = R C / mean(R),  u = g / sqrt(V) / max(1, rms(u)),
    x = (1 - lr w) x - min(lr, 1 / sqrt(t)) max(1e-3, rms(x)) u.
    """
    rate = min(LR, t**-0.5) * max(1e-3, float(x.square().mean().sqrt()))
    x *= 1 - LR * DECAY
    kept = 1 - t**-0.8
    if x.ndim > 1:
        state["r"] = kept * state.get("r", 0) + (1 - kept) * (g**2).mean(1)
        state["c"] = kept * state.get("c", 0) + (1 - kept) * (g**2).mean(0)
        square = torch.outer(state["r"], state["c"]) / state["r"].mean()
    else:
        square = state["v"] = kept * state.get("v", 0) + (1 - kept) * g**2
    step = g / square.sqrt()
    x -= rate * step / max(1.0, float(step.square().mean().sqrt()))


def adam_step(g: Tensor, state: dict[str, Any], t: int) -> Tensor:
    """m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) with b1 = b2 = 0.95."""
    state["m"] = 0.95 * state.get("m", 0) + 0.05 * g
    state["v"] = 0.95 * state.get("v", 0) + 0.05 * g**2
    return state["m"] / (1 - 0.95**t) / ((state["v"] / (1 - 0.95**t)).sqrt() + 1e-8)


def soap(x: Tensor, g: Tensor, state: dict[str, Any], t: int) -> None:
    """Adam of P^T g Q, turned back, with a change of the basis after every third update; vectors as Adam has them.
    The first gradient makes the basis and no update.
    """
    if x.ndim < 2:
        x -= LR * (adam_step(g, state, t) + DECAY * x)
        return
    x *= 1 - LR * DECAY
    if t == 1:
        state |= {"l": g @ g.T, "r": g.T @ g, "mean": torch.zeros_like(g), "square": torch.zeros_like(g)}
        state |= {f"{side}q": torch.linalg.eigh(state[side])[1].flip(1) for side in "lr"}
        return
    p, q, count = state["lq"], state["rq"], t - 1
    state["mean"] = 0.95 * state["mean"] + 0.05 * g
    state["square"] = 0.95 * state["square"] + 0.05 * (p.T @ g @ q) ** 2
    mean, square = p.T @ (state["mean"] / (1 - 0.95**count)) @ q, state["square"] / (1 - 0.95**count)
    x -= LR * p @ (mean / (square.sqrt() + 1e-8)) @ q.T
    state["l"], state["r"] = 0.95 * state["l"] + 0.05 * g @ g.T, 0.95 * state["r"] + 0.05 * g.T @ g
    if count % 3 == 0:
        for dim, side in enumerate("lr"):
            basis, mean = state[f"{side}q"], state[side]
            order = torch.diag(basis.T @ mean @ basis).argsort(descending=True)
            state["square"] = state["square"].index_select(dim, order)
            state[f"{side}q"] = torch.linalg.qr(mean @ basis[:, order])[0]


def shampoo(x: Tensor, g: Tensor, state: dict[str, Any], t: int) -> None:
    """Blocks of at most 4 x 4, cut at the edges, each between inverse fourth roots of its sides' squares; the length of
    the whole is that of Adam's step. Roots are computed at updates 3, 4, 6, 8, ... Vectors as Adam has them.
    """
    adam = adam_step(g, state, t)
    x *= 1 - LR * DECAY
    if x.ndim < 2:
        x -= LR * adam
        return
    found = torch.zeros_like(x)
    for top in range(0, x.shape[0], 4):
        for left in range(0, x.shape[1], 4):
            cut = (slice(top, top + 4), slice(left, left + 4))
            block, own = g[cut], state.setdefault(f"{top}, {left}", {})
            for side, square in (("l", block @ block.T), ("r", block.T @ block)):
                own[side] = 0.95 * own.get(side, 0) + 0.05 * square
                if t == 3 or (t > 3 and t % 2 == 0):
                    values, vectors = torch.linalg.eigh(own[side])
                    values = values.clamp(min=0) + 1e-6 * values.max()
                    own[f"{side} root"] = vectors @ torch.diag(values**-0.25) @ vectors.T
            if t > 2:
                found[cut] = own["l root"] @ state["m"][cut] @ own["r root"]
    x -= LR * (adam if t <= 2 else found * adam.norm() / found.norm())


def dion(x: Tensor, g: Tensor, state: dict[str, Any], t: int) -> None:
    """B = M + G,  P R^T = the projection of B onto the columns of B Q,  M = B - 0.05 P R^T,
    x -= lr sqrt(m / n) P (R / |R's columns|)^T. P by Gram and Schmidt; vectors as Adam has them.
    """
    if x.ndim < 2:
        x -= LR * (adam_step(g, state, t) + DECAY * x)
        return
    x *= 1 - LR * DECAY
    buffer = state.get("m", 0) + g
    columns = []
    for column in (buffer @ state.setdefault("q", first_factor(x.shape, 2))).T:
        for other in columns:
            column = column - (other @ column) * other
        columns.append(column / column.norm())
    left = torch.stack(columns, dim=1)
    right = buffer.T @ left
    state["m"] = buffer - 0.05 * left @ right.T
    state["q"] = right / right.norm(dim=0)
    x -= LR * (x.shape[0] / x.shape[1]) ** 0.5 * left @ state["q"].T


def first_factor(shape: torch.Size, rank: int) -> Tensor:
    """What Dion begins with: an orthonormal base of the space of normal numbers of a fixed stream."""
    counters = torch.arange(shape[1] * rank).view(shape[1], rank)
    return torch.linalg.qr(normal(key_of(0, "dion"), counters, dtype=torch.float64))[0]


def schedule_free_sgd(x: Tensor, g: Tensor, state: dict[str, Any], t: int) -> None:
    """z = z - lr (d + w y),  a = (1 - 1/t) a + z / t,  y = 0.1 z + 0.9 a, at one rate; d = g."""
    _schedule_free(x, g, g, state, t)


def schedule_free_adamw(x: Tensor, g: Tensor, state: dict[str, Any], t: int) -> None:
    """The same with d = g / (sqrt(v / (1 - b2^t)) + eps)."""
    state["v"] = 0.999 * state.get("v", 0) + 0.001 * g**2
    _schedule_free(x, g, g / ((state["v"] / (1 - 0.999**t)).sqrt() + 1e-8), state, t)


def _schedule_free(x: Tensor, g: Tensor, d: Tensor, state: dict[str, Any], t: int) -> None:
    z, average = state.setdefault("z", x.clone()), state.setdefault("a", x.clone())
    z = state["z"] = z - LR * (d + DECAY * x)
    average = state["a"] = (1 - 1 / t) * average + z / t
    x.copy_(0.1 * z + 0.9 * average)


def ema(x: Tensor, g: Tensor, state: dict[str, Any], t: int) -> None:
    """SGD that looks ahead: every third update s = s + (x - s) / 2, x = s; a = 0.9 a + 0.1 x."""
    slow = state.setdefault("s", x.clone())
    x -= LR * (g + DECAY * x)
    if t % 3 == 0:
        slow += 0.5 * (x - slow)
        x.copy_(slow)
    state["a"] = x.clone() if t == 1 else 0.9 * state["a"] + 0.1 * x


def swa(x: Tensor, g: Tensor, state: dict[str, Any], t: int) -> None:
    """SGD, and the mean of the weights after updates 5, 7, 9, ...; before that the weights."""
    x -= LR * (g + DECAY * x)
    seen = state.setdefault("seen", [])
    if t >= 5 and t % 2 == 1:
        seen.append(x.clone())
    state["a"] = sum(seen) / len(seen) if seen else x.clone()
