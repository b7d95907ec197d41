"""The optimizer that a JSON file names, {"type": "AdamW", "params": {"lr": 3e-4}}.

Adam and AdamW are AdamW unless `adam_w_mode` is false, with no weight decay unless it is given; any other name is a
class of `torch.optim`, with that class's defaults. So it is in DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shoal.deepspeed.config import near
from shoal.errors import UsageError

OF_SHOAL_TRAIN = {
    "lamb": "lamb",
    "lion": "lion",
    "muon": "muon",
    "onebitadam": "one_bit_adam",
    "zerooneadam": "one_bit_adam",
    "onebitlamb": "one_bit_lamb",
}
"""Those that `shoal train` has, and PyTorch has not or not in this form."""


def optimizer_of(table: Mapping[str, Any], parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of `parameters`, tensors or groups of them. Raises `UsageError` for one that there is not."""
    name, given = table.get("type"), dict(table.get("params") or {})
    if not isinstance(name, str):
        raise UsageError("optimizer.type is missing: the name of an optimizer, such as AdamW")
    if name.lower() in OF_SHOAL_TRAIN:
        raise UsageError(
            f"optimizer.type {name}: a loop of one's own steps optimizers of PyTorch's kind; hand one over as "
            f'optimizer=..., or train by `shoal train` with optimizer.kind = "{OF_SHOAL_TRAIN[name.lower()]}"'
        )
    if given.pop("legacy_fusion", False):
        raise UsageError("optimizer.params.legacy_fusion: leave it out")
    kind, arguments = _kind_of(name, given)
    try:
        return kind(parameters, **arguments)
    except (TypeError, ValueError) as error:
        raise UsageError(f"optimizer.params: {name} refuses them: {error}") from error


def _kind_of(name: str, given: dict[str, Any]) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    if name.lower() not in ("adam", "adamw"):
        found = getattr(torch.optim, name, None)
        if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
            known = [each for each in dir(torch.optim) if each[0].isupper() and each != "Optimizer"]
            raise UsageError(f"optimizer.type: there is no {name!r} in torch.optim{near(name, known)}")
        return found, given
    of_torch, decoupled = given.pop("torch_adam", False), given.pop("adam_w_mode", True)
    kind = torch.optim.AdamW if name.lower() == "adamw" or decoupled else torch.optim.Adam
    if not given.pop("bias_correction", True):
        raise UsageError("optimizer.params.bias_correction = false: AdamW of PyTorch has it; leave it out")
    return kind, given if of_torch else {"weight_decay": 0.0, **given}
