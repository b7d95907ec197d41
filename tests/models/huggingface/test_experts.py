"""The experts of transformers' mixtures go over ranks by Shoal's exchange, and stay transformers' own."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
import torch
from torch import Tensor

from shoal.checkpoint.weights import weights_of
from shoal.comm.config import WireConfig
from shoal.comm.mesh import build_mesh
from shoal.errors import UserCodeError
from shoal.models.huggingface.build import build
from shoal.models.huggingface.config import TransformersConfig
from shoal.models.huggingface.model import check_plans
from shoal.models.huggingface.tensor_plan import planned_experts
from shoal.models.roles import roles_of
from shoal.models.token_exchange import LocalExchange
from shoal.parallel.expert import ExpertGroups, split_experts
from shoal.topology.layout import Layout
from tests import programs
from tests.assembly.journey import Leg, travel
from tests.models.huggingface.architectures import GPT_OSS, LLAMA, MIXTRAL, QWEN2_MOE, QWEN3_MOE, model
from tests.ranks import TestPlace
from tests.verification.layouts import corpus

transformers = pytest.importorskip("transformers")

MIXTURES = {"Mixtral": MIXTRAL, "Qwen2-MoE": QWEN2_MOE, "Qwen3-MoE": QWEN3_MOE, "GPT-OSS": GPT_OSS}
ROUNDING = 1e-5
"""Sums of a few dozen float32 products in another order, relative."""
SAME_MATH = 1e-12
"""Losses in float64, relative (contracts.md)."""


class Elsewhere(LocalExchange):
    """All experts are here, and the tokens go through the exchange all the same."""

    local = False


def built(table: dict[str, Any]) -> Any:
    torch.manual_seed(7)
    return build(msgspec.convert(table, TransformersConfig))


def experts_of(table: dict[str, Any]) -> Any:
    """The experts of the first layer that has some, with weights far from zero, biases too."""
    _, found = next(planned_experts(built(table)))
    generator = torch.Generator().manual_seed(1)
    for parameter in found.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return found


def passed(experts: Any, chosen: Tensor) -> list[Tensor]:
    """Output, and the gradients of tokens, gates and every parameter."""
    generator = torch.Generator().manual_seed(2)
    width = LLAMA["config"]["hidden_size"]
    tokens, probe = (torch.randn(len(chosen), width, generator=generator) for _ in range(2))
    gates = torch.rand(chosen.shape, generator=generator)
    out = experts(tokens.requires_grad_(), chosen, gates.requires_grad_())
    (out * probe).sum().backward()
    return [out.detach(), *(x.grad for x in (tokens, gates, *experts.parameters()))]  # type: ignore[misc]


def close(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).norm() <= ROUNDING * wanted.norm())


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_compute_what_those_of_transformers_do(name: str) -> None:
    """Plain or with biases, interleaved or not, transposed or not; an expert without tokens has a gradient of 0."""
    chosen = torch.tensor([[0, 1], [1, 0], [3, 0], [0, 3], [1, 3]])
    wanted, own = passed(experts_of(MIXTURES[name]), chosen), experts_of(MIXTURES[name])
    own.exchange = Elsewhere()
    assert all(close(*pair) for pair in zip(passed(own, chosen), wanted, strict=True))


@pytest.mark.parametrize("name", MIXTURES)
def test_every_stacked_parameter_has_the_role_expert(name: str) -> None:
    """And the router and shared experts have not."""
    found = {key for key, role in roles_of(built(MIXTURES[name])).items() if role.kind == "expert"}
    layers = LLAMA["config"]["num_hidden_layers"]
    stacked = ["gate_up_proj", "down_proj"] + (["gate_up_proj_bias", "down_proj_bias"] if name == "GPT-OSS" else [])
    assert found == {f"model.layers.{layer}.mlp.experts.{own}" for layer in range(layers) for own in stacked}


def test_a_model_without_stacked_experts_is_refused() -> None:
    with pytest.raises(UserCodeError, match=r"layout\.expert = 2: LlamaForCausalLM declares no expert plan"):
        check_plans(built(LLAMA), Layout(shard=2, expert=2))
    check_plans(built(MIXTRAL), Layout(shard=2, expert=2))


def test_an_expert_plan_is_no_tensor_plan() -> None:
    """GPT-OSS declares the first alone: attention would be computed on every tensor rank."""
    check_plans(built(GPT_OSS), Layout(shard=2, expert=2))
    with pytest.raises(UserCodeError, match="GptOssForCausalLM declares no tensor plan"):
        check_plans(built(GPT_OSS), Layout(tensor=2))


def test_attention_around_a_norm_of_all_heads_is_whole() -> None:
    """OLMoE's plan gathers queries for their norm, and splits what comes behind it: both are whole, experts are not."""
    config = {**LLAMA["config"], "num_experts": 4, "num_experts_per_tok": 2}
    olmoe = built(model("OlmoeForCausalLM", config))
    check_plans(olmoe, Layout(shard=2, expert=2))
    check_plans(olmoe, Layout(tensor=2))
    kinds = {name.rpartition("layers.0.")[2]: role.kind for name, role in roles_of(olmoe).items()}
    attention = [kinds[f"self_attn.{name}_proj.weight"] for name in "qkvo"]
    assert (kinds["mlp.experts.down_proj"], attention, kinds["lm_head.weight"]) == (
        "expert",
        ["replicated"] * 4,
        "head",
    )


def one_sided(place: TestPlace) -> tuple[list[Tensor], list[Tensor], tuple[int, ...]]:
    """All tokens of both ranks choose the experts of rank 0: what came out, gradients, how many experts are here."""
    layout = Layout(shard=2, expert=2)
    mesh = build_mesh(layout, place.rank, store=place.store, device=torch.device("cpu"), wire=WireConfig(timeout_s=60))
    experts = experts_of(MIXTRAL)
    groups = ExpertGroups(mesh.axis("expert"), mesh.axis("tensor"), mesh.axis("context", "tensor"))
    split_experts(experts, groups)
    out, tokens, gates, *parameters = passed(experts, torch.tensor([[0, 1], [1, 0], [1, 0]]))
    return [out, tokens, gates], parameters, tuple(len(parameter) for parameter in experts.parameters())


def test_a_rank_whose_experts_nobody_chose_takes_part(ranks) -> None:
    """It holds half of the experts, its gradient is 0, and its own tokens come back from the other rank."""
    wanted = passed(experts_of(MIXTRAL), torch.tensor([[0, 1], [1, 0], [1, 0]]))
    found = ranks(2, one_sided)
    for streams, _, held in found:
        assert held == (2, 2)
        assert all(close(*pair) for pair in zip(streams, wanted[:3], strict=True))
    for first, second, whole in zip(found[0][1], found[1][1], wanted[3:], strict=True):
        assert close(first, 2 * whole[:2])  # of the tokens of both ranks
        assert not second.any()


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"layout": {"shard": 2, "expert": 2}, "memory": {"zero": 1}},
    {"layout": {"tensor": 2, "expert": 2}},
    {"layout": {"shard": 2, "expert": 2}, "memory": {"zero": 3}},
    {},
]


@pytest.mark.slow
def test_a_checkpoint_of_split_experts_is_one_of_every_layout(ranks, tmp_path: Path) -> None:
    """Parameters and AdamW's state are the same bits where the next layout goes on, and the losses are those of one
    process that never stopped.
    """
    corpus(tmp_path)
    each, base = 3, {"model": MIXTRAL, "precision": {"kind": "float64"}}
    legs: list[Leg] = [
        ranks(2 if layout else 1, travel, base | layout, str(tmp_path), "journey", each)[0] for layout in LAYOUTS
    ]
    (straight,) = ranks(1, travel, base, str(tmp_path), "straight", each * len(LAYOUTS))
    for before, after in pairwise(legs):
        assert before.left.keys() == after.came.keys()
        assert [name for name in before.left if not torch.equal(before.left[name], after.came[name])] == []
    assert [loss for leg in legs for loss in leg.losses] == pytest.approx(straight.losses, rel=SAME_MATH)


def shoal(*arguments: str, folder: Path) -> Any:
    done = programs.run(["-m", "shoal", *arguments], cwd=folder)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_split_experts_are_exported_for_transformers(tmp_path: Path) -> None:
    """Trained on two ranks with half of the experts each: `from_pretrained` finds every weight, bit by bit."""
    corpus(tmp_path)
    run = {
        "run": {"name": "mixture", "steps": 2},
        "model": MIXTRAL,
        "data": {"kind": "tokens", "path": "tokens.bin", "dtype": "uint8"},
        "batch": {"global_samples": 4, "sequence": 16},
        "layout": {"shard": 2, "expert": 2},
        "observe": {"report": False},
    }
    (tmp_path / "run.toml").write_text(tomli_w.dumps(run))
    shoal("train", "run.toml", folder=tmp_path)
    out = shoal("checkpoint", "export", "runs/mixture", "folder", "--to", "huggingface", "--json", folder=tmp_path)
    assert json.loads(out.stdout) == {"step": 2, "file": "folder"}
    loaded, told = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "folder", output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weights = weights_of(tmp_path / "runs/mixture")
    found = dict(loaded.named_parameters())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
