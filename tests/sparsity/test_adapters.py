"""Adapters: a frozen model computes what it did, learns by few parameters, and is exported without them."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._C import _len_torch_function_stack

from shoal.assembly.splitting import _look, _looking
from shoal.checkpoint.weights import export, weights_of
from shoal.errors import ConfigError, UserCodeError
from shoal.models.adapters import BypassWatch, adapt, is_adapter, merged, quantise, refuse_bypassed_layers
from shoal.models.build import initialise
from shoal.models.config import (
    AdapterConfig,
    BitFit,
    Bottleneck,
    DoRA,
    GPTConfig,
    LoRA,
    PromptTuning,
    QuantisationConfig,
)
from shoal.models.gpt import GPT
from shoal.models.huggingface.build import build, plain
from shoal.models.huggingface.config import TransformersConfig
from shoal.models.roles import ZEROS, Part, Role, role_of, roles_of
from tests.assembly.training_ranks import trained as taken
from tests.models.huggingface.architectures import BERT, GPT2, LLAMA
from tests.sparsity.test_freezing import BASE, LAYOUTS, SUM_ORDER
from tests.sync.steps import SGD, gap, train
from tests.verification.layouts import corpus, verified

KINDS: dict[str, AdapterConfig] = {
    "lora": LoRA(rank=3),
    "dora": DoRA(rank=3, alpha=2.0),
    "prompt": PromptTuning(tokens=4),
    "bottleneck": Bottleneck(width=5, layers=("*.output", "*.down")),
}
TABLES: dict[str, dict[str, Any]] = {
    "prompt": {"kind": "prompt", "tokens": 3},
    "lora": {"kind": "lora", "rank": 2},
    "dora": {"kind": "dora", "rank": 2, "layers": ["*.query", "*.value"]},
    "bottleneck": {"kind": "bottleneck", "width": 4, "layers": ["*.output"], "train": ["*norm*"]},
}


def small_gpt(adapter: AdapterConfig | None = None) -> GPT:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocabulary=31, layers=2, width=16, heads=2))
        if adapter is not None:
            adapt(model, adapter)
    initialise(model, seed=3, device="cpu", dtype=torch.float64)
    return model


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 31, (3, 8), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def learnt(model: nn.Module) -> None:
    """Gives adapters other numbers than their first."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "prompt"])
def test_a_model_computes_what_it_did_before_its_adapters_learn(kind: str, tokens: Tensor) -> None:
    plain, adapted = small_gpt(), small_gpt(KINDS[kind])
    assert torch.allclose(adapted(tokens), plain(tokens), rtol=1e-12)
    learnt(adapted)
    assert not torch.allclose(adapted(tokens), plain(tokens), rtol=1e-3)
    assert all(is_adapter(name) == p.requires_grad for name, p in adapted.named_parameters())
    assert all(not role.decay for name, role in roles_of(adapted).items() if is_adapter(name))


def test_a_prompt_is_what_a_sequence_begins_with(tokens: Tensor) -> None:
    """A model whose vocabulary has the prompt's vectors computes the same after them; the prompt alone is trained."""
    prompted, plain = small_gpt(KINDS["prompt"]), small_gpt()
    learnt(prompted)
    assert prompted.prompt is not None
    wide = GPT(GPTConfig(vocabulary=35, layers=2, width=16, heads=2)).double()
    wide.load_state_dict({n: F.pad(w, (0, 0, 0, 4)) if len(w) == 31 else w for n, w in plain.state_dict().items()})
    wide.embedding.weight.data[31:] = prompted.prompt.soft_prompt.data
    wanted = wide(torch.cat([torch.arange(31, 35).expand(3, -1), tokens], dim=1))[:, 4:, :31]
    assert torch.allclose(prompted(tokens), wanted, rtol=1e-10)
    assert [name for name, p in prompted.named_parameters() if p.requires_grad] == ["prompt.soft_prompt"]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_decoders_of_transformers_take_a_prompt(architecture: str, tokens: Tensor) -> None:
    """As peft's prompt tuning has them, with padding."""
    peft = pytest.importorskip("peft")
    table = GPT2 if architecture.startswith("GPT2") else LLAMA
    model: Any = build(TransformersConfig(architecture=architecture, config=table["config"])).double().eval()
    theirs = plain(TransformersConfig(architecture=architecture, config=table["config"])).double().eval()
    theirs.load_state_dict(model.state_dict())
    adapt(model, PromptTuning(tokens=4))
    learnt(model)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    other = peft.get_peft_model(theirs, config)
    other.prompt_encoder["default"].embedding.weight.data = model.prompt.soft_prompt.data.clone()
    padding = torch.ones_like(tokens)
    padding[0, 6:] = 0
    wanted = other(input_ids=tokens, attention_mask=padding).logits[:, 4:]
    found = model(tokens, attention_mask=padding).logits
    assert torch.allclose(found[padding.bool()], wanted[padding.bool()], atol=1e-6)
    with pytest.raises(UserCodeError, match="a prompt stands before a whole sequence"):
        model(tokens, position_ids=torch.arange(8)[None])


def test_models_without_tokens_take_no_prompt() -> None:
    with pytest.raises(ConfigError, match=r'adapter.kind = "prompt": Sequential takes no prompt'):
        adapt(nn.Sequential(nn.Linear(2, 2)), PromptTuning())
    bert = build(TransformersConfig(architecture="BertForMaskedLM", config=BERT["config"]))
    with pytest.raises(ConfigError, match=r'adapter.kind = "prompt": BertForMaskedLM is no decoder'):
        adapt(bert, PromptTuning())


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_merged_weights_compute_what_the_adapted_model_does(kind: str, tokens: Tensor) -> None:
    adapted, plain = small_gpt(KINDS[kind]), small_gpt()
    learnt(adapted)
    plain.load_state_dict(merged(adapted.state_dict(), KINDS[kind]))
    assert torch.allclose(plain(tokens), adapted(tokens), rtol=1e-10)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_what_is_tied_has_no_adapter(kind: str, tokens: Tensor) -> None:
    """A merged weight would be that of BERT's embeddings as well. What is merged computes the same without adapters."""
    table = TransformersConfig(architecture=BERT["architecture"], config=BERT["config"])
    model, theirs = build(table).double().eval(), plain(table).double().eval()
    adapt(model, KINDS[kind])
    learnt(model)
    assert "cls.predictions.transform.dense.lora_a" in dict(model.named_parameters())
    assert "cls.predictions.decoder.lora_a" not in dict(model.named_parameters())
    theirs.load_state_dict(merged(model.state_dict(), KINDS[kind]))
    assert torch.allclose(model(tokens).logits, theirs(tokens).logits, rtol=1e-9, atol=1e-12)
    with pytest.raises(ConfigError, match=r"the weight of cls.predictions.decoder is another module's as well"):
        adapt(build(table), LoRA(layers=("cls.*",)))


def test_a_lora_layer_is_its_equation() -> None:
    layer = nn.Linear(4, 3, dtype=torch.float64)
    x = torch.randn(2, 4, dtype=torch.float64)
    model = nn.Sequential(layer)
    adapt(model, LoRA(rank=2, alpha=3.0))
    with torch.no_grad():
        for parameter in (model[0].lora_a, model[0].lora_b):
            parameter.normal_(generator=torch.Generator().manual_seed(2))
    wanted = x @ (layer.weight + 1.5 * model[0].lora_b @ model[0].lora_a).T + layer.bias
    assert torch.allclose(model(x), wanted)


@pytest.mark.parametrize("kind", ["lora", "bottleneck", "rounded"])
def test_a_layer_that_two_modules_share_is_adapted_in_both(kind: str) -> None:
    shared = nn.Linear(4, 4)
    one, other = nn.Sequential(shared), nn.Sequential(nn.ReLU(), shared)
    change(nn.ModuleList([one, other]), kind)
    assert one[0] is other[1] is not shared


@pytest.mark.parametrize("kind", ["lora", "rounded"])
@pytest.mark.parametrize("padded", [False, True])
def test_an_evaluation_of_pytorchs_encoder_computes_with_what_was_changed(kind: str, padded: bool) -> None:
    """It would compute with the weights of its layers, and not call them."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    change(model, kind)
    x, padding = torch.randn(3, 5, 8), torch.arange(5) > torch.tensor([[2], [4], [3]])
    with torch.no_grad():
        wanted = model.train()(x, src_key_padding_mask=padding if padded else None)
        found = model.eval()(x, src_key_padding_mask=padding if padded else None)
    assert torch.allclose(found[~padding], wanted[~padding], atol=1e-6)


def change(model: nn.Module, kind: str) -> None:
    """Adapters that have learnt something, or weights of four bits."""
    if kind == "rounded":
        quantise(model, QuantisationConfig(bits=4))
        return
    adapt(model, LoRA(rank=2) if kind == "lora" else Bottleneck(width=2, layers=("*",)))
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))


def test_a_run_begins_with_weights_of_a_model_without_adapters(ranks, tmp_path: Path) -> None:
    """`run.warm_start` fills what is frozen; `shoal checkpoint export` writes a model without adapters."""
    corpus(tmp_path)
    ranks(1, train, BASE | SGD, str(tmp_path), 0, 3, "base")
    adapted = BASE | SGD | {"adapter": TABLES["lora"], "run": {"warm_start": str(tmp_path / "base")}}
    ranks(1, taken, adapted, str(tmp_path), 4)
    export(tmp_path / "run", tmp_path / "merged.safetensors", change=partial(merged, config=LoRA(rank=2)))
    base, found = weights_of(tmp_path / "base"), load_file(tmp_path / "merged.safetensors")
    assert found.keys() == base.keys()
    assert torch.equal(found["embedding.weight"], base["embedding.weight"])
    assert not torch.equal(found["blocks.0.attention.query.weight"], base["blocks.0.attention.query.weight"])


def test_bitfit_trains_biases_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    adapt(model, BitFit(train=("1.weight",)))
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["0.bias", "1.weight"]


def test_bitfit_trains_the_biases_that_layers_names() -> None:
    """Of a model of transformers: those of its queries, as in section 4 of the paper, and of norms."""
    model = build(TransformersConfig(architecture=BERT["architecture"], config=BERT["config"]))
    adapt(model, BitFit(layers=("*.query", "*.LayerNorm")))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    wanted = [n for n, _ in model.named_parameters() if n.endswith((".query.bias", ".LayerNorm.bias"))]
    assert trained == wanted
    assert 2 <= len(wanted) < sum(name.endswith("bias") for name, _ in model.named_parameters())
    with pytest.raises(ConfigError, match=r'adapter.layers: "\*.querry" matches no layer that has a bias; this model'):
        adapt(model, BitFit(layers=("*.query", "*.querry")))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (LoRA(layers=("*.q_proj",)), r'"\*.q_proj" matches no nn.Linear'),
        (LoRA(train=("classifier",)), '"classifier" matches no parameter'),
        (BitFit(), "this model has no biases"),
    ],
)
def test_what_cannot_be_adapted_is_refused(config: AdapterConfig, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        adapt(nn.Sequential(nn.Linear(2, 2, bias=False)), config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapted")
    corpus(folder)
    return folder


@pytest.mark.matrix(every=1, often=2)
@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("layout", ["replicate", "ZeRO-1", "ZeRO-3", "pipeline"])
@pytest.mark.parametrize("kind", TABLES)
def test_every_layout_trains_adapters_as_one_process(ranks, folder: Path, kind: str, layout: str) -> None:
    world, tables = LAYOUTS[layout]
    if (kind, layout) == ("prompt", "pipeline"):
        pytest.skip("refused: samples are as long as their targets there")
    adapted = BASE | SGD | {"adapter": TABLES[kind]}
    wanted = ranks(1, train, adapted, str(folder))[0]
    found = ranks(world, train, adapted | tables, str(folder))[0]
    assert found.weights.keys() == wanted.weights.keys()
    for name, tensor in wanted.weights.items():
        torch.testing.assert_close(found.weights[name], tensor, rtol=SUM_ORDER, atol=SUM_ORDER)
    verdict, *_ = ranks(world, verified, adapted | tables, str(folder), False, 2)
    assert verdict["holds"], verdict["sentence"]


def test_a_foreign_model_gets_adapters_too(ranks, folder: Path) -> None:
    """A user's module, built with its own first values; its adapters are those of its name and seed in every layout."""
    model = {"kind": "python", "build": "tests.sparsity.test_adapters:small_classifier"}
    data = {"kind": "python", "build": "tests.sparsity.test_savings:random_classes"}
    tables = BASE | {"model": model, "data": data, "adapter": {"kind": "lora", "rank": 2}}
    wanted = ranks(1, train, tables, str(folder))[0]
    found = ranks(2, train, tables | LAYOUTS["ZeRO-3"][1], str(folder))[0]
    assert {"model/0.lora_a", "model/2.lora_b"} <= wanted.state.keys()
    assert gap(found.weights, wanted.weights) < SUM_ORDER


class DeclaresAll(nn.Sequential):
    """A model that has a role for each of its parameters by name, adapters included, as those of transformers do."""

    def parameter_roles(self) -> dict[str, Role]:
        return {name: Role("replicated", None, decay=True) for name, _ in self.named_parameters()}


def test_a_layer_knows_its_adapter_better_than_its_model() -> None:
    model = DeclaresAll(nn.Linear(4, 3))
    adapt(model, LoRA(rank=2))
    roles = roles_of(model)
    assert roles["0.lora_b"].init == ZEROS
    assert roles["0.weight"].init is None
    assert role_of(model, "0.lora_b") == roles["0.lora_b"]


WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "compiled": {"run": {"compile": True}},
    "compiled blocks": {"run": {"compile": "blocks"}},
    "pipeline": {"layout": {"pipeline": 2}},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("table", "layers"), [("adapter", {"kind": "lora", "rank": 2}), ("quantisation", {"bits": 8})], ids=str
)
def test_a_layer_whose_weight_is_used_without_it_is_refused(
    ranks, folder: Path, table: str, layers: dict[str, Any], way: str
) -> None:
    """Before anything is learned; a layer of which only the type is asked, and one that is not used, are none."""
    model = {"kind": "python", "build": "tests.sparsity.test_adapters:Bypassing"}
    data = {"kind": "python", "build": "tests.sparsity.test_savings:random_classes"}
    tables, world = BASE | {"model": model, "data": data} | WAYS[way], 2 if "pipeline" in way else 1
    with pytest.raises(Exception, match=f"{table}.layers: Bypassing computes with the weight of first"):
        ranks(world, train, tables | {table: layers}, str(folder), 0, 1)
    called = {table: layers | {"layers": ["second", "unused"]}}
    found = ranks(world, train, tables | called, str(folder), 0, 2)[0]
    alone = ranks(1, train, BASE | {"model": model, "data": data} | called, str(folder), 0, 2)[0]
    assert gap(found.weights, alone.weights) < SUM_ORDER


class Bypassing(nn.Module):
    """A classifier that computes with the weight of a layer, as torchvision's Swin does; a chain of two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(16, 32), nn.Linear(32, 61), nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self._end(self._begin(inputs, inputs), inputs)

    def context(self, inputs: Tensor) -> Tensor:
        return inputs

    def parts(self) -> list[Part]:
        return [Part("begin", ("first",), self._begin), Part("end", ("second", "unused"), self._end)]

    def _begin(self, x: Any, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.first.weight, bias=self.first.bias).relu()

    def _end(self, x: Tensor, inputs: Tensor) -> Tensor:
        return self.second(x.to(self.unused.weight.dtype))


def test_a_model_that_a_script_calls_and_run_compiles_is_looked_at_once() -> None:
    """In evaluation, before its program is called."""
    model = Bypassing()
    adapt(model, LoRA(rank=2))
    model.compile(backend="eager")
    program = model._compiled_call_impl
    look = partial(_look, BypassWatch(model, table="adapter"), model, torch.device("cpu"))
    model._compiled_call_impl = _looking(model, look)
    with pytest.raises(ConfigError, match="Bypassing computes with the weight of first"):
        model(torch.ones(2, 16))
    assert model._compiled_call_impl is program
    assert model.training


class Sharing(nn.Module):
    """Computes with two weights at once, or with neither of them."""

    def __init__(self, *, at_once: bool) -> None:
        super().__init__()
        self.at_once, self.fails = at_once, False
        self.query, self.key, self.last = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        penalty = self.query.weight.norm() + self.key.weight.norm(dim=1).sum()
        if self.fails:
            raise ValueError("out of memory")
        if self.at_once:
            inputs = F.linear(inputs, torch.cat([self.query.weight, self.key.weight]).to(inputs.dtype))
        return self.last(inputs * penalty)


def test_weights_that_are_put_together_pass_their_layers_by() -> None:
    """A norm is no use of a layer, which a forward may leave out."""
    for at_once in (True, False):
        model = Sharing(at_once=at_once)
        adapt(model, LoRA(rank=2))
        refuse_bypassed_layers(model, table="adapter")
        with (
            pytest.raises(ConfigError, match="Sharing computes with the weight of query") if at_once else nullcontext()
        ):
            model(torch.ones(2, 16))


def test_a_forward_that_raises_is_not_judged_but_the_next_one() -> None:
    """And leaves nothing behind that watches."""
    model = Sharing(at_once=True)
    adapt(model, LoRA(rank=2))
    refuse_bypassed_layers(model, table="adapter")
    model.fails = True
    with pytest.raises(ValueError, match="out of memory"):
        model(torch.ones(2, 16))
    assert _len_torch_function_stack() == 0
    model.fails = False
    with pytest.raises(ConfigError, match="computes with the weight of query"):
        model(torch.ones(2, 16))
    assert _len_torch_function_stack() == 0


def small_classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 61))
