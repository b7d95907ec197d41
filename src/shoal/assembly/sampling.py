"""Text from a byte-level language model: what a person looks at first."""

from __future__ import annotations

import torch
from torch import nn

from shoal.assembly.objects import model_of
from shoal.assembly.run import Run
from shoal.checkpoint.load import read_into
from shoal.checkpoint.objects import Places
from shoal.checkpoint.verify import checkpoint_in, read_manifest
from shoal.engine.loss import call_model
from shoal.engine.outputs import described, prediction_in
from shoal.errors import ConfigError
from shoal.maths.counter import key_of, uniform
from shoal.runfile.run_file import run_directory

TEMPERATURE = 0.8


@torch.no_grad()
def sample_text(run: Run, model: nn.Module, prompt: str, count: int) -> str:
    """`count` bytes that follow `prompt`, drawn from the softmax of the logits at `TEMPERATURE`, keyed on the seed.

    `model` is the unsplit model.
    Raises `ConfigError` where the model does not give logits over bytes for a sequence of bytes.
    """
    model, device = model.eval(), run.device
    tokens = torch.tensor([list(prompt.encode())], device=device)
    draws = uniform(key_of(run.run_file.run.seed, "sample text"), torch.arange(count), dtype=torch.float64)
    for draw in draws.tolist():
        outputs = call_model(model, tokens[:, -run.run_file.batch.sequence :])
        logits = prediction_in(outputs)
        if logits is None or logits.ndim != 3 or logits.shape[-1] < 256:
            raise ConfigError(
                f"observe.sample_bytes = {count} needs a model of bytes; this one returned {described(outputs)}, "
                "not [batch, sequence, 256 or more]"
            )
        chances = torch.softmax(logits[0, -1, :256].double() / TEMPERATURE, dim=-1)
        drawn = torch.searchsorted(chances.cumsum(0), torch.tensor([draw], device=device, dtype=chances.dtype)).clamp_(
            max=255
        )
        tokens = torch.cat([tokens, drawn.view(1, 1)], dim=1)
    return bytes(tokens[0, len(prompt.encode()) :].tolist()).decode("utf-8", errors="replace")


def unsplit_model(run: Run) -> nn.Module:
    """The whole model on this rank alone, with the trained weights: from the last checkpoint where ranks split it.

    Raises `CorruptCheckpoint` where that is not whole.
    """
    if run.mesh.layout.replica_size == 1:
        return run.model
    model = model_of(run.run_file, run.workload.objects, device=run.device, dtype=run.workload.precision.parameters)
    directory = run_directory(run.run_file)
    manifest = read_manifest(checkpoint_in(Places(directory).step(run.state.progress.step)))
    saved = set(model.state_dict(keep_vars=True))
    tensors = dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in saved}
    read_into(manifest, directory, {f"model/{name}": tensor.detach() for name, tensor in tensors.items()})
    return model
