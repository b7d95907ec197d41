"""What a proof computes with on a GPU."""

from __future__ import annotations

import pytest
import torch

from shoal.engine.precision import whole_float32
from shoal.verification import verify


def precisions() -> list[str]:
    kinds = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
    return [kind.fp32_precision for kind in kinds]  # type: ignore[attr-defined]


def as_compilers_read_them() -> tuple[str, bool]:
    """Both raise where PyTorch's older way and its newer one say different things."""
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


def test_a_proof_in_float32_rounds_no_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch lets cuDNN's convolutions round theirs to 10 bits (TF32), by which layouts would differ; afterwards all
    is as it was, also where a script has asked for TF32."""
    seen = []

    def verified(*_: object, **__: object) -> None:
        seen.append((precisions(), as_compilers_read_them()))

    monkeypatch.setattr(verify, "_verify_rank", verified)
    monkeypatch.setattr(verify, "require_provable", lambda run_file: None)
    torch.set_float32_matmul_precision("high")
    try:
        before, read = precisions(), as_compilers_read_them()
        verify.verify_rank(None, None, None, steps=None, exact=False)  # type: ignore[arg-type]
        assert seen == [(["ieee"] * 3, ("highest", False))]
        assert (precisions(), as_compilers_read_them()) == (before, read)
        assert "tf32" in before
        with pytest.raises(ValueError), whole_float32():
            raise ValueError
        assert precisions() == before
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_script_that_has_used_both_ways_gets_its_own_back() -> None:
    """Of the two, PyTorch computes by the newer one."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        before = precisions()
        with whole_float32():
            assert precisions() == ["ieee"] * 3
        assert precisions() == before
    finally:
        torch.set_float32_matmul_precision("highest")
