"""Low-rank adapters (LoRA, arXiv:2106.09685) by peft: y = W x + (lora_alpha / rank) B A x; A and B are trained.

The layers W stay frozen: they get no gradient, no optimizer state, and nothing of them is sent.
"""

from __future__ import annotations

from typing import Any

from shoal.errors import ConfigError, MissingExtra
from shoal.models.huggingface.config import TransformersConfig


def add_adapters(model: Any, table: TransformersConfig) -> None:
    """Puts adapters on the layers `lora_targets` of a transformers model, in place, and freezes everything else.

    A is drawn from PyTorch's generator, B is 0. Raises `MissingExtra` without peft, and `ConfigError` for targets that
    no layer has.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise MissingExtra("peft", extra="huggingface", purpose="model.lora_rank") from error
    rank = table.lora_rank
    assert rank is not None
    config = LoraConfig(
        r=rank,
        lora_alpha=table.lora_alpha or 2 * rank,  # type: ignore[arg-type]
        target_modules=table.lora_targets,
        lora_dropout=table.lora_dropout,
    )
    try:
        model.add_adapter(config)
    except ValueError as error:
        layers = sorted(
            {name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "weight")}
        )
        raise ConfigError(
            f"model.lora_targets = {table.lora_targets}: peft finds no layer to put adapters on "
            f"({' '.join(str(error).split())}); {type(model).__name__} has layers named {', '.join(layers)}"
        ) from None
