"""Models of transformers are built from a config or a folder as transformers builds them, or refused in a sentence."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from shoal.errors import ConfigError, UserCodeError
from shoal.models.huggingface.build import build
from shoal.models.huggingface.causal_cores import attend
from shoal.models.huggingface.config import TransformersConfig
from shoal.models.huggingface.model import check_plans
from shoal.models.layers import CausalAttention
from shoal.runfile.rules import refusal
from shoal.topology.layout import Layout
from tests.models.huggingface.architectures import (
    DEBERTA,
    FURTHER,
    GPT_OSS,
    LLAMA,
    NEOX,
    PHI,
    QWEN2,
    QWEN3,
    RESNET,
    T5,
    TABLES,
    TIED_LLAMA,
)
from tests.verification.layouts import run_file_of

transformers = pytest.importorskip("transformers")

ROUNDING = 1e-5
"""Sums of a few dozen float32 products in another order, relative."""
TOKENS = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(2))


def table(model: dict[str, Any], **keys: Any) -> TransformersConfig:
    return msgspec.convert({**model, **keys}, TransformersConfig)


def llama(**keys: Any) -> TransformersConfig:
    return table(LLAMA, config={**LLAMA["config"], **keys})


def built(config: TransformersConfig) -> Any:
    torch.manual_seed(7)
    return build(config)


def saved(folder: Path, model: dict[str, Any], **options: Any) -> Any:
    """transformers' own model, its folder written by transformers."""
    torch.manual_seed(7)
    architecture = getattr(transformers, model["architecture"])
    own = architecture(architecture.config_class(**model["config"])).eval()
    own.save_pretrained(folder, **options)
    return own


@pytest.mark.parametrize("name", TABLES)
def test_parameters_are_those_of_transformers_by_name_and_value(name: str) -> None:
    """A model drawn from the same generator is the same bit by bit: adding what Shoal needs draws nothing."""
    model = TABLES[name]["model"]
    torch.manual_seed(7)
    architecture = getattr(transformers, model["architecture"])
    wanted = architecture(architecture.config_class(**model["config"])).state_dict()
    found = built(table(model)).state_dict()
    assert list(found) == list(wanted)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("model", [LLAMA, TIED_LLAMA, QWEN3, TABLES["GPT-2"]["model"], TABLES["Mixtral"]["model"]])
@pytest.mark.parametrize("size", ["50GB", "20KB"])
def test_a_folder_gives_the_logits_of_transformers(tmp_path: Path, model: dict[str, Any], size: str) -> None:
    """In one file or many, tied or not, and where parameters have other names in files (experts)."""
    own = saved(tmp_path, model, max_shard_size=size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (size == "20KB")
    found = build(TransformersConfig(folder=str(tmp_path))).eval()
    assert torch.equal(found(TOKENS).logits, own(TOKENS).logits)


def test_padding_reaches_attention(tmp_path: Path) -> None:
    """A causal core stands in the model, and a mask of padding on the left is still obeyed."""
    own = saved(tmp_path, LLAMA)
    found = build(TransformersConfig(folder=str(tmp_path))).eval()
    assert sum(type(module) is CausalAttention for module in found.modules()) == LLAMA["config"]["num_hidden_layers"]
    mask = torch.ones_like(TOKENS)
    mask[0, :4] = 0
    wanted = own(TOKENS, attention_mask=mask).logits
    assert torch.equal(found(input_ids=TOKENS, attention_mask=mask).logits, wanted)
    assert not torch.equal(wanted, own(TOKENS).logits)


def test_attention_sinks_are_computed_where_all_layers_look_at_all_tokens() -> None:
    """A plain core has no sinks: GPT-OSS keeps transformers' own attention, and its logits."""
    config = {**GPT_OSS["config"], "layer_types": ["full_attention"] * LLAMA["config"]["num_hidden_layers"]}
    own = transformers.GptOssForCausalLM(transformers.GptOssConfig(**config)).eval()
    found = built(table(GPT_OSS, config=config)).eval()
    found.load_state_dict(own.state_dict())
    assert (found(TOKENS).logits - own(TOKENS).logits).norm() <= ROUNDING * own(TOKENS).logits.norm()
    with pytest.raises(UserCodeError, match=r"layout\.context = 2: GptOssForCausalLM is no decoder of blocks with one"):
        check_plans(found, Layout(context=2))


def test_a_class_without_attention_is_built() -> None:
    """Of a config with `num_labels`, which no config lists among its keys."""
    assert built(table(RESNET))(torch.ones(2, 1, 16, 16)).logits.shape == (2, 5)


def test_no_part_of_a_model_keeps_a_cache() -> None:
    """The decoder beside an encoder has a configuration of its own."""
    outputs = built(table(T5))(input_ids=TOKENS, decoder_input_ids=TOKENS)
    assert outputs.get("past_key_values") is None


def test_a_config_may_be_a_json_file(tmp_path: Path) -> None:
    file = tmp_path / "small.json"
    file.write_text(json.dumps(LLAMA["config"]))
    found = built(table(LLAMA, config=str(file)))
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), built(table(LLAMA)).parameters(), strict=True))


UNDECLARED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "read by the model": (QWEN2, {"head_dim": 16}),
    "read by parts of the model": (
        DEBERTA,
        {"relative_attention": True, "position_buckets": 4, "share_att_key": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "put into rope_parameters": (LLAMA, {"rope_theta": 500.0}),
    "put there by the class's own names": (NEOX, {"rotary_pct": 0.5, "rotary_emb_base": 500}),
    "a scaling of older folders": (LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "a share of the head": (PHI, {"partial_rotary_factor": 1.0}),
}


@pytest.mark.parametrize("case", UNDECLARED)
def test_keys_that_a_class_takes_without_declaring_them_do_what_they_do_in_transformers(case: str) -> None:
    """The logits are those of transformers' own model of that config, and others than without the keys."""
    model, keys = UNDECLARED[case]
    torch.manual_seed(7)
    architecture = getattr(transformers, model["architecture"])
    own = architecture(architecture.config_class(**copy.deepcopy(model["config"] | keys))).eval()
    found = built(table(model, config=model["config"] | keys)).eval()
    plain = built(table(model)).eval()
    tokens = torch.randint(3, 61, (2, 40), generator=torch.Generator().manual_seed(2))
    assert torch.equal(found(tokens).logits, own(tokens).logits)
    assert not torch.equal(plain(tokens).logits, own(tokens).logits)


def test_keys_beside_a_folder_replace_its_own(tmp_path: Path) -> None:
    saved(tmp_path, LLAMA)
    assert (
        build(TransformersConfig(folder=str(tmp_path), config={"attention_dropout": 0.25})).config.attention_dropout
        == 0.25
    )


def test_what_a_folder_lacks_is_drawn_only_where_it_is_listed(tmp_path: Path) -> None:
    """A classifier on a language model's folder is drawn from the seed; without the list it is refused by name."""
    saved(tmp_path, LLAMA)
    tables = {"architecture": "LlamaForSequenceClassification", "folder": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"has no weights for score\.weight of LlamaForSequenceClassification"):
        build(TransformersConfig(**tables))
    first, second = (built(TransformersConfig(**tables, missing=["score.*"])) for _ in range(2))
    assert torch.equal(first.score.weight, second.score.weight)


REFUSED: dict[str, tuple[TransformersConfig, str]] = {
    "a class that is not there": (table(LLAMA, architecture="LlamaForCausalML"), "did you mean 'LlamaForCausalLM'"),
    "a class that is no model": (table(LLAMA, architecture="LlamaConfig"), "is no model class of transformers"),
    "no class": (table(LLAMA, architecture=None), "model.architecture is missing"),
    "an unknown key": (llama(hiden_size=8), "did you mean 'hidden_size'"),
    "a typo of a key that goes into another": (llama(rope_tetha=1e4), "did you mean 'rope_theta'"),
    "a typo of a key that the model reads": (table(QWEN2, config={**QWEN2["config"], "haed_dim": 8}), "'head_dim'"),
    "an old key of another model": (table(NEOX, config={**NEOX["config"], "rope_theta": 1e4}), "rope_theta: GPTNeoX"),
    "a key that Shoal has": (llama(attn_implementation="eager"), "is that of model.attention; write it there"),
    "a wrong value": (llama(hidden_size="wide"), "LlamaConfig refuses model.config"),
    "another type": (llama(model_type="bert"), 'of model_type "bert", and LlamaForCausalLM takes "llama"'),
    "no such attention": (
        table(RESNET, attention="sdpa"),
        "'sdpa': ResNetForImageClassification has no such attention",
    ),
    "no file": (table(LLAMA, config="nowhere.json"), "nowhere.json is missing"),
    "no folder": (TransformersConfig(folder="nowhere"), "nowhere/config.json is missing: correct model.folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_built_is_refused(case: str) -> None:
    config, said = REFUSED[case]
    with pytest.raises(ConfigError, match=said):
        build(config)


@pytest.mark.parametrize("damage", ["empty", "cut", "none"])
def test_a_damaged_folder_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    saved(tmp_path, LLAMA)
    file = tmp_path / "model.safetensors"
    content = {"empty": b"", "cut": file.read_bytes()[:1000], "none": None}[damage]
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{tmp_path.name}.*(cannot be loaded|holds no safetensors file)"):
        build(TransformersConfig(folder=str(tmp_path)))


@pytest.mark.parametrize(
    "keys",
    [{}, {"folder": "x", "config": "y"}, {"config": {}, "missing": ["a"]}, {"config": {}, "lora_alpha": 2.0}],
)  # fmt: skip
def test_keys_that_contradict_each_other_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"kind": "transformers", **keys}, TransformersConfig)


def test_bytes_need_a_vocabulary_of_256(tmp_path: Path) -> None:
    """Before any process starts."""
    said = refusal(run_file_of(tmp_path, model=LLAMA, data={"kind": "stdlib"}))
    assert said == "model.config.vocab_size = 61: text is read as bytes, so it must be at least 256"


def test_labels_belong_to_the_targets() -> None:
    with pytest.raises(UserCodeError, match="the inputs of LlamaForCausalLM hold labels"):
        built(llama())(input_ids=TOKENS, labels=TOKENS)


def test_heads_that_tensor_does_not_divide_are_refused() -> None:
    with pytest.raises(UserCodeError, match=r"model\.config\.num_key_value_heads = 2: .*nearest: layout\.tensor = 2"):
        check_plans(built(llama()), Layout(tensor=4))


@pytest.mark.parametrize("case", ["a window", "another attention"])
def test_masks_of_a_slice_are_refused(case: str) -> None:
    """Before the start: sequence parallelism gives the model slices, of which its masks and positions would be."""
    window = {"architecture": "MistralForCausalLM", "config": {**LLAMA["config"], "sliding_window": 8}}
    keys, said = {
        "a window": (window, r"model\.config\.sliding_window = 8 of MistralForCausalLM asks for masks"),
        "another attention": ({"attention": "sdpa"}, 'or model.attention is not "auto"'),
    }[case]
    model = built(table(LLAMA, **keys))
    check_plans(model, Layout(tensor=2))
    with pytest.raises(UserCodeError, match=f"layout.sequence_parallel = true: .*{said}.*set it to false"):
        check_plans(model, Layout(tensor=2), sequence_parallel=True)


def test_a_window_that_is_shorter_than_the_sequence_is_refused_on_parts_of_it() -> None:
    """Before the start where the length of sequences is known; one of the sequence's length changes nothing."""
    config = {**LLAMA["config"], "sliding_window": 32}
    model = built(table(LLAMA, architecture="MistralForCausalLM", config=config))
    check_plans(model, Layout(context=2), sequence=32)
    check_plans(model, Layout(shard=2), sequence=64)
    with pytest.raises(
        UserCodeError, match=r"sliding_window = 32 of MistralForCausalLM is less than batch.sequence = 33"
    ):
        check_plans(model, Layout(context=2), sequence=33)


class HalfOfTheSequence(CausalAttention):
    """The core of one of two ranks, as far as one can tell from outside."""

    group = SimpleNamespace(size=2)


@pytest.mark.parametrize(("window", "whole"), [(None, True), (8, True), (9, True), (7, False)])
def test_a_window_of_the_whole_sequence_is_none(window: int | None, whole: bool) -> None:
    """Two ranks hold 4 tokens each."""
    module, x = torch.nn.Module(), torch.randn(1, 2, 4, 8)
    module.add_module("core", HalfOfTheSequence())
    if whole:
        assert attend(module, x, x, x, None, sliding_window=window)[0].shape == (1, 4, 2, 8)
    else:
        with pytest.raises(
            UserCodeError, match="uses sliding_window, which attention over parts of a sequence has not"
        ):
            attend(module, x, x, x, None, sliding_window=window)


def test_a_parameter_outside_of_the_chain_is_refused_by_name() -> None:
    """No stage would have it."""
    model = built(llama())
    model.model.register_parameter("scale", torch.nn.Parameter(torch.ones(1)))
    with pytest.raises(UserCodeError, match=r"LlamaForCausalLM has model\.scale outside .* layout\.pipeline = 1"):
        check_plans(model, Layout(pipeline=2))


def test_a_plan_of_modules_that_are_not_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is built, and refused as a chain alone."""
    plan = {"embed_tokens": (["input_ids"], ["x"]), "stack": (["hidden_states"], ["x"]), "norm": (["x"], ["x"])}
    monkeypatch.setattr(transformers.LlamaConfig, "base_model_pp_plan", plan)
    model = built(llama())
    assert type(model).__name__ == "LlamaForCausalLM"
    with pytest.raises(UserCodeError, match="LlamaForCausalLM declares no pipeline plan"):
        check_plans(model, Layout(pipeline=2))


OTHERWISE: dict[str, tuple[Any, str]] = {
    "between layers": (lambda x, first, named: (2 * x, named), r"computes something of its own before layers\.1"),
    "from before them": (lambda x, first, named: (x + first, named), r"computes something of its own before layers\.1"),
    "beside them": (lambda x, first, named: (x, named | {"kept": first}), "uses what its embedding gives beside"),
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_an_architecture_that_computes_between_its_layers_is_no_chain(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Stages would leave it out. What stands before the first layer and behind the last is in the two ends."""
    change, said = OTHERWISE[case]

    def forward(self: Any, input_ids: Any = None, position_ids: Any = None, inputs_embeds: Any = None, **_: Any) -> Any:
        first = x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        named = {"position_embeddings": self.rotary_emb(x, position_ids=position_ids)}
        for layer in self.layers:
            x = layer(x, **named)
            x, named = change(x, first, named)
        return transformers.modeling_outputs.BaseModelOutputWithPast(last_hidden_state=self.norm(x))

    monkeypatch.setattr(transformers.LlamaModel, "forward", forward)
    with pytest.raises(UserCodeError, match=f"LlamaForCausalLM {said}.*layout.pipeline = 1"):
        built(llama()).context(TOKENS)


CHAINS = {name: TABLES[name]["model"] for name in ("Llama", "Qwen3", "Mixtral")}
CHAINS |= {name: FURTHER[name] for name in ("GPT-NeoX", "Phi", "Gemma2", "Cohere", "Granite", "DeepSeek-V3", "GPT-OSS")}


@pytest.mark.parametrize("name", CHAINS)
def test_the_chain_gives_the_logits_of_the_model(name: str) -> None:
    """Bit by bit, and the model is left as it was."""
    model = built(table(CHAINS[name])).eval()
    names = [name for name, _ in model.named_modules()]
    context = model.context(TOKENS)
    x: Any = None
    for part in model.parts():
        x = part.run(x, context)
    assert torch.equal(x.logits, model(TOKENS).logits)
    assert [name for name, _ in model.named_modules()] == names
