"""DeepSpeed's names for the engine of `shoal.start`.

    import shoal.deepspeed as deepspeed

    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args, model=model, model_parameters=model.parameters(), training_data=data, config="ds_config.json"
    )
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

docs/migration/deepspeed.md says what becomes of every argument, call and key of the JSON file.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch.distributed as comm

from shoal.deepspeed.engine import Engine, initialize
from shoal.deepspeed.loader import RepeatingLoader
from shoal.deepspeed.ranks import know_rank
from shoal.errors import UserCodeError

__all__ = ["Engine", "RepeatingLoader", "add_config_arguments", "comm", "init_distributed", "initialize"]

ABSENT = {
    "zero": "parameters are divided when the run begins, so leave zero.Init() out; engine.full_parameters() stands for "
    "zero.GatheredParameters(...)",
    "PipelineModule": "pipelines are for `shoal train`: layout.pipeline",
    "moe": "experts are for `shoal train`: layout.expert",
    "ops": "give an optimizer of torch.optim, or its type in the JSON file",
    "checkpointing": "call torch.utils.checkpoint, or set memory.recompute",
    "init_inference": "Shoal trains; save_16bit_model writes the weights for whoever serves them",
    "OnDevice": "build the model on the host: the run brings it to the device",
    "get_accelerator": "ask engine.device, or torch.accelerator",
}
"""What DeepSpeed has and a run does not, and what to do instead."""


def __getattr__(name: str) -> Any:
    if name in ABSENT:
        raise UserCodeError(f"shoal.deepspeed has no {name}: {ABSENT[name]}")
    raise AttributeError(f"module 'shoal.deepspeed' has no attribute {name!r}")


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds `--deepspeed`, which says nothing here, `--deepspeed_config FILE`, which `initialize` reads, and
    `--local_rank`, which DeepSpeed's launcher gives.
    """
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="no effect")
    group.add_argument("--deepspeed_config", default=None, help="the JSON file of keys")
    if not any("--local_rank" in action.option_strings for action in parser._actions):
        group.add_argument("--local_rank", type=int, default=-1, help="no effect")
    return parser


def init_distributed(*args: Any, **kwargs: Any) -> None:
    """`torch.distributed.get_rank()` and `get_world_size()` answer from now on. `initialize` connects the ranks: a
    collective before it is refused.
    """
    know_rank()
