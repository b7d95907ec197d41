"""Scripts of DeepSpeed's train the model of one process of plain PyTorch, on any number of ranks and at any stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.cli.warm_scripts import compare_script, run_plain, run_script

pytestmark = pytest.mark.slow
ROUNDING = 1e-5
"""Of norms and weights: AdamW in float32 over some ten steps, summed in two orders."""
SAMPLES, STEP, EPOCHS = 44, 8, 2
"""The last step of an epoch is short."""

HEAD = """
import json, torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
drawn = torch.Generator().manual_seed(1)
x, y = torch.randn(SAMPLES, 8, generator=drawn), torch.randint(0, 4, (SAMPLES,), generator=drawn)
data = torch.utils.data.TensorDataset(x, y)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(DROPOUT), nn.Linear(32, 4))
"""

PLAIN = """
from safetensors.torch import save_file
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
loader = torch.utils.data.DataLoader(data, batch_size=STEP, shuffle=True)
norms, done = [], 0
for epoch in range(EPOCHS):
    for a, b in loader:
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, max(0, done - 1) / 4)
        F.cross_entropy(model(a), b).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        done += 1
save_file(model.state_dict(), "plain.safetensors")
print(json.dumps({"norms": norms}))
"""

ENGINE = """
import shoal.deepspeed as deepspeed
config = {
    "train_batch_size": STEP,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}},
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": STAGE},
}
engine, optimizer, loader, scheduler = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), training_data=data, config=config
)
where, said = engine.load_checkpoint("saved")
norms = said["norms"] if said else []
for epoch in range(EPOCHS):
    for a, b in loader:
        engine.backward(F.cross_entropy(engine(a), b))
        ends = engine.is_gradient_accumulation_boundary()
        engine.step()
        if ends:
            norms.append(engine.get_global_grad_norm())
            assert engine.global_steps == len(norms), (engine.global_steps, len(norms))
            assert engine.get_lr() == [1e-2 * min(1.0, max(0, len(norms) - 1) / 4)]
            engine.save_checkpoint("saved", client_state={"norms": norms})
engine.save_16bit_model("out")
if engine.global_rank == 0:
    print(json.dumps({"norms": norms, "resumed": where}))
"""


def script(tmp_path: Path, body: str, *, stage: int = 0, dropout: float = 0.0) -> Path:
    values = {"SAMPLES": SAMPLES, "STEP": STEP, "EPOCHS": EPOCHS, "STAGE": stage, "DROPOUT": dropout}
    text = HEAD + body
    for name, value in values.items():
        text = text.replace(name, str(value))
    file = tmp_path / "mine.py"
    file.write_text(text)
    return file


def said(folder: Path) -> dict[str, Any]:
    lines = (folder / "rank-0.txt").read_text().splitlines()
    return json.loads(next(line for line in lines if line.startswith('{"norms"')))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    printed = run_plain(script(folder, PLAIN), folder)
    (folder / "said.json").write_text(printed.strip().splitlines()[-1])
    return folder


def check_like_plain(folder: Path, plain: Path) -> None:
    assert said(folder)["norms"] == pytest.approx(json.loads((plain / "said.json").read_text())["norms"], rel=ROUNDING)
    expected = load_file(plain / "plain.safetensors")
    found = load_file(folder / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert float((found[name] - weight).norm() / weight.norm()) < ROUNDING, name


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (0, 2), (1, 2), (2, 2), (3, 2), (3, 4)])
def test_a_script_trains_the_model_of_one_process(stage: int, world: int, plain: Path, tmp_path: Path) -> None:
    """On one rank a step has four microbatches, on four one: the JSON file is the same."""
    assert run_script(script(tmp_path, ENGINE, stage=stage), tmp_path, world=world) == [0] * world
    check_like_plain(tmp_path, plain)
    assert said(tmp_path)["resumed"] is None


OF_OTHER_STYLE = {
    "model=model, model_parameters=model.parameters(), training_data=data, config=config": (
        "args, model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1), None, "
        "torch.utils.data.DataLoader(data, batch_size=2, shuffle=True), "
        "lambda own: torch.optim.lr_scheduler.LambdaLR(own, lambda n: min(1.0, max(0, n - 1) / 4))"
    ),
    "import shoal.deepspeed as deepspeed\n": (
        "import argparse, json\nimport shoal.deepspeed as deepspeed\n"
        "args = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args("
        "['--deepspeed', '--deepspeed_config', 'ds.json'])\ndeepspeed.init_distributed()\n"
        "import os\nplace = (deepspeed.comm.get_rank(), torch.distributed.get_world_size())\n"
        "assert place == (int(os.environ['RANK']), 2)\n"
    ),
    "engine, optimizer": (
        "del config['optimizer'], config['scheduler'], config['train_micro_batch_size_per_gpu']\n"
        "open('ds.json', 'w').write(json.dumps(config))\nengine, optimizer"
    ),
    "for epoch in range(2):\n    for a, b in loader:": (
        "batches = deepspeed.RepeatingLoader(loader)\nfor epoch in range(2):\n"
        "    for _ in range(len(loader)):\n        a, b = next(batches)"
    ),
}


def test_a_script_of_another_style_trains_alike(plain: Path, tmp_path: Path) -> None:
    """A parser's arguments, a JSON file, its own optimizer, scheduler and DataLoader, and a loop that repeats it."""
    file = script(tmp_path, ENGINE, stage=1)
    text = file.read_text()
    for old, new in OF_OTHER_STYLE.items():
        assert old in text, old
        text = text.replace(old, new)
    file.write_text(text)
    assert run_script(file, tmp_path, world=2) == [0, 0], (tmp_path / "rank-0.txt").read_text()
    check_like_plain(tmp_path, plain)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_it_computes_in_the_type_of_the_file(precision: str, plain: Path, tmp_path: Path) -> None:
    """Within that type's rounding, but not within float32's."""
    file = script(tmp_path, ENGINE)
    file.write_text(
        file.read_text().replace('"gradient_clipping"', f'"{precision}": {{"enabled": True}}, "gradient_clipping"')
    )
    assert run_script(file, tmp_path, world=2) == [0, 0], (tmp_path / "rank-0.txt").read_text()
    expected = json.loads((plain / "said.json").read_text())["norms"]
    assert said(tmp_path)["norms"] == pytest.approx(expected, rel=0.05)
    assert said(tmp_path)["norms"] != pytest.approx(expected, rel=ROUNDING)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_killed_script_goes_on(stage: int, plain: Path, tmp_path: Path) -> None:
    """From its newest checkpoint, with the client state of that; what is trained is what was to be."""
    file = script(tmp_path, ENGINE, stage=stage)
    assert run_script(file, tmp_path, world=2, dies_at=13) != [0, 0]
    assert run_script(file, tmp_path, world=2) == [0, 0]
    check_like_plain(tmp_path, plain)
    assert said(tmp_path)["resumed"] is not None


def test_a_loop_that_begins_with_its_own_epoch_goes_on(plain: Path, tmp_path: Path) -> None:
    """It saves the number of the epoch, and begins with the one behind it, as scripts of DeepSpeed's do."""
    file, text = script(tmp_path, ENGINE), ""
    for old, new in {
        "range(2)": "range(said['epoch'] + 1 if said else 0, 2)",
        'engine.save_checkpoint("saved", client_state={"norms": norms})': (
            "if len(norms) % 6 == 0: engine.save_checkpoint('saved', client_state={'norms': norms, 'epoch': epoch})"
        ),
    }.items():
        text = text or file.read_text()
        assert old in text, old
        text = text.replace(old, new)
    file.write_text(text)
    assert run_script(file, tmp_path, world=2, dies_at=17) != [0, 0]
    assert run_script(file, tmp_path, world=2) == [0, 0], (tmp_path / "rank-0.txt").read_text()
    check_like_plain(tmp_path, plain)


def test_a_script_that_came_to_its_end_trains_nothing_more(tmp_path: Path) -> None:
    file = script(tmp_path, ENGINE)
    assert run_script(file, tmp_path, world=1) == [0]
    first = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert run_script(file, tmp_path, world=1) == [0]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == first


def test_verify_proves_a_script(tmp_path: Path) -> None:
    verdict = compare_script(script(tmp_path, ENGINE, stage=3, dropout=0.2), tmp_path, world=2)
    assert not isinstance(verdict, str), verdict
    assert verdict.holds, verdict


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("training_data=data, ", ""), "needs training_data="),
        (('"train_batch_size": 8,', '"train_batch_size": 9,'), "train_batch_size = 9 is no multiple"),
        (('"stage": 0', '"stage": 7'), "zero_optimization.stage"),
        (('load_checkpoint("saved")', 'load_checkpoint("saved", load_module_only=True)'), "resumed as a whole"),
        (("engine.step()", "engine.save_checkpoint('saved'); engine.step()"), "in the middle of a step"),
        (
            ("config = {", "deepspeed.init_distributed()\ntorch.distributed.barrier()\nconfig = {"),
            "ranks are connected by initialize()",
        ),
        (("deepspeed.initialize(", "deepspeed.zero.Init(); deepspeed.initialize("), "leave zero.Init"),
    ],
)
def test_what_is_refused_is_said(change: tuple[str, str], sentence: str, tmp_path: Path) -> None:
    file = script(tmp_path, ENGINE)
    assert change[0] in file.read_text()
    file.write_text(file.read_text().replace(*change))
    assert run_script(file, tmp_path, world=1) != [0]
    assert sentence in " ".join((tmp_path / "rank-0.txt").read_text().split())
