"""Scripts of `accelerate.Accelerator`, run by Accelerate itself in one process and by Shoal on ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.cli.warm_scripts import run_plain, run_script

SHARDED = ("layout.shard=2", "memory.zero=3")
ROUNDING = 1e-5
"""Of losses, norms and weights: AdamW in float32 over some ten steps, summed in two orders."""

HEAD = """
import json, math, os
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from accelerate.utils import ProjectConfiguration, set_seed
from SOURCE import Accelerator

drawn = torch.Generator().manual_seed(0)

def left(accelerator, *models, **said):
    from safetensors.torch import save_file
    states = [accelerator.get_state_dict(each) for each in models]
    if accelerator.is_main_process:
        save_file({f"{i}.{n}": v.clone() for i, state in enumerate(states) for n, v in state.items()}, "weights")
        print(json.dumps({"said": said}))
    accelerator.end_training()
"""

# The style of run_glue_no_trainer.py: groups, a schedule by num_processes, a break at the last step, metrics.
CLASSES = (
    HEAD
    + """
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification, get_scheduler
from accelerate.logging import get_logger
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
get_logger(__name__).info(accelerator.state, main_process_only=False)
set_seed(0)
rows = [torch.randint(3, 40, (12,), generator=drawn) for _ in range(SAMPLES)]
data = [{"input_ids": row, "labels": int(row[0] > 20)} for row in rows]
collate = lambda rows: BatchEncoding(torch.utils.data.default_collate(rows))
model = BertForSequenceClassification(BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2,
    num_attention_heads=2, intermediate_size=32, max_position_embeddings=16, hidden_dropout_prob=DROPOUT,
    attention_probs_dropout_prob=DROPOUT))
train = DataLoader(data, batch_size=4, shuffle=True, collate_fn=collate)
test = DataLoader(data[:10], batch_size=4, collate_fn=collate)
biases = [p for n, p in model.named_parameters() if "bias" in n]
others = [p for n, p in model.named_parameters() if "bias" not in n]
optimizer = torch.optim.AdamW([{"params": others, "weight_decay": 0.1}, {"params": biases}], lr=1e-2)
most, per_epoch = STEPS, math.ceil(len(train) / 2)
scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2 * accelerator.num_processes,
    num_training_steps=most * accelerator.num_processes)
model, optimizer, train, test, scheduler = accelerator.prepare(model, optimizer, train, test, scheduler)
rates, norms, losses, rights = [], [], [], []
done = first = skipped = 0
if os.path.isdir("saved"):
    newest = max(int(name.split("_")[1]) for name in os.listdir("saved"))
    accelerator.load_state(f"saved/step_{newest}")
    done, first, skipped = newest, newest // per_epoch, newest % per_epoch * 2
for epoch in range(first, math.ceil(most / per_epoch)):
    model.train()
    active = accelerator.skip_first_batches(train, skipped) if skipped and epoch == first else train
    for step, batch in enumerate(active):
        batch.to(accelerator.device)
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            done += 1
            rates.append(scheduler.get_last_lr()[0])
            if SAVES and done % 2 == 0:
                accelerator.save_state(f"saved/step_{done}")
        if done >= most:
            break
    model.eval()
    found = []
    for batch in test:
        batch.to(accelerator.device)
        with torch.no_grad():
            outputs = model(**batch)
        found.append(accelerator.gather_for_metrics((outputs.loss.repeat(4), outputs.logits, batch["labels"])))
    seen, logits, labels = (torch.cat(each) for each in zip(*found))
    assert labels.tolist() == [each["labels"] for each in data[:10]]
    losses.append(seen.mean().item())
    rights.append(logits.tolist())
left(accelerator, model, done=done, rates=rates, norms=norms, losses=losses, rights=rights)
"""
)


def script(folder: Path, text: str, source: str, **constants: Any) -> Path:
    defaults = {"SAMPLES": 24, "DROPOUT": 0, "STEPS": 7, "SAVES": False, "PRECISION": None, "DRAWS": False}
    for name, value in (defaults | constants).items():
        text = text.replace(name, repr(value))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "mine.py"
    file.write_text(text.replace("SOURCE", source))
    return file


def said(printed: str) -> dict[str, Any]:
    return json.loads(next(line for line in printed.splitlines() if line.startswith('{"said')))["said"]


def plain(folder: Path, text: str, **constants: Any) -> dict[str, Any]:
    return said(run_plain(script(folder, text, "accelerate", **constants), folder))


def ours(folder: Path, text: str, *keys: str, world: int, **constants: Any) -> dict[str, Any]:
    codes = run_script(script(folder, text, "shoal.huggingface", **constants), folder, *keys, world=world)
    printed = (folder / "rank-0.txt").read_text()
    assert codes == [0] * world, printed
    return said(printed)


def assert_alike(folder: Path, expected: Path, rounding: float = ROUNDING) -> None:
    one, other = load_file(folder / "weights"), load_file(expected / "weights")
    assert one.keys() == other.keys()
    for name in one:
        assert float((one[name] - other[name]).abs().max()) <= rounding, name
