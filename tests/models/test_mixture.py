"""The mixture of experts."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F

from shoal.models.batch_norm import StepStatistics
from shoal.models.build import build, initialise
from shoal.models.config import ModelConfig, MoEConfig
from shoal.models.layers import GELU, SwiGLU
from shoal.models.mixture import Mixture, MixtureOptions, expert_loads, grouped_linear, load_figures, loads
from shoal.models.roles import roles_of
from shoal.models.router import auxiliary_total, counted_tokens, set_auxiliary, top_k, use_auxiliary

# Two orders of the same float64 sums.
F64 = {"rtol": 1e-12, "atol": 1e-13}
WIDTH, HIDDEN, EXPERTS = 8, 6, 4


def mixture(feed_forward: Any = "swiglu", **keys: Any) -> Mixture:
    """A small mixture whose scores are far from even, in float64."""
    options = {"experts": EXPERTS, "top_k": 2, "expert_width": HIDDEN, "bias_rate": 1e-3, **keys}
    layer = Mixture(WIDTH, MixtureOptions(**options), feed_forward=feed_forward, name="layer").double()
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    if layer.router.bias is not None:
        layer.router.bias.copy_(torch.randn(EXPERTS, generator=generator))
    return layer


def inputs(batch: int = 3, seq: int = 7, *, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, seq, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)


def naive(layer: Mixture, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mixture written out, token by token: its output, and each sequence's losses `[batch]`."""
    o, rows, losses = layer.options, [], []
    for sequence in x:
        room = [
            math.inf if o.capacity_factor is None else math.ceil(o.capacity_factor * o.top_k * len(sequence) / EXPERTS)
        ]
        room, chosen_by, all_scores, z, row = room * EXPERTS, [0] * EXPERTS, [], [], []
        for token in sequence:
            logits = layer.router.weight @ token
            scores = logits.softmax(0) if o.gate == "softmax" else 1 / (1 + (-logits).exp())
            bias = torch.zeros(EXPERTS) if layer.router.bias is None else layer.router.bias
            order = sorted(range(EXPERTS), key=lambda e: (-float((scores[e] + bias[e]).detach()), e))[: o.top_k]
            total = sum(scores[e] for e in order) if o.normalise_gates else 1.0
            y = torch.zeros_like(token)
            for e in order:
                chosen_by[e] += 1
                room[e] -= 1
                if room[e] >= 0:
                    y = y + scores[e] / total * expert(layer, e, token)
            if layer.shared is not None:
                y = y + layer.shared(token)
            row.append(y)
            all_scores.append(scores / scores.sum())
            z.append(torch.log(logits.exp().sum()) ** 2)
        mean = torch.stack(all_scores).mean(0)
        balance = EXPERTS * sum(chosen_by[e] / (o.top_k * len(sequence)) * mean[e] for e in range(EXPERTS))
        coefficient = o.balance_coefficient if o.balance == "auxiliary" else 0.0
        losses.append(coefficient * balance + o.router_z_loss * torch.stack(z).mean())
        rows.append(torch.stack(row))
    return torch.stack(rows), torch.stack(losses)


def expert(layer: Mixture, index: int, token: torch.Tensor) -> torch.Tensor:
    """One expert as the dense layer that it is one of many of."""
    gated = layer.experts.gate is not None
    dense = (SwiGLU if gated else GELU)(WIDTH, HIDDEN).double()
    weights = {f"{name}.weight": p[index] for name, p in layer.experts.named_parameters()}
    return torch.func.functional_call(dense, weights, (token,))


def assert_gradients_close(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one, other, **F64)


COMBINATIONS = list(
    itertools.product(["softmax", "sigmoid"], ["auxiliary", "bias", "none"], [None, 0.75], [0, 2], [True, False])
)


@pytest.mark.parametrize(("gate", "balance", "capacity", "shared", "normalised"), COMBINATIONS)
def test_output_and_gradients_are_those_of_a_loop_over_tokens(
    gate: Any, balance: Any, capacity: float | None, shared: int, normalised: bool
) -> None:
    """Sorting, grouped products, dropping and injected losses give what a loop and one explicit loss give."""
    layer = mixture(
        "swiglu" if shared else "gelu", gate=gate, balance=balance, capacity_factor=capacity, shared_experts=shared,
        normalise_gates=normalised, balance_coefficient=0.3, router_z_loss=0.2 if normalised else 0.0,
    )  # fmt: skip
    x, weights, scale = inputs(), torch.tensor([2.0, 0.5, 1.0], dtype=torch.float64), 0.7
    auxiliary = set_auxiliary(layer, weights)
    out = layer(x)
    auxiliary.scale = scale  # the denominator arrives late
    wanted, losses = naive(layer, x)
    torch.testing.assert_close(out, wanted, **F64)
    torch.testing.assert_close(auxiliary_total(layer), (losses.detach() * weights).sum(), **F64)
    leaves = [x, *layer.parameters()]
    probe = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    assert_gradients_close(
        list(torch.autograd.grad((out * probe).sum(), leaves)),
        list(torch.autograd.grad((wanted * probe).sum() + scale * (losses * weights).sum(), leaves)),
    )


def test_capacity_and_losses_belong_to_the_sequence() -> None:
    """Alone, in a batch, or beside padding, a sequence has the same output, drops and losses."""
    layer = mixture(capacity_factor=0.6, balance="auxiliary", balance_coefficient=0.3, router_z_loss=0.1)
    x = inputs(3, 9)
    set_auxiliary(layer, torch.ones(3), 1.0)
    whole, total = layer(x), 0.0
    for row in range(3):
        padded = torch.cat((x[row : row + 1], inputs(1, 4, seed=5)), dim=1)
        set_auxiliary(layer, torch.ones(1), 1.0, real=(torch.arange(13) < 9)[None])
        torch.testing.assert_close(layer(padded)[:, :9], whole[row : row + 1], **F64)
        total += float(auxiliary_total(layer))
    set_auxiliary(layer, torch.ones(3), 1.0)
    layer(x)
    assert float(auxiliary_total(layer)) == pytest.approx(total, rel=1e-12)


def test_the_first_tokens_stay_whatever_the_order_in_memory() -> None:
    """A sequence given in another order of its positions drops the same tokens."""
    layer, x = mixture(capacity_factor=0.5).eval(), inputs(2, 10)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3))
    shuffled = layer(x[:, order], order.expand(2, 10))
    torch.testing.assert_close(shuffled, layer(x)[:, order], **F64)
    assert not torch.allclose(layer(x[:, order]), shuffled)


def test_ties_go_to_the_lower_index() -> None:
    """Equal scores are ranked by index, whatever the sort would like."""
    scores = torch.tensor([[1.0, 3.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    assert top_k(scores, 2).tolist() == [[1, 2], [0, 1]]


def test_nothing_is_injected_or_counted_in_evaluation() -> None:
    """eval() needs no weights, counts no loads and has the plain gradient."""
    layer, x = mixture(balance="auxiliary", balance_coefficient=0.3).eval(), inputs()
    plain = mixture().eval()
    assert_gradients_close(*[list(torch.autograd.grad(m(x).sum(), m.router.weight)) for m in (layer, plain)])
    assert not layer.router.loads.any()


def test_a_loss_without_weights_or_scale_is_refused() -> None:
    """What would silently train without the auxiliary loss stops, and says what to call."""
    layer, x = mixture(balance="auxiliary", balance_coefficient=0.3), inputs()
    with pytest.raises(RuntimeError, match=r"layer has an auxiliary loss and no weights .* call set_auxiliary"):
        layer(x)
    set_auxiliary(layer, torch.ones(2), 1.0)
    with pytest.raises(RuntimeError, match=r"weights \[2\] for 3 sequences"):
        layer(x)
    set_auxiliary(layer, torch.ones(3))
    with pytest.raises(RuntimeError, match=r"no scale; set auxiliary\.scale"):
        layer(x).sum().backward()


def test_microbatches_in_flight_keep_their_own_scale_and_weights() -> None:
    """Two forwards before two backwards, as in a pipeline, give the sum of the two done one after the other."""
    layer, batches = mixture(balance="auxiliary", balance_coefficient=0.3), [inputs(2), inputs(2, seed=4)]
    settings = [(torch.tensor([1.0, 2.0]), 0.5), (torch.tensor([3.0, 0.0]), 0.25)]
    for x, (weights, scale) in zip(batches, settings, strict=True):
        set_auxiliary(layer, weights, scale)
        layer(x).sum().backward()
    one_by_one = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    kept = [
        (set_auxiliary(layer, weights, scale), layer(x)) for x, (weights, scale) in zip(batches, settings, strict=True)
    ]
    for _, out in reversed(kept):
        out.sum().backward()
    assert_gradients_close([p.grad for p in layer.parameters() if p.grad is not None], one_by_one)


def test_a_recomputation_counts_no_loads_and_the_same_loss() -> None:
    """A second forward of one microbatch leaves loads and totals as the first did."""
    layer, x = mixture(balance="auxiliary", balance_coefficient=0.3), inputs()
    auxiliary = set_auxiliary(layer, torch.ones(3), 1.0)
    layer(x)
    before, total = layer.router.loads.clone(), auxiliary_total(layer)
    use_auxiliary(layer, auxiliary)
    layer(x)
    assert torch.equal(layer.router.loads, before)
    assert auxiliary_total(layer) == total


def test_loads_are_agreed_once_a_step_and_move_the_bias_towards_even() -> None:
    """The router gathers `StepStatistics`; a commit moves each bias by one rate against its load, a discard none."""
    layer = mixture(balance="bias", bias_rate=0.25)
    router, bias = layer.router, layer.router.bias
    assert isinstance(router, StepStatistics)
    assert bias is not None
    assert load_figures([layer]) == {}
    layer(inputs())
    assert int(router.step_sums().sum()) == 3 * 7 * 2
    before = bias.clone()
    router.discard_sums()
    assert not router.step_sums().any()
    router.commit_sums(torch.tensor([4.0, 10.0, 0.0, 6.0, 5.0], dtype=torch.float64))
    torch.testing.assert_close(bias - before, torch.tensor([0.25, -0.25, 0.25, -0.25], dtype=torch.float64))
    assert loads([layer])["layer"].tolist() == [4, 10, 0, 6]
    assert load_figures([layer]) == {"moe/load_max_over_mean": 2.0, "moe/load_max_over_mean_average": 2.0}
    assert set(layer.state_dict()) >= {"router.bias"}
    assert not any("loads" in name for name in layer.state_dict())


def test_what_finds_no_room_is_counted() -> None:
    """Dropped choices of a step are those of the naive capacity; without a capacity they are no measurement."""
    layer, x = mixture(capacity_factor=0.5), inputs(3, 9)
    chosen, room = top_k(layer.router(x)[1], 2), math.ceil(0.5 * 2 * 9 / EXPERTS)
    wanted = sum(max(0, int((row == expert).sum()) - room) for row in chosen for expert in range(EXPERTS))
    layer(x)
    layer.router.commit_sums(layer.router.step_sums())
    assert wanted > 0
    assert load_figures([layer])["moe/dropped_share"] == wanted / (3 * 9 * 2)
    assert sum(expert_loads([layer]).values()) == 3 * 9 * 2
    assert expert_loads([layer])["moe/load/layer/1"] == int((chosen == 1).sum())


def test_the_bias_evens_the_loads() -> None:
    """A skewed bias, moved in 250 commits on the same tokens, brings the fullest expert near the mean."""
    layer, x = mixture(balance="bias", bias_rate=0.005), inputs(8, 32)
    ratios = []
    for _ in range(250):
        layer(x)
        layer.router.commit_sums(layer.router.step_sums())
        ratios.append(load_figures([layer])["moe/load_max_over_mean"])
    assert ratios[0] > 1.3
    assert sum(ratios[-10:]) / 10 < 1.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_grouped_product_is_the_loop(dtype: torch.dtype) -> None:
    """The one-kernel form, as it is called on GPUs, gives the loop's products, empty groups included."""
    generator = torch.Generator().manual_seed(0)
    rows, weights = torch.randn(24, 16, generator=generator), torch.randn(4, 8, 16, generator=generator)
    counts = torch.tensor([9, 0, 12, 3])
    loop = grouped_linear(rows, weights, counts)
    offsets = counts.cumsum(0).to(torch.int32)
    fused = F.grouped_mm(rows.to(dtype), weights.to(dtype).transpose(-2, -1), offs=offsets)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # rounding of inputs to 8 bits, sums of 16
    assert (fused.float() - loop).norm() < tolerance * loop.norm()


def test_a_built_moe_declares_itself_and_trains_one_step() -> None:
    """Every parameter has a role and a first value, dense blocks stay dense, every parameter gets a gradient."""
    config = MoEConfig(vocabulary=32, layers=3, width=16, heads=2, experts=4, first_dense=1, shared_experts=1)
    with torch.device("meta"):
        model = build(config)
    roles = roles_of(model)
    kinds = {name: role.kind for name, role in roles.items()}
    assert kinds["blocks.0.feed_forward.up.weight"] == "column"
    assert kinds["blocks.1.feed_forward.router.weight"] == "router"
    assert kinds["blocks.2.feed_forward.experts.down"] == "expert"
    assert kinds["blocks.2.feed_forward.shared.down.weight"] == "row"
    assert roles["blocks.2.feed_forward.experts.down"].init == roles["blocks.0.feed_forward.down.weight"].init
    assert all(
        role.init is not None and role.decay == (dict(model.named_parameters())[n].ndim >= 2)
        for n, role in roles.items()
    )
    initialise(model, seed=0, device="cpu")
    set_auxiliary(model, torch.ones(2), 1 / 16)
    model(torch.randint(0, 32, (2, 8))).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_autocast_leaves_the_router_in_float32() -> None:
    """Under bfloat16 autocast the choices are those of float32 logits, and experts compute in bfloat16."""
    layer, x = mixture().float(), inputs().detach().float()
    seen = []
    layer.router.register_forward_hook(lambda module, args, out: seen.append(out[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert seen == [torch.float32]
    assert out.dtype == torch.bfloat16
    exact = layer(x)
    assert (out.float() - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"top_k": 9}, "top_k = 9 with experts = 8; .* at most 8"),
        ({"top_k": 1, "normalise_gates": True}, "normalise_gates = true with top_k = 1; .* leave it out"),
        ({"first_dense": 4}, "first_dense = 4 and moe_every = 1 with layers = 4; .* at most 4"),
        ({"width": 30}, "width = 30 with heads = 4"),
    ],
)
def test_impossible_mixtures_get_a_sentence(keys: dict[str, Any], sentence: str) -> None:
    """What was found, the rule and legal values stand in the message."""
    with pytest.raises(ValueError, match=sentence):
        MoEConfig(**keys)


def test_what_was_announced_in_training_is_ignored_in_evaluation() -> None:
    """A batch of evaluation of another size goes through, and a stale mask drops none of its tokens."""
    layer, x = mixture(capacity_factor=0.8), inputs()
    wanted = layer.eval()(x)
    set_auxiliary(layer.train(), torch.ones(3), 1.0, real=torch.zeros(3, 7, dtype=torch.bool))
    assert torch.equal(layer.eval()(x), wanted)
    assert layer(x[:2]).shape == (2, 7, WIDTH)
    set_auxiliary(layer, torch.ones(3), real=torch.zeros(3, 7, dtype=torch.bool))
    assert not torch.equal(layer(x), wanted)


def test_padding_is_what_no_weight_follows() -> None:
    """Tokens without a weight before one that has one are real; samples without weight are filler."""
    weights = torch.tensor([[0.0, 1.0, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert counted_tokens(weights, 5).tolist() == [[True, True, True, True, False], [False] * 5]
    assert counted_tokens(torch.tensor([2.0, 0.0]), 3).tolist() == [[True] * 3, [False] * 3]


def test_the_table_of_the_run_file_picks_it() -> None:
    """`kind = "moe"` converts with its defaults, and back without loss."""
    config = msgspec.convert({"kind": "moe", "experts": 4, "capacity_factor": 1.25}, ModelConfig)
    assert isinstance(config, MoEConfig)
    assert (config.gates_normalised, config.width_of_expert) == (True, config.hidden_width // 2)
    assert msgspec.convert(msgspec.to_builtins(config), ModelConfig) == config
