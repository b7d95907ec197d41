"""What a proof computes with on a GPU."""

from __future__ import annotations

import pytest
import torch

from shoal.engine.precision import whole_float32
from shoal.verification import verify


def precisions() -> list[str]:
    kinds = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
    return [kind.fp32_precision for kind in kinds]  # type: ignore[attr-defined]


def test_a_proof_in_float32_rounds_no_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch lets cuDNN's convolutions round theirs to 10 bits (TF32), by which layouts would differ; afterwards all
    is as it was, also where a script has asked for TF32."""
    seen = []

    def verified(*_: object, **__: object) -> None:
        seen.append(precisions())

    monkeypatch.setattr(verify, "_verify_rank", verified)
    monkeypatch.setattr(verify, "require_provable", lambda run_file: None)
    torch.set_float32_matmul_precision("high")
    try:
        before = precisions()
        verify.verify_rank(None, None, None, steps=None, exact=False)  # type: ignore[arg-type]
        assert seen == [["ieee"] * 3]
        assert precisions() == before
        assert "tf32" in before
        with pytest.raises(ValueError), whole_float32():
            raise ValueError
        assert precisions() == before
    finally:
        torch.set_float32_matmul_precision("highest")
