"""transformers' `Trainer` and Hugging Face's `Accelerator` on Shoal: a script changes one import.

    from shoal.huggingface import Trainer, TrainingArguments     # instead of: from transformers import ...
    from shoal.huggingface import Accelerator                    # instead of: from accelerate import ...

Constructors, callbacks and methods are those of the two libraries; what trains is the engine of `shoal.start`, with its
layouts, order of samples, checkpoints, resume and report. `on_shoal` does the same for a trainer that another library
made of transformers', such as TRL's. The libraries are imported when a name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shoal.errors import MissingExtra

if TYPE_CHECKING:
    from shoal.huggingface.accelerate.accelerator import Accelerator
    from shoal.huggingface.arguments import Seq2SeqTrainingArguments, TrainingArguments
    from shoal.huggingface.trainer import Seq2SeqTrainer, Trainer, on_shoal

__all__ = ["Accelerator", "Seq2SeqTrainer", "Seq2SeqTrainingArguments", "Trainer", "TrainingArguments", "on_shoal"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'shoal.huggingface' has no attribute '{name}'")
    for package in ("transformers", "accelerate"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise MissingExtra(package, extra="huggingface", purpose=f"shoal.huggingface.{name}") from error
    where = "accelerate.accelerator" if name == "Accelerator" else "trainer"
    where = "arguments" if name.endswith("Arguments") else where
    return getattr(importlib.import_module(f"shoal.huggingface.{where}"), name)
