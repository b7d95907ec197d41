"""The rules between tables as data: each is said of some run file, in one sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import LayoutError
from shoal.runfile.rule import Against, Rule, tables_of
from shoal.runfile.rules import refusal
from shoal.runfile.run_file import RunFile
from tests.verification.layouts import GPT, MOE, run_file_of

OWN = {"kind": "python", "build": "own:build"}
FRAGMENTS: tuple[dict[str, dict[str, Any]], ...] = (
    *({"layout": {axis: 2}} for axis in ("pipeline", "shard", "context", "tensor", "replicate")),
    {"layout": {"expert": 2, "shard": 2}},
    {"layout": {"auto": True}},
    {"layout": {"tensor": 2, "tensor_grid": [1, 2]}},
    {"layout": {"tensor": 2, "sequence_parallel": True}},
    {"layout": {"pipeline": 2}, "pipeline": {"schedule": "PipeDream"}},
    {"layout": {"pipeline": 2}, "pipeline": {"schedule": "ZBVZeroBubble", "codec": "int8"}},
    {"pipeline": {"codec": "int8", "schedule": "PipeDream", "microbatches": 3}},
    {"run": {"processes": 1}},
    {"run": {"processes": 2}, "batch": {"global_samples": 9}},
    *({"run": {"compile": value}} for value in (True, "blocks")),
    {"run": {"compile": True, "compile_mode": "max-autotune"}, "batch": {"micro_samples": 1}},
    *({"run": {"device": device}} for device in ("cpu", "cuda")),
    {"run": {"share_gpus": True}, "wire": {"transport": "shm", "algorithm": "ring"}},
    {"run": {"share_gpus": True}, "wire": {"transport": "gloo"}},
    {"run": {"stop_when": {}}, "observe": {"evaluate_every_steps": 2}},
    {"run": {"warm_start": "runs/a", "warm_start_data": True}},
    *({"sync": {"kind": kind}} for kind in ("local", "streaming", "easgd", "gossip", "server", "hogwild")),
    {"sync": {"kind": "local", "merge": "adasum"}},
    {"sync": {"kind": "gossip", "algorithm": "sgp", "asynchronous": True, "delay": 4}},
    {"sync": {"kind": "gossip", "graph": "neighbours", "neighbours": [[1], [0]]}, "run": {"processes": 3}},
    {"sync": {"kind": "server", "admission": "backup", "backup": 1, "servers": 1}, "run": {"processes": 2}},
    {"sync": {"kind": "server", "servers": 2}, "run": {"processes": 2}},
    {"sync": {"kind": "allreduce", "order": "canonical"}},
    {"sync": {"kind": "allreduce", "order": "canonical"}, "run": {"processes": 3}},
    {"elastic": {"min": 1, "max": 2}},
    *({"precision": {"kind": kind}} for kind in ("bfloat16", "float16", "float8", "bfloat16_params")),
    {"precision": {"kind": "bfloat16_params", "reduce_dtype": "bfloat16"}},
    *({"codec": {"kind": kind}} for kind in ("top_k", "dgc", "auto", "power_sgd", "scale_com")),
    {"shard_codec": {"weights": "int8", "gradients": "int8"}},
    {"gradients": {"schedule": "priority"}},
    {"gradients": {"bucket": "auto"}},
    *({"optimizer": {"kind": kind}} for kind in ("sgd", "lbfgs", "newton_cg", "kfac", "muon", "schedule_free_adamw")),
    {"optimizer": {"kind": "kfac", "fisher": "sampled", "weight_sharing": "expand"}},
    {"optimizer": {"kind": "kfac", "weight_sharing": "reduce"}},
    {"optimizer": {"kind": "one_bit_adam"}},
    {"optimizer": {"kind": "one_bit_adam", "transforms": [{"kind": "centralise"}]}},
    {"optimizer": {"kind": "one_bit_adam", "clip_norm": 1.0}},
    {"optimizer": {"kind": "adamw_8bit"}},
    {"optimizer": {"kind": "sgd", "momentum": 0.9}},
    {"optimizer": {"kind": "newton_cg", "hessian": "exact"}, "schedule": {"kind": "constant"}},
    {"optimizer": {"average": {"kind": "ema"}}},
    {"optimizer": {"lookahead": {}}},
    {"optimizer": {"lr_for_samples": 8}},
    {"optimizer": {"clip_norm": 1.0}},
    {"optimizer": {"groups": {"*.bias": {"kind": "sgd", "lr": 0.1}}}},
    {"optimizer": {"kind": "sgd", "transforms": [{"kind": "centralise"}]}},
    {"schedule": {"kind": "linear"}},
    {"sparsity": {"kind": "set", "density": 0.5, "packed": True, "packed_state": True}},
    {"memory": {"zero": 2}},
    {"memory": {"zero": 3}, "layout": {"shard": 2}},
    {"memory": {"zero": 2, "offload": {"optimizer": "host"}}, "layout": {"shard": 2}},
    {"memory": {"recompute": "full"}},
    {"memory": {"recompute": "budget", "recompute_budget": "1 GiB"}},
    {"memory": {"recompute_budget": "1 GiB"}},
    {"memory": {"loss_chunks": 2}},
    {"memory": {"fit_microbatch": True}},
    {"memory": {"fit_microbatch": True, "budget": "1 GiB"}},
    {"memory": {"budget": "1 GiB", "simulate_device": "1 GiB"}},
    {"memory": {"simulate_device": "1 GiB"}},
    {"memory": {"offload": {"optimizer": "host", "parameters": "host"}}},
    {"memory": {"offload": {"parameters": "host"}}},
    {"memory": {"offload": {"optimizer": "disk", "parameters": "disk", "delay_update_after": 2}}},
    {"memory": {"offload": {"delay_update_after": 2, "activations": "host"}}},
    {"memory": {"offload": {"optimizer": "host", "delay_update_after": 2}}},
    {"batch": {"division": "by_speed"}},
    {"batch": {"micro_samples": 1}},
    {"batch": {"micro_samples": 2}},
    {"model": {**GPT, "tied": True}, "layout": {"pipeline": 2}},
    {"batch": {"micro_samples": 1}, "pipeline": {"microbatches": 3}},
    {"batch": {"epoch_end": "short"}},
    {"batch": {"denominator": "samples"}},
    {"batch": {"schedule": [{"samples": 4, "until": 2}]}},
    {"batch": {"adaptive": {"first": 4}}},
    {"observe": {"noise_every_steps": 5}},
    {"observe": {"layer_norms_every_steps": 5}},
    {"loss": {"kind": "squared_error"}},
    {"distillation": {"teacher": "runs/a"}},
    *({"adapter": {"kind": kind}} for kind in ("lora", "prompt")),
    {"quantisation": {}},
    *({"sparsity": {"kind": kind, "density": 0.5}} for kind in ("set", "grasp", "top_kast")),
    {"sparsity": {"kind": "magnitude", "pattern": "2:4", "products": "semi_structured"}},
    {"freeze": {"layers": ["*"]}},
    {"freeze": {"layers": ["*"], "cache": "1 GiB"}},
    {"freeze": {"progress": {"criterion": "activations"}}},
    {"model": MOE},
    {"model": {**MOE, "capacity_factor": 1.5}},
    *({"model": {**GPT, **keys}} for keys in ({"tied": True}, {"dropout": 0.1}, {"scaling": "mup", "base_width": 16})),
    {"model": {**OWN, "batch_norm": "synchronised"}},
    {"model": {"kind": "convnet", "norm": "batch", "group_samples": 2}},
    {"model": {"kind": "transformers", "config": {"model_type": "gpt2"}, "lora_rank": 4, "lora_dropout": 0.1}},
    {"data": {"kind": "stream", "path": "a", "inputs": "x", "targets": "y"}},
    {"data": {"kind": "jsonl", "files": ["a"], "text": "t", "packing": "documents"}},
    {
        "data": {
            "kind": "jsonl",
            "files": ["a"],
            "inputs": "x",
            "targets": "y",
            "loss_weights": "w",
            "augment": ["flip"],
        }
    },
    *({"federated": {"kind": kind}} for kind in ("fedavg", "fedbuff", "heterofl", "median", "scaffold", "clustered")),
    {"federated": {"kind": "fedavg", "sampling": "importance", "largest_norm": 1.0}},
    {"federated": {"kind": "fedavg", "ditto": 0.1}},
    {"federated": {"kind": "fedbuff", "sampling": "by_size"}},
    {"secure_aggregation": {}},
    *({"privacy": {"unit": unit}} for unit in ("client", "sample")),
    {"privacy": {"unit": "client", "adaptive": True}},
)
"""Parts of run files, each of which says something that a rule is about."""


def merged(one: dict[str, dict[str, Any]], other: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Both; where both choose a kind of one table, the second does."""
    replaced = {name for name in one if "kind" in other.get(name, {}) and name in ("model", "data", "sync", "sparsity")}
    return {
        name: {**({} if name in replaced else one.get(name, {})), **other.get(name, {})} for name in {**one, **other}
    }


def of_both(table: Against, rule: Rule, alone: list[tuple[dict[str, Any], RunFile]]) -> str | None:
    """A sentence of `rule`, on the first two parts that say subject and fact; None where no two do."""
    subjects = [part for part, run_file in alone if table.subject(run_file) is not None]
    facts = [part for part, run_file in alone if rule.found(run_file) is not None]
    parts = [part for part, _ in alone]
    for one, other in itertools.chain(itertools.product(subjects, facts), itertools.product(subjects, parts)):
        for pair in ((one, other), (other, one)):
            with contextlib.suppress(msgspec.ValidationError, LayoutError):
                run_file = run_file_of(Path(), **merged(*pair))
                if table.subject(run_file) is not None and rule.found(run_file) is not None:
                    return dataclasses.replace(table, rules=(rule,))(run_file)
    return None


def test_every_rule_can_be_said() -> None:
    """There is a run file that breaks it, and the sentence names two things, a reason or a repair, and no value of
    Python's.
    """
    alone = [(part, run_file_of(Path(), **part)) for part in FRAGMENTS]
    unsaid, wrong = [], []
    for table in tables_of(refusal):
        for rule in table.rules:
            said = of_both(table, rule, alone)
            if said is None:
                unsaid.append((table.subject.name, rule.found.name))
            elif not re.fullmatch(r"\S.* with .+: \S.*[^;:. ]", said) or re.search(r"\b(None|True|False)\b|[{}]", said):
                wrong.append(said)
    assert not unsaid
    assert not wrong
