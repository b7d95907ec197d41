"""Scripts in the style of transformers' examples train as under `transformers.Trainer`, on any layout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shoal.checkpoint.weights import weights_of
from shoal.launcher.own_script import ScriptCheck
from tests.cli.warm_scripts import compare_script, run_plain, run_script

pytestmark = pytest.mark.slow
SHARDED = ("layout.shard=2", "memory.zero=3")
ROUNDING = 2e-5
"""Of a loss, a norm and a mean weight: AdamW in float32 over seven steps, summed in two orders."""

HEAD = """
import json
import numpy as np
import torch
from transformers import EarlyStoppingCallback, TrainerCallback, set_seed
from SOURCE import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

set_seed(0)
drawn = torch.Generator().manual_seed(0)

def words(low=4, high=13):
    many = int(torch.randint(low, high, (), generator=drawn))
    return torch.randint(3, 40, (many,), generator=drawn).tolist()

def padded(ids, by=0):
    return ids + [by] * (12 - len(ids))

def arguments(kind=TrainingArguments, **more):
    return kind("out", per_device_train_batch_size=4, max_steps=7, learning_rate=1e-2, weight_decay=0.1,
                logging_steps=1, warmup_steps=2, use_cpu=True, train_sampling_strategy="sequential",
                **{"save_strategy": "no", "optim": "adamw_torch", **more})

def left(trainer, **more):
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(json.dumps({"history": trainer.state.log_history, "events": trainer.state.global_step, **more}))
"""

# No position predicts the first label, which transformers counts all the same for GPT-2: it is left out here.
CAUSAL = (
    HEAD
    + """
from transformers import GPT2Config, GPT2LMHeadModel
data = [{"input_ids": padded(ids), "attention_mask": padded([1] * len(ids)), "labels": padded([-100, *ids[1:]], -100)}
        for ids in (words() for _ in range(26))]
model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=12, resid_pdrop=0,
                                   embd_pdrop=0, attn_pdrop=0, bos_token_id=1, eos_token_id=2))
trainer = Trainer(model=model, args=arguments(gradient_accumulation_steps=2, **MORE), train_dataset=data)
trainer.train()
left(trainer)
"""
)

# transformers passes the number of labels to BERT, whose loss does not use it, and leaves the division by the
# accumulation to it: so one batch is one step here.
CLASSES = (
    HEAD
    + """
from transformers import BertConfig, BertForSequenceClassification

class Weighted(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, inputs["labels"])
        return (loss, outputs) if return_outputs else loss

    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.learning_rate, momentum=0.9)
        return self.optimizer

class Seen(TrainerCallback):
    events = []
    def on_epoch_begin(self, args, state, control, **kwargs): self.events.append(["epoch", state.global_step])
    def on_pre_optimizer_step(self, args, state, control, **kwargs): self.events.append(["before", state.global_step])
    def on_evaluate(self, args, state, control, metrics, **kwargs): self.events.append(["metrics", metrics["eval_all"]])
    def on_train_end(self, args, state, control, **kwargs): self.events.append(["end", state.best_global_step])

def accuracy(found):
    return {"right": float((found.predictions.argmax(-1) == found.label_ids).mean()), "all": len(found.label_ids)}

rows = [words() for _ in range(26)]
data = [{"input_ids": padded(ids), "attention_mask": padded([1] * len(ids)), "label": int(ids[0] > 20),
         "text": "unused"} for ids in rows]
model = BertForSequenceClassification(BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2,
    num_attention_heads=2, intermediate_size=32, max_position_embeddings=16, hidden_dropout_prob=0,
    attention_probs_dropout_prob=0))
trainer = Weighted(model=model, train_dataset=data, eval_dataset=data[:9], compute_metrics=accuracy, callbacks=[Seen],
    args=arguments(eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
                   load_best_model_at_end=True, metric_for_best_model="eval_loss", per_device_eval_batch_size=4))
trainer.train()
found = trainer.predict(data[:7])
left(trainer, seen=Seen.events, evaluated=trainer.evaluate()["eval_loss"], predictions=found.predictions.tolist())
"""
)

# Samples of one length: the mean over an evaluation set's labels is that over its batches, which transformers takes.
OPTIONS = (
    HEAD
    + """
from transformers import LlamaConfig, LlamaForCausalLM
data = [{"input_ids": ids, "attention_mask": [1] * 7 + [0], "labels": [*ids[:7], -100]}
        for ids in (words(8, 9) for _ in range(26))]
model = LlamaForCausalLM(LlamaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, intermediate_size=32, bos_token_id=1, eos_token_id=2))
def measured(found):
    return {"tokens": int(found.inputs.sum()), "right": int((found.predictions == found.label_ids).sum()),
            "losses": float(found.losses.sum())}
trainer = Trainer(model=model, train_dataset=data, eval_dataset=data[:8], compute_metrics=measured,
    preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    args=arguments(gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4,
                   include_num_input_tokens_seen="non_padding", include_for_metrics=["inputs", "loss"],
                   lr_scheduler_type="greedy", lr_scheduler_kwargs={"patience": 0, "warmup": 0, "cooldown": 0},
                   metric_for_best_model="loss", max_grad_norm=0, eval_on_start=True,
                   optim="adamw_torch_fused", label_smoothing_factor=0.1, full_determinism=True))
trainer.train()
left(trainer, evaluated=trainer.evaluate()["eval_loss"])
"""
)

# A trainer as other libraries extend it: it asks the accelerator for sums over all ranks, wraps a step, and asks the
# model which of its figures to log.
FOREIGN = (
    HEAD
    + """
import transformers
from transformers import BertConfig, BertForSequenceClassification
if Trainer is transformers.Trainer:
    on_shoal = lambda kind: kind
else:
    from shoal.huggingface import on_shoal

class Theirs(transformers.Trainer):
    rows, wrapped = {"train": [], "eval": []}, 0
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        rows = self.accelerator.gather_for_metrics(torch.tensor(len(inputs["labels"]))).sum()
        self.rows["train" if model.training else "eval"].append(int(rows))
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
    def training_step(self, *given, **named):
        self.wrapped += 1
        return super().training_step(*given, **named)
    def log(self, logs, *given):
        mode = "train" if self.model.training else "eval"
        super().log({**logs, f"{mode}_rows": sum(self.rows[mode])}, *given)
        self.rows[mode].clear()

data = [{"input_ids": padded(ids), "attention_mask": padded([1] * len(ids)), "label": int(ids[0] > 20)}
        for ids in (words() for _ in range(26))]
model = BertForSequenceClassification(BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2,
    num_attention_heads=2, intermediate_size=32, max_position_embeddings=16, hidden_dropout_prob=0,
    attention_probs_dropout_prob=0))
Arguments = on_shoal(transformers.TrainingArguments)
trainer = on_shoal(Theirs)(model=model, train_dataset=data, eval_dataset=data[:9],
    args=arguments(Arguments, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4))
trainer.train()
left(trainer, wrapped=trainer.wrapped, kind=isinstance(trainer, Theirs))
"""
)

SEQUENCES = (
    HEAD
    + """
from transformers import T5Config, T5ForConditionalGeneration
data = [{"input_ids": padded(words()), "labels": padded(words(), -100)} for _ in range(26)]
model = T5ForConditionalGeneration(T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
    dropout_rate=0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1))
def tokens(found):
    return {"tokens": int(np.where(found.predictions < 0, 0, found.predictions).sum())}
trainer = Seq2SeqTrainer(model=model, train_dataset=data, eval_dataset=data[:5], compute_metrics=tokens,
    args=arguments(Seq2SeqTrainingArguments, predict_with_generate=True, per_device_eval_batch_size=4))
trainer.train()
left(trainer, evaluated=trainer.evaluate())
"""
)

ADAPTERS = (
    HEAD
    + """
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
data = [{"input_ids": padded(ids), "attention_mask": padded([1] * len(ids)), "labels": padded(ids, -100)}
        for ids in (words() for _ in range(26))]
model = LlamaForCausalLM(LlamaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, intermediate_size=32, bos_token_id=1, eos_token_id=2))
model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
trainer = Trainer(model=model, args=arguments(gradient_accumulation_steps=2), train_dataset=data, eval_dataset=data[:5])
trainer.train()
left(trainer, evaluated=trainer.evaluate()["eval_loss"])
"""
)

MASKED = (
    HEAD
    + """
import datasets
from tokenizers import Tokenizer, models
from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling, PreTrainedTokenizerFast
special = {name: f"[{name[:4]}]" for name in ("pad_token", "mask_token", "unk_token")}
known = {word: i for i, word in enumerate([*special.values(), *map(str, range(37))])}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(known, "[unk_]")), **special)
data = datasets.Dataset.from_list([{"text": "unused", "input_ids": words()} for _ in range(26)])
model = BertForMaskedLM(BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=32, max_position_embeddings=16))
trainer = Trainer(model=model, train_dataset=data, eval_dataset=data.select(range(9)),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4),
    args=arguments(gradient_accumulation_steps=2, per_device_eval_batch_size=4))
trainer.train()
left(trainer, evaluated=trainer.evaluate()["eval_loss"])
"""
)


def script(folder: Path, text: str, source: str, **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "mine.py"
    file.write_text(text.replace("SOURCE", source).replace("MORE", repr(more)))
    return file


def said(printed: str) -> dict[str, Any]:
    return json.loads(next(line for line in reversed(printed.splitlines()) if line.startswith('{"history')))


def plain(folder: Path, text: str) -> dict[str, Any]:
    return said(run_plain(script(folder, text, "transformers"), folder))


def ours(folder: Path, text: str, *overrides: str, world: int, **more: Any) -> dict[str, Any]:
    codes = run_script(script(folder, text, "shoal.huggingface", **more), folder, *overrides, world=world)
    printed = (folder / "rank-0.txt").read_text()
    assert codes == [0] * world, printed
    return said(printed)


def logged(found: dict[str, Any], name: str) -> list[float]:
    return [entry[name] for entry in found["history"] if name in entry]


def weights(folder: Path, file: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(folder / "out" / file)


def assert_alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], steps_size: float = 1e-3) -> None:
    """Gradients that are zero but for rounding are of any sign to AdamW: single numbers may be off by some steps."""
    assert one.keys() == other.keys()
    for name in one:
        assert float((one[name] - other[name]).norm()) <= steps_size * float(one[name].norm() + 1), name


@pytest.mark.parametrize(("text", "file"), [(CAUSAL, "model"), (CLASSES, "model"), (ADAPTERS, "adapter_model")])
def test_it_trains_as_transformers_does(text: str, file: str, tmp_path: Path) -> None:
    """Uneven token counts, accumulation, decay, warm-up, clipping; metrics, the best model, overridden methods:
    losses, norms, rates and weights are those of one process of transformers, on one rank and under ZeRO-3 on two.
    """
    expected = plain(tmp_path / "plain", text)
    for world, overrides in ((1, ()), (2, SHARDED)):
        folder = tmp_path / str(world)
        found = ours(folder, text, *overrides, world=world)
        for name in ("loss", "grad_norm", "eval_loss", "eval_right"):
            assert logged(found, name) == pytest.approx(logged(expected, name), rel=ROUNDING), name
        assert logged(found, "learning_rate") == pytest.approx(logged(expected, "learning_rate"), rel=1e-12)
        assert len(logged(found, "loss")) == 7
        for name in ("seen", "predictions", "evaluated"):
            if name == "seen":
                assert found.get(name) == expected.get(name)
            elif name in expected:
                assert torch.tensor(found[name]).numpy() == pytest.approx(
                    torch.tensor(expected[name]).numpy(), rel=1e-3, abs=1e-4
                )
        assert_alike(weights(folder, f"{file}.safetensors"), weights(tmp_path / "plain", f"{file}.safetensors"))


def test_its_options_do_what_they_do_in_transformers(tmp_path: Path) -> None:
    """A schedule that follows a metric, tokens seen, inputs and losses for metrics, smoothed labels: on two ranks."""
    expected = plain(tmp_path / "plain", OPTIONS)
    found = ours(tmp_path / "two", OPTIONS, *SHARDED, world=2)
    for name in ("loss", "eval_loss", "eval_losses", "learning_rate"):
        assert logged(found, name) == pytest.approx(logged(expected, name), rel=ROUNDING), name
    for name in ("eval_tokens", "eval_right", "num_input_tokens_seen"):
        assert logged(found, name) == logged(expected, name), name
    assert len(set(logged(found, "learning_rate"))) > 1
    assert_alike(weights(tmp_path / "two"), weights(tmp_path / "plain"))


def test_a_trainer_of_another_library_trains_on_all_ranks(tmp_path: Path) -> None:
    """`on_shoal`: the same losses, weights, and sums over all ranks; copies of a batch are in none of them."""
    expected = plain(tmp_path / "plain", FOREIGN)
    found = ours(tmp_path / "two", FOREIGN, *SHARDED, world=2)
    for name in ("loss", "grad_norm", "eval_loss"):
        assert logged(found, name) == pytest.approx(logged(expected, name), rel=ROUNDING), name
    for name in ("train_rows", "eval_rows"):
        assert logged(found, name) == logged(expected, name), name
    assert (logged(found, "eval_rows")[:4], found["wrapped"], found["kind"]) == ([9] * 4, 7, True)
    assert_alike(weights(tmp_path / "two"), weights(tmp_path / "plain"))


def test_sequences_are_generated_on_all_ranks(tmp_path: Path) -> None:
    """T5 by `Seq2SeqTrainer`: the same training and the same generated tokens, which are counted over all ranks."""
    expected = plain(tmp_path / "plain", SEQUENCES)
    found = ours(tmp_path / "two", SEQUENCES, *SHARDED, world=2)
    assert logged(found, "loss") == pytest.approx(logged(expected, "loss"), rel=ROUNDING)
    assert found["evaluated"]["eval_tokens"] == expected["evaluated"]["eval_tokens"]


def test_masks_are_those_of_the_sample(tmp_path: Path) -> None:
    """A masked language model with dropout: the same masks on one rank and on two, in training and evaluation."""
    one = ours(tmp_path / "one", MASKED, world=1)
    two = ours(tmp_path / "two", MASKED, world=2)
    for name in ("loss", "grad_norm", "eval_loss"):
        assert logged(two, name) == pytest.approx(logged(one, name), rel=ROUNDING), name
    assert two["evaluated"] == pytest.approx(one["evaluated"], rel=ROUNDING)


def test_a_killed_run_goes_on_bit_by_bit(tmp_path: Path) -> None:
    """Killed in its sixth backward and started again: the same history, scheduler and weights as without. Once it is
    finished, another script goes on with it where it asks for that, on another number of ranks too.
    """
    more = {"save_strategy": "steps", "save_steps": 2}
    whole = ours(tmp_path / "whole", CAUSAL, *SHARDED, world=2, **more)
    cut = tmp_path / "cut"
    codes = run_script(script(cut, CAUSAL, "shoal.huggingface", **more), cut, *SHARDED, world=2, dies_at=6)
    assert codes[-1] == -9
    resumed = ours(cut, CAUSAL, *SHARDED, world=2, **more)
    for name in ("loss", "grad_norm", "learning_rate", "train_loss"):
        assert logged(resumed, name) == logged(whole, name), name
    before, after = weights(tmp_path / "whole"), weights(cut)
    assert all(torch.equal(before[name], after[name]) for name in before)
    further = CAUSAL.replace("max_steps=7", "max_steps=9").replace("train()", 'train(resume_from_checkpoint="out")')
    found = ours(cut, further, world=1, **more)
    assert logged(found, "loss")[:7] == logged(whole, "loss")
    assert (found["events"], len(logged(found, "loss"))) == (9, 9)


def test_a_step_that_is_taken_back_is_logged(tmp_path: Path) -> None:
    """The first scales of float16 overflow the gradient, not the loss; the schedule waits for a step that is taken."""
    found = ours(tmp_path, CAUSAL, world=1, fp16=True)
    taken = [math.isfinite(norm) for norm in logged(found, "grad_norm")]
    assert not all(taken)
    assert all(math.isfinite(loss) for loss in logged(found, "loss"))
    assert set(logged(found, "learning_rate")[: taken.index(True) + 1]) == {0.0}


def test_it_is_verified(tmp_path: Path) -> None:
    """`shoal verify` takes the script as any other; a loss that is weighed wrongly is found."""
    verdict = compare_script(script(tmp_path / "right", CAUSAL, "shoal.huggingface"), tmp_path / "right", world=2)
    assert not isinstance(verdict, str), verdict
    worst = max(each.difference for each in verdict.findings)
    assert worst < 1e-6  # transformers computes the loss in float32
    wrong = CAUSAL.replace("trainer.train()", "trainer.loss_weight = lambda inputs: 1.0\ntrainer.train()")
    verdict = compare_script(script(tmp_path / "wrong", wrong, "shoal.huggingface"), tmp_path / "wrong", world=2)
    assert not isinstance(verdict, str), verdict
    assert max(each.difference for each in verdict.findings) > 1e-3


def test_an_early_stop_is_kept(tmp_path: Path) -> None:
    """A callback that saves or stops on one rank does so on every rank, and a second start does not go on behind it.
    The last checkpoint holds the model of the last step, whatever becomes of it afterwards, such as the best one in
    its place.
    """
    text = CAUSAL.replace(
        "trainer.train()",
        "trainer.add_callback(Stops())\ntrainer.train()\n[p.data.zero_() for p in model.parameters()]",
    ).replace(
        "trainer = ",
        """
class Stops(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.global_step == 2 and args.process_index == 0
        control.should_training_stop = state.global_step == 3 and args.process_index == 1
trainer = """,
    )
    first = ours(tmp_path, text, world=2)
    assert first["events"] == 3
    assert not any(each.any() for each in weights(tmp_path).values())
    assert all(each.any() for name, each in weights_of(tmp_path / "out/shoal").items() if name.endswith(".weight"))
    again = ours(tmp_path, text, world=2)
    assert (again["events"], logged(again, "train_loss")) == (3, [])
    assert "stopped this run at step 3, and it trains no further" in (tmp_path / "rank-0.txt").read_text()


def test_the_check_of_a_script_is_one_of_two(tmp_path: Path) -> None:
    """The plain side of a verification leaves no file of the script's."""
    folder = tmp_path / "side"
    check = ScriptCheck(side="plain", folder=str(folder), steps=2, exact=False)
    assert run_script(script(folder, CAUSAL, "shoal.huggingface"), folder, check=check) == [0]
    assert not (folder / "out" / "model.safetensors").exists()
