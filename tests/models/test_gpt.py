"""The transformer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.models.build import build, initialise, parameter_count
from shoal.models.config import GPTConfig
from shoal.models.layers import KeyedDropout, rotated, rotations, set_sample_keys

VOCABULARY = 40
# Two orders of the same float64 sums.
F64 = {"rtol": 1e-12, "atol": 1e-13}


def gpt(*, seed: int = 0, dtype: torch.dtype = torch.float64, scale: float = 5.0, **keys: Any) -> nn.Module:
    """A tiny GPT whose weights are `scale` times the usual, so that attention is far from uniform."""
    with torch.device("meta"):
        model = build(GPTConfig(vocabulary=VOCABULARY, layers=2, width=32, heads=4, **keys))
    initialise(model, seed=seed, device="cpu", dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale if parameter.ndim >= 2 else 1.0)
    return model


def tokens(batch: int = 3, seq: int = 11, *, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, seq), generator=torch.Generator().manual_seed(seed))


def naive_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The same model written out: one sample, one head, one pair of features at a time, an explicit softmax."""

    def norm(x: torch.Tensor, module: Any) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + module.eps).sqrt() * module.weight

    def turn(x: torch.Tensor, base: float) -> torch.Tensor:
        out = x.clone()
        for position in range(x.shape[0]):
            for pair in range(x.shape[1] // 2):
                angle = torch.tensor(float(position)) * base ** torch.tensor(-2 * pair / x.shape[1])
                cos, sin, a, b = angle.cos(), angle.sin(), x[position, 2 * pair], x[position, 2 * pair + 1]
                out[position, 2 * pair], out[position, 2 * pair + 1] = a * cos - b * sin, a * sin + b * cos
        return out

    def attend(x: torch.Tensor, attention: Any) -> torch.Tensor:
        size = attention.head_size
        projected = [layer(x).split(size, dim=-1) for layer in (attention.query, attention.key, attention.value)]
        mixed = []
        for head, query in enumerate(projected[0]):
            shared = head * len(projected[1]) // len(projected[0])
            scores = turn(query, 1e4) @ turn(projected[1][shared], 1e4).T / size**0.5
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            mixed.append(scores.softmax(-1) @ projected[2][shared])
        return attention.output(torch.cat(mixed, dim=-1))

    def feed(x: torch.Tensor, forward: Any) -> torch.Tensor:
        if hasattr(forward, "gate"):
            gate = forward.gate(x)
            return forward.down(gate / (1 + (-gate).exp()) * forward.up(x))
        up = forward.up(x)
        return forward.down(up * 0.5 * (1 + torch.erf(up / 2**0.5)))

    rows = []
    for sample in ids:
        x = model.embedding.weight[sample]
        for block in model.blocks:
            x = x + attend(norm(x, block.attention_norm), block.attention)
            x = x + feed(norm(x, block.feed_forward_norm), block.feed_forward)
        rows.append(norm(x, model.norm) @ model.head.weight.T)
    return torch.stack(rows)


@pytest.mark.parametrize(
    "keys", [{}, {"kv_heads": 2}, {"kv_heads": 1, "feed_forward": "gelu"}, {"tied": True, "feed_forward_width": 48}]
)
def test_logits_are_those_of_the_model_written_out(keys: dict[str, Any]) -> None:
    """Fused attention, grouped heads and complex rotations compute what loops and an explicit softmax compute."""
    model, ids = gpt(**keys), tokens()
    # Angles are float32, and single and vectorised cosines differ by one last bit of it.
    torch.testing.assert_close(model(ids), naive_logits(model, ids), rtol=1e-6, atol=1e-6)


def test_no_token_sees_a_later_one() -> None:
    """Changing a token changes its own and later logits, and not one bit of an earlier one."""
    model, ids = gpt(), tokens()
    changed = ids.clone()
    changed[:, 6] = (changed[:, 6] + 1) % VOCABULARY
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :6], after[:, :6])
    assert bool((before[:, 6:] != after[:, 6:]).any(-1).all())


def test_samples_do_not_see_each_other() -> None:
    """The logits of a sample are the same alone as in a batch."""
    model, ids = gpt(kv_heads=2), tokens(4)
    torch.testing.assert_close(model(ids)[2:3], model(ids[2:3]), **F64)


def test_positions_default_to_counting_and_only_their_distance_matters() -> None:
    """Positions 0, 1, 2, ... are the default; all moved by the same number, logits stay; stretched, they do not."""
    model, ids = gpt(), tokens()
    count = torch.arange(ids.shape[1]).expand(ids.shape)
    assert torch.equal(model(ids), model(ids, positions=count))
    # Turned by float32 angles, of which those of far positions are rounded.
    torch.testing.assert_close(model(ids, positions=count + 5), model(ids), rtol=1e-4, atol=1e-5)
    assert (model(ids, positions=2 * count) - model(ids)).abs().max().item() > 1e-2


def test_rotations_keep_lengths_and_turn_products_by_distance() -> None:
    """A rotation preserves norms, and the product of a query and a key depends on their distance alone."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 16, generator=generator, dtype=torch.float64)

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        return rotated(x, rotations(torch.tensor([position]), head_size=16, base=1e4)).flatten()

    torch.testing.assert_close(at(query, 7).norm(), query.norm(), rtol=1e-6, atol=0)
    near = at(query, 7) @ at(key, 4)
    torch.testing.assert_close(at(query, 53) @ at(key, 50), near, rtol=0, atol=1e-4)
    assert abs((at(query, 7) @ at(key, 5) - near).item()) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_compiled_rotations_turn_alike_by_real_numbers(dtype: torch.dtype) -> None:
    """Which a compiler fuses, as it does no complex ones: the program reads the factors as pairs, and nothing else."""
    x = torch.randn(2, 5, 3, 16, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    factors, programs = rotations(torch.arange(5), head_size=16, base=1e4), []

    def look(program: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        programs.append(program)
        return program

    found, wanted = torch.compile(rotated, backend=look)(x, factors), rotated(x, factors)
    torch.testing.assert_close(found, wanted)
    for ours, theirs in zip(*(torch.autograd.grad(y.square().sum(), x) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs)
    named = [str(node.target) for node in programs[0].graph.nodes]
    assert any("view_as_real" in name for name in named)
    assert not any("view_as_complex" in name for name in named)


def test_gradients_reach_every_parameter_and_are_right() -> None:
    """Every parameter gets a gradient, and along a random direction it is the difference quotient of the loss."""
    model, ids = gpt(kv_heads=2), tokens()
    parameters = list(model.parameters())

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    gradients = torch.autograd.grad(loss(), parameters)
    assert all(bool(gradient.any()) for gradient in gradients)
    generator, step, ends = torch.Generator().manual_seed(0), 1e-5, []
    direction = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
    with torch.no_grad():
        for move in (step, -2 * step):
            torch._foreach_add_(parameters, direction, alpha=move)
            ends.append(loss().item())
    slope = sum((g * d).sum() for g, d in zip(gradients, direction, strict=True))
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(float(slope), rel=1e-6)


def test_dropout_follows_the_samples() -> None:
    """In training a split of the batch changes nothing, other keys do; eval() is free of dropout."""
    model, ids, keys = gpt(dropout=0.3), tokens(4), torch.arange(4)
    set_sample_keys(model.modules(), keys)
    whole = model(ids)
    set_sample_keys(model.modules(), keys[2:])
    torch.testing.assert_close(model(ids[2:]), whole[2:], **F64)
    set_sample_keys(model.modules(), keys + 4)
    assert not torch.allclose(model(ids), whole)
    assert torch.equal(model.eval()(ids), gpt()(ids))


def test_a_part_of_the_positions_has_its_part_of_every_mask() -> None:
    """A rank that holds the later positions of each sample drops there, in every layer, what the whole would drop."""
    model, ids, masks = gpt(dropout=0.3), tokens(), []
    set_sample_keys(model.modules(), torch.arange(3))
    for module in model.modules():
        if isinstance(module, KeyedDropout):
            module.register_forward_hook(lambda module, inputs, output: masks.append(output == 0))
    model(ids)
    model(ids[:, 5:], positions=torch.arange(5, 11).expand(3, 6))
    wholes, parts = masks[: len(masks) // 2], masks[len(masks) // 2 :]
    assert len(parts) == 5
    for whole, part in zip(wholes, parts, strict=True):
        assert torch.equal(whole[:, 5:], part)


def test_no_two_dropout_layers_share_a_name() -> None:
    """Layers of one name would drop the same features."""
    names = [module.name for module in gpt(dropout=0.1).modules() if isinstance(module, KeyedDropout)]
    assert len(names) == 5
    assert len(set(names)) == 5


def test_bfloat16_autocast_stays_near_float32() -> None:
    """Under autocast the logits are those of float32 to the precision of bfloat16, and gradients are float32."""
    model, ids = gpt(dtype=torch.float32, scale=2.0, kv_heads=2), tokens()
    exact = model(ids)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(ids)
    assert (rounded.float() - exact).norm() < 0.05 * exact.norm()
    rounded.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("keys", [{}, {"dropout": 0.2, "kv_heads": 2}])
def test_one_graph_serves_every_batch(keys: dict[str, Any]) -> None:
    """The model traces into one graph without a break, and new sample keys do not trace it again."""
    model, graphs = gpt(dtype=torch.float32, **keys), []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=count)
    for step in range(3):
        set_sample_keys(model.modules(), torch.arange(3) + 10 * step)
        torch.testing.assert_close(compiled(tokens(seed=step)), model(tokens(seed=step)))
    assert len(graphs) == 1


def test_parameters_are_counted() -> None:
    """The default model has the numbers that its sizes give; a tied head adds none."""
    with torch.device("meta"):
        free, tied = build(GPTConfig()), build(GPTConfig(tied=True))
    block = 4 * 128 * 128 + 3 * 128 * 352 + 2 * 128
    assert parameter_count(free) == 4 * block + 2 * 256 * 128 + 128
    assert parameter_count(tied) == parameter_count(free) - 256 * 128


def test_a_tiny_gpt_learns_to_copy() -> None:
    """A sequence whose second half repeats the first is predicted there: attention finds what stood before."""
    torch.manual_seed(0)
    model = gpt(dtype=torch.float32, scale=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(120):
        half = torch.randint(0, 8, (32, 8))
        ids = torch.cat((half, half), dim=1)
        loss = F.cross_entropy(model(ids[:, :-1])[:, 8:].flatten(0, 1), ids[:, 9:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5  # guessing among eight costs 2.08
