"""Loops of `accelerate.Accelerator` train as under it in one process, on any layout; what is not carried is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.cli.warm_scripts import compare_script, run_script
from tests.huggingface.accelerate.scripts import CLASSES, HEAD, ROUNDING, SHARDED, assert_alike, ours, plain, script

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[3] / "docs" / "migration" / "accelerate.md"

# The style of train_text_to_image_lora.py: frozen models beside, adapters, noise, gathered losses.
IMAGES = (
    HEAD
    + """
class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
    def forward(self, x):
        return self.base(x) + self.up(self.down(x))

class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.time, self.text = nn.Linear(1, 8), nn.Linear(6, 8)
    def forward(self, x, t, c):
        said = self.time(t[:, None].float() / 10) + self.text(c)
        return self.out(F.silu(F.silu(self.norm(self.into(x))) + said[:, :, None, None]))

accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True, mixed_precision=PRECISION,
    project_config=ProjectConfiguration(project_dir="out", logging_dir="out/logs"))
set_seed(0)
vae, text, unet = nn.Conv2d(3, 4, 2, stride=2), nn.Embedding(10, 6), Unet()
for each in (vae, text, unet):
    each.requires_grad_(False).to(accelerator.device)
unet.text, unet.time = Lora(unet.text), Lora(unet.time)
layers = [p for n, p in unet.named_parameters() if p.requires_grad]
data = [{"pixels": torch.randn(3, 8, 8, generator=drawn), "words": torch.randint(0, 10, (), generator=drawn),
         "noise": torch.randn(4, 4, 4, generator=drawn), "t": torch.randint(0, 10, (), generator=drawn)}
        for _ in range(24)]
loader = DataLoader(data, batch_size=4, shuffle=True)
optimizer = torch.optim.AdamW(layers, lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
scheduler = accelerator.prepare(scheduler)
losses, loss_sum, types = [], 0.0, set()
for epoch in range(2):
    for batch in loader:
        with accelerator.accumulate(unet):
            latents = vae(batch["pixels"])
            noise = torch.randn_like(latents) if DRAWS else batch["noise"]
            guess = unet(latents + noise * batch["t"][:, None, None, None] / 10, batch["t"], text(batch["words"]))
            types.add(str(guess.dtype))
            loss = F.mse_loss(guess, noise)
            loss_sum += accelerator.gather(loss.repeat(4)).mean().item() / 2
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(layers, 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            accelerator.log({"train_loss": loss_sum}, step=len(losses))
            losses.append(loss_sum)
            loss_sum = 0.0
left(accelerator, unet, losses=losses, types=sorted(types))
"""
)

# Two models of one optimizer, a moving average, hooks and numbered saves, as in train_dreambooth.py.
AVERAGE = (
    HEAD
    + """
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True,
    project_config=ProjectConfiguration(project_dir="out", automatic_checkpoint_naming=True, total_limit=2))
set_seed(0)
unet, text = nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 4)), nn.Embedding(10, 2)
average = nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 4)).requires_grad_(False)
average.load_state_dict(unet.state_dict())
accelerator.register_for_checkpointing(average)

def before_save(models, weights, folder):
    if accelerator.is_main_process:
        torch.save(weights[0], os.path.join(folder, "unet.pt"))
    weights.clear()

accelerator.register_save_state_pre_hook(before_save)
data = [{"x": torch.randn(4, generator=drawn), "w": torch.randint(0, 10, (), generator=drawn),
         "y": torch.randn(4, generator=drawn)} for _ in range(24)]
loader = DataLoader(data, batch_size=4, shuffle=True)
both = [*unet.parameters(), *text.parameters()]
optimizer = torch.optim.AdamW(both, lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
unet, text, optimizer, loader, scheduler = accelerator.prepare(unet, text, optimizer, loader, scheduler)
done = 0
for epoch in range(3):
    for batch in loader:
        with accelerator.accumulate(unet, text):
            guess = unet(torch.cat([batch["x"], text(batch["w"])], 1))
            accelerator.backward(F.mse_loss(guess, batch["y"]) + 0.5 * (guess ** 2).mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_value_(both, 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        if accelerator.sync_gradients:
            done += 1
            with accelerator.full_parameters() if hasattr(accelerator, "full_parameters") else torch.no_grad():
                for one, other in zip(average.parameters(), unet.parameters()):
                    one.data.lerp_(other.data, 0.1)
            if done % 3 == 0:
                accelerator.save_state()
left(accelerator, unet, text, average, done=done)
"""
)

ADVERSARIES = (
    HEAD
    + """
accelerator = Accelerator(cpu=True)
set_seed(0)
g = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
d = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
data = [(torch.randn(2, generator=drawn), torch.randn(3, generator=drawn)) for _ in range(24)]
of_g, of_d = torch.optim.Adam(g.parameters(), 1e-2), torch.optim.Adam(d.parameters(), 1e-2)
g, d, of_g, of_d, loader = accelerator.prepare(g, d, of_g, of_d, DataLoader(data, 8, shuffle=True))
of = lambda optimizer: {} if "SOURCE" == "accelerate" else {"optimizer": optimizer}
for epoch in range(2):
    for real, noise in loader:
        of_d.zero_grad()
        accelerator.backward(F.softplus(-d(real)).mean() + F.softplus(d(g(noise).detach())).mean(), **of(of_d))
        of_d.step()
        of_g.zero_grad()
        accelerator.backward(F.softplus(-d(g(noise))).mean(), **of(of_g))
        of_g.step()
left(accelerator, g, d)
"""
)

# Accumulation by hand, a schedule by epochs, no end_training; padded labels, of which each sample has its own number.
TOKENS = (
    HEAD
    + """
from transformers import GPT2Config, GPT2LMHeadModel
accelerator = Accelerator(gradient_accumulation_steps=STEPS, cpu=True, step_scheduler_with_optimizer=False)
set_seed(0)
def row():
    ids, many = torch.randint(3, 40, (12,), generator=drawn), int(torch.randint(4, 13, (), generator=drawn))
    places = torch.arange(12)
    return {"input_ids": ids, "labels": torch.where((places > 0) & (places < many), ids, -100)}
data = [row() for _ in range(24)]
model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=12, resid_pdrop=0,
    embd_pdrop=0, attn_pdrop=0, bos_token_id=1, eos_token_id=2, use_cache=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
model, optimizer, loader, scheduler = accelerator.prepare(
    model, optimizer, DataLoader(data, 8 // STEPS, shuffle=True), scheduler)
for epoch in range(2):
    for step, batch in enumerate(loader):
        accelerator.backward(model(**batch).loss)
        if (step + 1) % STEPS == 0 or step == len(loader) - 1:
            optimizer.step()
            optimizer.zero_grad()
    scheduler.step()
left(accelerator, model, rate=scheduler.get_last_lr())
"""
)

# A model that is split, with all that tells ranks apart: shares of an evaluation, sums, triggers, saves.
SPLIT = (
    HEAD
    + """
from transformers import LlamaConfig, LlamaForCausalLM
accelerator = Accelerator(gradient_accumulation_steps=STEPS, cpu=True, project_dir="out")
set_seed(0)
data = [{"input_ids": row, "labels": torch.where(torch.arange(10) < n, row, -100)}
        for n, row in zip([3, 9, 5, 10] * 6, torch.randint(3, 40, (24, 10), generator=drawn))]
model = LlamaForCausalLM(LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, use_cache=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, train, test = accelerator.prepare(
    model, optimizer, DataLoader(data, 8 // STEPS, shuffle=True), DataLoader(data[:10], 4))
seen, sums, done = [], [], 0
for epoch in range(2):
    model.train()
    for batch in train:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            done += 1
            if ALL or accelerator.is_main_process:
                accelerator.save_state(f"out/step_{done}")
    model.eval()
    for batch in test:
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"]).logits
        seen += accelerator.gather_for_metrics(logits.sum((1, 2))).tolist()
        rows = torch.tensor(float(len(logits)))
        sums.append([float(accelerator.reduce(rows)), float(accelerator.gather(rows).sum())])
    if accelerator.is_last_process:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
with accelerator.split_between_processes(list(range(4))) as part:
    parts = sorted(accelerator.gather_for_metrics(part))
left(accelerator, model, seen=seen, sums=sums, done=done, parts=parts)
"""
)

# Measurements of the training, beside an evaluation that is left early, of an epoch whose last batch is one sample.
MEASURED = (
    HEAD
    + """
accelerator = Accelerator(cpu=True)
set_seed(0)
model = nn.Linear(4, 2)
data = [{"x": torch.randn(4, generator=drawn), "y": torch.tensor(i)} for i in range(SAMPLES)]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, train, test = accelerator.prepare(
    model, optimizer, DataLoader(data, 4, shuffle=True), DataLoader(data, 4))
numbers, losses = [], []
for epoch in range(2):
    for batch in train:
        each = (model(batch["x"]) ** 2).mean(1)
        accelerator.backward(each.mean())
        optimizer.step()
        optimizer.zero_grad()
        for held_out in test:
            model(held_out["x"])
            break
        numbers.append(sorted(accelerator.gather_for_metrics(batch["y"]).tolist()))
        losses.append(accelerator.gather_for_metrics(each.detach().mean().repeat(4)).mean().item())
left(accelerator, model, numbers=numbers, losses=losses)
"""
)


@pytest.mark.parametrize("text", [CLASSES, IMAGES, AVERAGE, ADVERSARIES], ids=["glue", "lora", "ema", "gan"])
def test_it_trains_as_accelerate_does(text: str, tmp_path: Path) -> None:
    """Groups, schedules, accumulation, clipping, metrics in order, frozen models, a moving average, two optimizers:
    what the script sees, and its weights, are those of one process of accelerate, on one rank and under ZeRO-3 on two.
    """
    expected = plain(tmp_path / "plain", text)
    for world, keys in ((1, ()), (2, ()), (2, SHARDED)):
        folder = tmp_path / f"{world}{len(keys)}"
        found = ours(folder, text, *keys, world=world)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if name == "types":
                assert found[name] == value
            else:
                one, other = torch.tensor(found[name]), torch.tensor(value)
                assert torch.allclose(one, other, rtol=ROUNDING, atol=ROUNDING), name
        assert_alike(folder, tmp_path / "plain")
        if text is AVERAGE:
            assert {each.name for each in (folder / "out/checkpoints").iterdir()} == {"checkpoint_1", "checkpoint_2"}


def test_uneven_labels_weigh_alike_in_batches_of_any_size(tmp_path: Path) -> None:
    """Two batches a step on two ranks train as one batch a step in one process of accelerate, though the mean over
    labels of each half is over another number.
    """
    expected = plain(tmp_path / "plain", TOKENS, STEPS=1)
    found = ours(tmp_path / "two", TOKENS, *SHARDED, world=2, STEPS=2)
    assert found == expected
    assert_alike(tmp_path / "two", tmp_path / "plain")


@pytest.mark.parametrize(("world", "keys", "everyone"), [(2, (), True), (4, ("layout.replicate=2",), False)])
def test_a_split_model_trains_as_accelerate_does(
    world: int, keys: tuple[str, ...], everyone: bool, tmp_path: Path
) -> None:
    """Under `layout.tensor`, whose ranks have the same samples: each counts once, and rank 0 saves for all."""
    expected = plain(tmp_path / "plain", SPLIT, ALL=True, STEPS=1)
    found = ours(tmp_path / "split", SPLIT, "layout.tensor=2", *keys, world=world, ALL=everyone, STEPS=2)
    assert found.pop("seen") == pytest.approx(expected.pop("seen"), rel=ROUNDING, abs=ROUNDING)
    assert found == expected
    assert_alike(tmp_path / "split", tmp_path / "plain")
    assert {each.name for each in (tmp_path / "split" / "out").iterdir()} >= {f"step_{n}" for n in range(1, 7)}


def test_what_a_loop_draws_does_not_depend_on_the_ranks(tmp_path: Path) -> None:
    """Noise that is drawn in the loop, in bfloat16, of which the script sees float32; a last step of an epoch with
    fewer samples than ranks, and dropout.
    """
    one = ours(tmp_path / "one", IMAGES, world=1, DRAWS=True, PRECISION="bf16")
    two = ours(tmp_path / "two", IMAGES, world=2, DRAWS=True, PRECISION="bf16")
    assert one["types"] == two["types"] == ["torch.float32"]
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-2)
    uneven = {"SAMPLES": 25, "DROPOUT": 0.1, "STEPS": 8}
    ours(tmp_path / "a", CLASSES, world=1, **uneven)
    ours(tmp_path / "b", CLASSES, *SHARDED, world=2, **uneven)
    assert_alike(tmp_path / "b", tmp_path / "a")


def step_of_resume(folder: Path) -> int:
    """From which checkpoint the script went on, which was written while it trained."""
    (step,) = re.findall(r"resuming from the checkpoint of step (\d+)", (folder / "rank-0.txt").read_text())
    return int(step)


@pytest.mark.parametrize(("world", "keys"), [(1, ()), (2, SHARDED)])
def test_a_killed_script_goes_on_bit_by_bit(world: int, keys: tuple[str, ...], tmp_path: Path) -> None:
    """By `load_state` and `skip_first_batches`, in an epoch whose last step is short: the same bits as without; a
    script that asks for neither passes over what is done.
    """
    constants = {"SAMPLES": 26, "DROPOUT": 0.1, "STEPS": 12, "SAVES": True}
    whole = ours(tmp_path / "whole", CLASSES, *keys, world=world, **constants)
    cut = tmp_path / "cut"
    file = script(cut, CLASSES, "shoal.huggingface", **constants)
    assert run_script(file, cut, *keys, world=world, dies_at=17)[-1] == -9
    resumed = ours(cut, CLASSES, *keys, world=world, **constants)
    assert (resumed["done"], resumed["rates"][-1]) == (whole["done"], whole["rates"][-1])
    assert len(resumed["rates"]) == 12 - step_of_resume(cut)
    assert_alike(cut, tmp_path / "whole", rounding=0)

    unaware = CLASSES.replace('os.path.isdir("saved")', "False")
    other = tmp_path / "unaware"
    file = script(other, unaware, "shoal.huggingface", **constants)
    assert run_script(file, other, world=world, dies_at=17)[-1] == -9
    passed = ours(other, unaware, world=world, **constants)
    step = step_of_resume(other)
    assert f"batches up to step {step} are passed over" in (other / "rank-0.txt").read_text()
    assert len(passed["rates"]) == 12 - step
    again = ours(other, unaware, world=world, **constants)  # it is finished
    assert len(again["rates"]) == 0


@pytest.mark.parametrize(("signalled", "folder_of"), [(4, 4), (5, 6)])
def test_a_script_that_a_signal_stops_goes_on_where_it_counts(signalled: int, folder_of: int, tmp_path: Path) -> None:
    """SIGTERM saves the next step, behind that of the newest folder, or the very step: the script goes on from its
    folder, to the same bits, and takes as many steps as without.
    """
    constants = {"DROPOUT": 0.1, "STEPS": 8, "SAVES": True}
    whole = ours(tmp_path / "whole", CLASSES, world=2, **constants)
    stops = (
        f"if done == {signalled} and accelerator.is_main_process: os.kill(os.getpid(), 15)\n        if done >= most:"
    )
    stopped = CLASSES.replace("if done >= most:", stops)
    cut = tmp_path / "cut"
    assert run_script(script(cut, stopped, "shoal.huggingface", **constants), cut, world=2) == [75, 75]
    resumed = ours(cut, CLASSES, world=2, **constants)
    assert step_of_resume(cut) == folder_of
    assert (resumed["done"], len(resumed["rates"])) == (whole["done"], 8 - folder_of)
    assert_alike(cut, tmp_path / "whole", rounding=0)


def test_a_measurement_of_the_training_has_each_sample_once(tmp_path: Path) -> None:
    """Without the copy that a rank computes which has no sample of a batch."""
    expected = plain(tmp_path / "plain", MEASURED, SAMPLES=9)
    found = ours(tmp_path / "two", MEASURED, world=2, SAMPLES=9)
    assert found["numbers"] == expected["numbers"]
    assert found["losses"] == pytest.approx(expected["losses"], rel=ROUNDING)


def test_it_is_verified(tmp_path: Path) -> None:
    """`shoal verify` takes the script as any other, and finds a loss that is weighed wrongly."""
    folder = tmp_path / "right"
    verdict = compare_script(script(folder, TOKENS, "shoal.huggingface", STEPS=1), folder, world=2)
    assert not isinstance(verdict, str), verdict
    assert max(each.difference for each in verdict.findings) < 1e-6  # transformers computes the loss in float32
    wrong = TOKENS.replace("backward(model(**batch).loss)", "backward(model(**batch).loss * 0.9)")
    verdict = compare_script(script(tmp_path / "b", wrong, "shoal.huggingface", STEPS=1), tmp_path / "b", world=2)
    assert not isinstance(verdict, str), verdict
    assert max(each.difference for each in verdict.findings) > 1e-4


def test_the_script_of_the_page_runs(tmp_path: Path) -> None:
    """On two ranks, as the page starts it; each held-out sample is counted once."""
    (code,) = re.findall(r"## One import\n```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    codes = run_script(tmp_path / "mine.py", tmp_path, world=2)
    printed = (tmp_path / "rank-0.txt").read_text()
    assert codes == [0, 0], printed
    assert re.search(r"epoch 1: 0\.\d+ of 20 right", printed)
    assert (tmp_path / "output" / "model.safetensors").is_file()
