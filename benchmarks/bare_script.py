"""The peer of `benchmarks.start`: the first step of a small model under torchrun, with the second it ended."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shoal.models.build import build
from shoal.models.config import GPTConfig

LLAMA = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "use_cache": False,
}  # fmt: skip


def llama() -> nn.Module:
    """A small one of transformers, whose import is a part of the start."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**LLAMA))


def main(done: Path, model: str) -> None:
    """One step of DDP on random tokens."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    built = llama() if model == "llama" else build(GPTConfig(width=128, layers=4, heads=4))
    divided = nn.parallel.DistributedDataParallel(built)
    optimizer = torch.optim.AdamW(divided.parameters(), lr=3e-4, fused=True)
    tokens = torch.randint(0, 256, (8, 129))
    outputs = divided(tokens[:, :-1])
    logits = getattr(outputs, "logits", outputs)
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    if dist.get_rank() == 0:
        done.write_text(str(time.time()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
