"""Muon beside PyTorch's, and beside its equations in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.errors import ConfigError
from shoal.optim import muon
from shoal.optim.build import build_optimizer, set_rate
from shoal.optim.config import AdamW
from shoal.optim.matrix_kinds import Muon
from shoal.optim.muon import OwnedMuon, orthogonalised

SHAPES = {"blocks.wide": (8, 24), "blocks.tall": (40, 16), "embedding": (12, 6), "blocks.bias": (24,)}
STEPS = 20


def drawn(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for n, s in SHAPES.items()}


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(value) for name, value in drawn(0, dtype).items()}


def built(config: Muon | AdamW, held: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    return build_optimizer(config, [(name, p, p.ndim > 1) for name, p in held.items()], lr=config.lr)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_matrices_step_as_pytorchs_muon_steps_them(adjust: str, nesterov: bool) -> None:
    """Twenty steps, in the precision that PyTorch's has: to 1e-6."""
    ours, theirs = ({n: p for n, p in parameters().items() if n in ("blocks.wide", "blocks.tall")} for _ in range(2))
    config = Muon(lr=0.02, weight_decay=0.1, precision="bfloat16", adjust=adjust, nesterov=nesterov)  # pyright: ignore[reportArgumentType]
    first = built(config, ours)
    second = torch.optim.Muon(theirs.values(), lr=0.02, weight_decay=0.1, adjust_lr_fn=adjust, nesterov=nesterov)
    for step in range(1, STEPS + 1):
        for name, gradient in drawn(step).items():
            if name in ours:
                ours[name].grad, theirs[name].grad = gradient.clone(), gradient.clone()
        first.step()
        second.step()
    for name, wanted in theirs.items():
        assert float((ours[name] - wanted).detach().abs().max()) < 1e-6, name


def plain(x: Tensor, g: Tensor, m: Tensor, *, lr: float, decay: float) -> None:
    """m = mu m + (1 - mu) g,  n = mu m + (1 - mu) g,  and of U S V^T = n / |n| the update U p(p(...p(S))) V^T with
    p(s) = 3.4445 s - 4.775 s^3 + 2.0315 s^5, five times: by the singular values themselves.
    """
    m.mul_(0.95).add_(0.05 * g)
    n = 0.95 * m + 0.05 * g
    u, s, v = torch.linalg.svd(n / n.norm(), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    x.mul_(1 - lr * decay).sub_(lr * 0.2 * max(x.shape) ** 0.5 * (u * s) @ v)


def test_heads_are_orthogonalised_by_themselves() -> None:
    """Each as a matrix of its own would be, with the scale of its own shape."""
    drawn_ = torch.Generator().manual_seed(5)
    whole = nn.Parameter(torch.randn(6, 5, generator=drawn_, dtype=torch.float64))
    apart = [nn.Parameter(part.clone()) for part in whole.detach().split(2)]
    heads = Muon(lr=0.02, heads={"*.query.weight": 3})
    first = built(heads, {"blocks.0.query.weight": whole})
    second = built(Muon(lr=0.02), {f"blocks.{number}": part for number, part in enumerate(apart)})
    for _ in range(STEPS):
        whole.grad = torch.randn(6, 5, generator=drawn_, dtype=torch.float64)
        for part, gradient in zip(apart, whole.grad.split(2), strict=True):
            part.grad = gradient.clone()
        first.step()
        second.step()
    assert torch.allclose(whole, torch.cat(list(apart)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("heads", [{"*.query.weight": 4}, {"*.bias": 2}, {"*embed*": 3}])
def test_heads_that_no_rows_belong_to_are_refused(heads: dict[str, int]) -> None:
    """With the parameter's name and shape."""
    held = {"blocks.query.weight": (6, 5), "blocks.bias": (6,), "embed.weight": (6, 5)}
    with pytest.raises(ConfigError, match=r"optimizer.heads: .* of shape .* give a divisor of its rows"):
        built(Muon(heads=heads), {name: nn.Parameter(torch.zeros(shape)) for name, shape in held.items()})


def test_updates_are_those_of_the_equations() -> None:
    """Matrices by their singular values, and the embedding and the bias as AdamW steps them, twenty times."""
    ours, others = parameters(torch.float64), parameters(torch.float64)
    theirs = drawn(0, torch.float64)
    momenta = {name: torch.zeros_like(x) for name, x in theirs.items()}
    optimizer = built(Muon(lr=0.02, adamw_lr=0.005), ours)
    set_rate(optimizer, 0.02)
    adamw = built(AdamW(lr=0.005), {name: p for name, p in others.items() if name in ("embedding", "blocks.bias")})
    for step in range(1, STEPS + 1):
        for name, gradient in drawn(step, torch.float64).items():
            ours[name].grad, others[name].grad = gradient.clone(), gradient.clone()
            if name in ("blocks.wide", "blocks.tall"):
                plain(theirs[name], gradient, momenta[name], lr=0.02, decay=0.1)
        optimizer.step()
        adamw.step()
    for name, parameter in ours.items():
        wanted = theirs[name] if name in ("blocks.wide", "blocks.tall") else others[name].detach()
        assert float((parameter.detach() - wanted).abs().max()) < 1e-11, name


@pytest.mark.parametrize("shape", [(64, 64), (48, 160), (300, 20), (3, 24, 40)])
def test_singular_values_become_equal(shape: tuple[int, ...]) -> None:
    """Of random matrices: 0.68 to 1.14 after five iterations, and 0.7 to 1.3 with one of polish, where the smallest was
    no less than a hundredth of the norm.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    x = (u * s.clamp(min=0.02 * float(x.norm()))[..., None, :]) @ v
    five = torch.linalg.svdvals(orthogonalised(x))
    assert 0.68 < float(five.min()) < float(five.max()) < 1.14
    polished = torch.linalg.svdvals(orthogonalised(x, polish=1))
    assert 0.9 < float(polished.min()) < float(polished.max()) < 1.01
    ours, theirs = orthogonalised(x, polish=8), u @ v
    assert float((ours - theirs).abs().max()) < 1e-4


@pytest.mark.parametrize("shape", [(80, 90), (80, 200), (200, 80), (2, 16, 70)])
def test_the_length_of_a_matrix_does_not_matter(shape: tuple[int, ...]) -> None:
    """Also where its square is far from 1; of nothing comes nothing."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    wanted = orthogonalised(x)
    for times in (1e-7, 1e-3, 1e5, 1e10):
        assert float((orthogonalised(x * times) - wanted).abs().max()) < 1e-4, times
    assert not orthogonalised(torch.zeros(shape)).any()


@pytest.mark.parametrize("shape", [(96, 384), (40, 60)])
def test_small_singular_values_survive_rounding(shape: tuple[int, int]) -> None:
    """In float32, down to 1e-6 of the largest, whether X or its Gram matrix is followed: as near to the iterations on
    the singular values themselves as 5 digits allow, grown 485 times.
    """
    generator = torch.Generator().manual_seed(2)
    rows, columns = (
        torch.linalg.qr(torch.randn(n, shape[0], generator=generator, dtype=torch.float64))[0] for n in shape
    )
    s = torch.logspace(0, -6, shape[0], dtype=torch.float64)
    x = (rows * s) @ columns.mT
    wanted = s / s.norm()
    for _ in range(5):
        wanted = 3.4445 * wanted - 4.775 * wanted**3 + 2.0315 * wanted**5
    found = orthogonalised(x.float()).double()
    assert float((found - (rows * wanted) @ columns.mT).norm() / wanted.norm()) < 5e-5


def test_a_script_builds_it_of_plain_parameters() -> None:
    """Matrices are orthogonalised, the rest is AdamW's; the options of a group count before its own."""
    held = parameters()
    optimizer = OwnedMuon(held.values(), lr=0.1, weight_decay=0.3)
    assert [(g["whole"], len(g["params"]), g["weight_decay"]) for g in optimizer.param_groups] == [
        (True, 3, 0.3),
        (False, 1, 0.3),
    ]
    grouped = OwnedMuon([{"params": [held["embedding"]], "lr": 0.5}, {"params": [held["blocks.wide"]], "whole": True}])
    assert [(g["whole"], g["lr"]) for g in grouped.param_groups] == [(False, 0.5), (True, 3e-4)]


def test_tf32_follows_no_gram_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its 10 bits lose small singular values there: the matrix is multiplied in every iteration."""
    taken: list[int] = []
    factor = muon._factor
    monkeypatch.setattr(muon, "_factor", lambda x, steps, **how: taken.append(len(steps)) or factor(x, steps, **how))
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    plain = orthogonalised(x)
    monkeypatch.setattr(muon, "_in_tf32", lambda x: True)
    assert torch.allclose(orthogonalised(x), plain, atol=1e-5)
    assert taken == [3, 2, 1, 1, 1, 1, 1]


def test_tf32_is_of_float32_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where somebody has allowed it."""
    with FakeTensorMode():
        on_gpu, on_cpu = torch.empty(2, 2, device="cuda"), torch.empty(2, 2)
    found = {}
    for precision in ("highest", "high"):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda precision=precision: precision)
        found[precision] = [muon._in_tf32(x) for x in (on_gpu, on_cpu)]
    assert found == {"highest": [False, False], "high": [True, False]}
