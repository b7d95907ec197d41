"""Text from a byte-level language model: what a person looks at first."""

from __future__ import annotations

import torch

from shoal.engine.loss import call_model
from shoal.errors import ConfigError
from shoal.maths.counter import key_of, uniform
from shoal.recipes.setting import Setting

TEMPERATURE = 0.8


@torch.no_grad()
def sample_text(setting: Setting, prompt: str, count: int) -> str:
    """`count` bytes that follow `prompt`, drawn from the softmax of the logits at `TEMPERATURE`, keyed on the seed.

    Raises `ConfigError` where the model does not give logits over bytes for a sequence of bytes.
    """
    model, device = setting.model.eval(), setting.device
    tokens = torch.tensor([list(prompt.encode())], device=device)
    draws = uniform(key_of(setting.run_file.run.seed, "sample text"), torch.arange(count), dtype=torch.float64)
    for draw in draws.tolist():
        logits = call_model(model, tokens[:, -setting.run_file.batch.sequence :])
        if logits.ndim != 3 or logits.shape[-1] < 256:
            raise ConfigError(
                f"observe.sample_bytes = {count} needs a model of bytes; this one returned {tuple(logits.shape)}, "
                "not [batch, sequence, 256 or more]"
            )
        chances = torch.softmax(logits[0, -1, :256].double() / TEMPERATURE, dim=-1)
        drawn = torch.searchsorted(chances.cumsum(0), torch.tensor([draw], device=device, dtype=chances.dtype)).clamp_(
            max=255
        )
        tokens = torch.cat([tokens, drawn.view(1, 1)], dim=1)
    return bytes(tokens[0, len(prompt.encode()) :].tolist()).decode("utf-8", errors="replace")
