"""`layout.tensor` in a script's own loop: beside the same loop in plain PyTorch, and what such a loop is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shoal.verification.verdict import Verdict
from tests.cli.warm_scripts import compare_script, run_script

SCRIPT = """
import copy, math, sys
import torch
import torch.nn.functional as F
from torch import nn
import shoal

torch.manual_seed(0)
TOKENS = 67
ids = torch.randint(0, TOKENS, (24, 10))
MODEL
before = list(model.parameters())
groups = [{"params": [p for p in before if p.dim() > 1], "weight_decay": 0.1},
          {"params": [p for p in before if p.dim() < 2], "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-2)
def loss_of(x):
    logits = model(x)
    logits = getattr(logits, "logits", logits)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
OPTIMIZER
class Samples(torch.utils.data.Dataset):
    def __len__(self): return len(ids)
    def __getitem__(self, index): return ids[index]
loader = torch.utils.data.DataLoader(Samples(), batch_size=6, shuffle=True)
run = shoal.start({"run": {"name": "mine"} KEYS}, model=model, optimizer=optimizer, data=HANDED, steps=4)
assert all(a is b for a, b in zip(before, run.model.parameters(), strict=True))
assert optimizer.param_groups[0]["params"][0] is groups[0]["params"][0]
assert run.world_size == 1 or before[0].untyped_storage().nbytes() <= 8
for x in run.batches():
    LOOP
END
"""
LOOP = "run.backward(loss_of(x)); optimizer.step(); optimizer.zero_grad()"
CLIPPED = "run.backward(loss_of(x)); torch.nn.utils.clip_grad_norm_(before, 0.5); optimizer.step()"

LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=TOKENS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, use_cache=False,
    num_attention_heads=4, num_key_value_heads=2, attention_dropout=0.1, tie_word_embeddings=True)
model = LlamaForCausalLM(config)
"""
QWEN = """
from transformers import Qwen3Config, Qwen3ForCausalLM
config = Qwen3Config(vocab_size=TOKENS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, use_cache=False,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=False)
model = Qwen3ForCausalLM(config)
model.gradient_checkpointing_enable()
"""
OWN_GPT = """
from shoal.models.build import build, initialise
from shoal.models.config import GPTConfig
with torch.device("meta"):
    model = build(GPTConfig(vocabulary=TOKENS, layers=2, heads=4, width=32, kv_heads=1, dropout=0.1))
initialise(model, seed=0, device=torch.device("cpu"), dtype=torch.float32)
"""
ADAPTED = (
    LLAMA.replace("attention_dropout=0.1", "attention_dropout=0.0")
    + """
from peft import LoraConfig, get_peft_model
layers = ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]
model = get_peft_model(model, LoraConfig(r=4, target_modules=layers, init_lora_weights=False))
"""
)
INNER = (
    LLAMA
    + """
class Valued(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.value = inner, nn.Linear(32, TOKENS)
    def forward(self, x):
        found = self.inner(x, output_hidden_states=True)
        return found.logits + self.value(found.hidden_states[-1])
model = Valued(model)
"""
)
TENSOR = ("layout.tensor=2",)


def written(folder: Path, model: str, loop: str = LOOP, keys: str = "", **parts: str) -> Path:
    text = SCRIPT.replace("MODEL", model).replace("LOOP", loop).replace("KEYS", keys)
    text = text.replace("HANDED", parts.pop("handed", "loader"))
    for name in ("OPTIMIZER", "END"):
        text = text.replace(name, parts.get(name, ""))
    (folder / "mine.py").write_text(text)
    return folder / "mine.py"


def check_same(verdict: Verdict | str) -> None:
    assert isinstance(verdict, Verdict), verdict
    assert verdict.holds, "\n".join(verdict.lines())
    assert {finding.quantity for finding in verdict.findings} >= {"loss", "norm", "gradient", "weight"}


FOREACH = CLIPPED.replace("0.5)", "0.5, foreach=True)")
SAME = {
    "tied, with dropout in attention": (LLAMA, CLIPPED, ("batch.micro_samples=2",)),
    "norms of heads, all gradients in one call": (QWEN, FOREACH, ()),
    "a penalty on all norms": (
        QWEN, "penalty = sum(p.square().sum() for name, p in model.named_parameters() if 'norm' in name)\n"
        "    run.backward(loss_of(x) + 0.1 * penalty); optimizer.step()", ()),
    "the run's own clip": (LLAMA, "run.backward(loss_of(x)); run.clip_grad_norm_(0.5); optimizer.step()", ()),
    "by value": (QWEN, "run.backward(loss_of(x)); torch.nn.utils.clip_grad_value_(before, 0.003); optimizer.step()",
                 ()),
    "weighed by tokens": (OWN_GPT, "run.backward(loss_of(x), weight=x.numel()); optimizer.step()",
                          ("batch.micro_samples=4",)),
    "heads fewer than ranks": (OWN_GPT, CLIPPED, ("batch.micro_samples=3",)),
    "gradients that are read and replaced": (
        QWEN, "run.backward(loss_of(x))\n"
        "    if run.samples and before[1].grad.numel() and float(sum(p.grad.abs().sum() for p in before)) > 0:\n"
        "        for p in before: p.grad = p.grad * 0.5 + 0.01 * p.grad.sign()\n"
        "    optimizer.step(); optimizer.zero_grad()", ()),
    "a penalty on the gradient of embeddings": (
        LLAMA.replace("model =", "config._attn_implementation = 'eager'\nmodel ="),
        "vectors = model.get_input_embeddings()(x)\n"
        "    loss = F.cross_entropy(model(inputs_embeds=vectors).logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())\n"
        "    slope, = torch.autograd.grad(loss, vectors, create_graph=True)\n"
        "    run.backward(loss + 100 * slope.square().sum()); optimizer.step()", ()),
    "frozen from the start": (
        QWEN + "model.lm_head.requires_grad_(False); model.model.embed_tokens.requires_grad_(False)", LOOP, ()),
    "a layer that is frozen and let go": (
        LLAMA, LOOP + "\n    model.model.layers[0].requires_grad_(run.steps_done % 2 == 1)", ()),
    "adapters of peft": (ADAPTED, CLIPPED, ("batch.micro_samples=2",)),
    "a model with a plan inside": (INNER, CLIPPED, ()),
    "blocks that are computed again": (OWN_GPT, CLIPPED, ("batch.micro_samples=3", "memory.recompute=full")),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
def test_a_split_loop_is_the_same_model(name: str, tmp_path: Path) -> None:
    """Losses, norms, gradients and weights of three steps are those of plain PyTorch in one process."""
    model, loop, keys = SAME[name]
    check_same(compare_script(written(tmp_path, model, loop), tmp_path, *TENSOR, *keys, world=2))


MASKED = "[p.register_hook(lambda g: g * (g > 0)) for p in before[:4]]"
AVERAGED = """
average = []
def evaluated():
    with run.full_parameters(), torch.no_grad():
        if not average: average.extend(p.detach().clone() for p in before)
        for a, p in zip(average, model.parameters(), strict=True): a.lerp_(p, 0.1)
        own = [p.detach().clone() for p in before]
        for a, p in zip(average, before, strict=True): p.copy_(a)
        model.eval(); averaged = float(loss_of(ids[:4])); model.train()
        for o, p in zip(own, before, strict=True): p.copy_(o)
        for p in before[:1]: p.mul_(1 + 0.01 * averaged)
"""


@pytest.mark.slow
def test_replicas_of_split_models_with_hooks_and_an_average(tmp_path: Path) -> None:
    """A hook that masks whole gradients; weights that are averaged, swapped for an evaluation, and written by what it
    came to: any number that differs is in the weights of the next step.
    """
    model = LLAMA.replace("attention_dropout=0.1", "attention_dropout=0.0")
    path = written(tmp_path, model, LOOP + "\n    evaluated()", OPTIMIZER=MASKED + AVERAGED)
    check_same(compare_script(path, tmp_path, *TENSOR, world=2))


@pytest.mark.stress
def test_replicas_of_split_models(tmp_path: Path) -> None:
    path = written(tmp_path, OWN_GPT, CLIPPED)
    check_same(compare_script(path, tmp_path, *TENSOR, "layout.replicate=2", world=4))


STOPPING = (
    CLIPPED
    + """
    if run.steps_done == 1 and os.path.exists("stop"): run.save(); run.leave(); break"""
)
MEASURED = """
if run.steps_done < 3: sys.exit(0)
losses = [float(loss_of(x)) * len(x) for x in run.held_out()]
with run.evaluation():
    first, each = run.share
    own = [float(loss_of(x[None])) for x in ids[first::each]]
found = [run.sum(sum(losses)) / len(ids), run.mean(sum(own) / len(own), weight=len(own)), run.sum(1) == run.share[1]]
run.export("weights.safetensors")
if run.rank == 0: open("found.json", "w").write(json.dumps(found))
"""
ROUNDING = 1e-10
"""Relative, of a few steps of Adam in float64."""


def outcome(folder: Path, *starts: tuple[int, Sequence[str]]) -> tuple[list[float], dict[str, Tensor]]:
    """The losses that a run measures at its end, and the weights that it exports; all `starts` (ranks, keys) but the
    last one are stopped after two steps.
    """
    folder.mkdir()
    path = written(folder, OWN_GPT, STOPPING, handed="(loader, Samples())", END=MEASURED)
    path.write_text(path.read_text().replace("import copy, math, sys", "import json, os, sys"))
    for number, (world, keys) in enumerate(starts):
        (folder / "stop").touch()
        if number == len(starts) - 1:
            (folder / "stop").unlink()
        codes = run_script(path, folder, "precision.kind=float64", *keys, world=world)
        assert codes == [0] * world, (folder / "rank-0.txt").read_text()
    return json.loads((folder / "found.json").read_text()), load_file(folder / "weights.safetensors")


@pytest.mark.slow
def test_checkpoints_evaluations_and_exports_know_no_layout(tmp_path: Path) -> None:
    """Split, then whole; whole, then split: weights and held-out losses are those of an uninterrupted process, with
    moments of heads that two ranks share. Numbers of ranks that compute together are counted once.
    """
    wanted, weights = outcome(tmp_path / "whole", (1, ()))
    for name, starts in {"split first": ((2, TENSOR), (1, ())), "split later": ((1, ()), (2, TENSOR))}.items():
        found, exported = outcome(tmp_path / name, *starts)
        assert found == pytest.approx(wanted, rel=ROUNDING), name
        assert exported.keys() == weights.keys()
        for key, weight in weights.items():
            torch.testing.assert_close(exported[key], weight, rtol=ROUNDING, atol=ROUNDING)


TOLD = {
    "a shape outside": (LOOP + "; model.lm_head.weight.norm()", "was read outside of run.full_parameters()"),
    "state_dict outside": (LOOP + "; model.state_dict()", "was read outside of run.full_parameters()"),
    "a loss of parts": (
        "h = []\n    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda m, a, o: h.append(o))\n"
        "    run.backward(loss_of(x) + h[0].pow(2).mean()); optimizer.step()", "have losses from"),
    "a loss that differs in its last bit": (
        "run.backward(loss_of(x) * (1 + 2e-7 * run.rank)); optimizer.step()", "have losses from"),
    "other inputs": ("run.backward(loss_of(x + run.rank)); optimizer.step()", "with other inputs, and they compute"),
    "a forward of one rank": (
        "run.rank or model(x)\n    " + LOOP, "compute together, so let no `if` that is true on one of them alone"),
    "a forward of one rank in evaluation": (
        LOOP + "\n    with run.evaluation():\n        if run.rank == 0: model(x)", "let no `if` that is true on one"),
    "a forward behind the update": (LOOP + "\n    if run.update: model(x)", "was called outside of a step"),
    "a copy": (LOOP + "\n    with run.full_parameters(): copy.deepcopy(model)", "was copied or pickled"),
    "other weights in a call": (
        "head = {'lm_head.weight': torch.zeros(TOKENS, 32)}; torch.func.functional_call(model, head, (x,))",
        "another tensor stands in the place of the parameter"),
    "weights that one rank writes": (
        LOOP + "\n    with run.full_parameters(), torch.no_grad():\n"
        "        if run.rank == 0: model.model.layers[0].mlp.up_proj.weight.mul_(1.1)",
        "write the same on every rank"),
    "a norm that one rank writes": (
        LOOP + "\n    with run.full_parameters(), torch.no_grad():\n"
        "        if run.rank == 1: model.model.norm.weight.mul_(1.1)", "write the same on every rank"),
    "gradients beside the backward": (
        "torch.autograd.grad(loss_of(x), before, allow_unused=True)", "torch.autograd.grad was asked for the gradient"),
    "state of a part": (LOOP + "; optimizer.state[before[0]]", "under ZeRO and layout.tensor every rank has that of"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TOLD)
def test_what_a_split_loop_is_told(name: str, tmp_path: Path) -> None:
    """One sentence on every rank, and no hang."""
    loop, sentence = TOLD[name]
    codes = run_script(written(tmp_path, QWEN, loop), tmp_path, *TENSOR, world=2)
    printed = [(tmp_path / f"rank-{rank}.txt").read_text() for rank in range(2)]
    assert 0 not in codes, printed[0]
    assert any(sentence in each for each in printed), printed[0]


MIXTURE = """
from transformers import MixtralConfig, MixtralForCausalLM
model = MixtralForCausalLM(MixtralConfig(vocab_size=TOKENS, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, num_local_experts=2, use_cache=False))
"""
REFUSED = {
    "a mixture": (MIXTURE, "", "is a mixture of experts, whose tokens a script's own loop does not exchange"),
    "a parameter of a plan that is used beside it": (
        INNER, "model.value.weight = model.inner.model.embed_tokens.weight",
        "value.weight of Valued is inner.model.embed_tokens.weight, which layout.tensor splits by a plan"),
    "an optimizer of matrices": (
        QWEN, "class Own(torch.optim.SGD): pass\noptimizer = Own(groups)", "Own needs whole parameters, of which"),
    "a layer with a hook": (
        QWEN, "model.model.layers[1].mlp.up_proj.register_forward_hook(lambda m, a, o: 2 * o)",
        "the layer model.layers.1.mlp.up_proj has hooks"),
    "a layer with a forward of its own": (
        QWEN, "layer = model.lm_head; layer.forward = lambda x: 2 * F.linear(x, layer.weight)",
        "the layer lm_head is a Linear, and"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_refused_at_the_start(name: str, tmp_path: Path) -> None:
    model, change, sentence = REFUSED[name]
    codes = run_script(written(tmp_path, model, OPTIMIZER=change), tmp_path, *TENSOR, world=2)
    printed = (tmp_path / "rank-0.txt").read_text()
    assert codes == [2, 2], printed
    assert sentence in printed
