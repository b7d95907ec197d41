"""The `[model]` tables."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.models.config import ConvNetConfig, GPTConfig, MLPConfig, ModelConfig, PythonModel


def test_importing_the_tables_imports_no_torch() -> None:
    """A bad key is refused in milliseconds because reading the tables does not load torch."""
    probe = "import sys; import shoal.models.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


@pytest.mark.parametrize(
    ("table", "kind"),
    [({"kind": "gpt"}, GPTConfig), ({"kind": "convnet"}, ConvNetConfig),
     ({"kind": "mlp", "inputs": 4, "outputs": 2}, MLPConfig), ({"kind": "python", "build": "a.b:c"}, PythonModel)],
)  # fmt: skip
def test_kind_picks_the_variant(table: dict[str, Any], kind: type) -> None:
    """Each `kind` converts to its own struct, with defaults, and back without loss."""
    config = msgspec.convert(table, ModelConfig)
    assert type(config) is kind
    assert msgspec.convert(msgspec.to_builtins(config), ModelConfig) == config


@given(width=st.integers(2, 300), heads=st.integers(1, 16))
def test_a_width_is_accepted_only_as_a_multiple_of_twice_the_heads(width: int, heads: int) -> None:
    """Any width that leaves a head odd or fractional is refused, and the message offers widths that are accepted."""
    if width % (2 * heads) == 0:
        assert GPTConfig(width=width, heads=heads).width == width
        return
    with pytest.raises(ValueError, match=f"width = {width} with heads = {heads}; .* nearest: ") as refusal:
        GPTConfig(width=width, heads=heads)
    for offered in str(refusal.value).rsplit("nearest: ", 1)[1].split(" or "):
        assert abs(GPTConfig(width=int(offered), heads=heads).width - width) < 2 * heads


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: GPTConfig(heads=4, kv_heads=3), "kv_heads = 3 with heads = 4; .* use one of 1, 2, 4"),
        (lambda: GPTConfig(feed_forward_width=1 << 25), "feed_forward_width = 33554432; .* lower it"),
        (lambda: ConvNetConfig(width=30), "width = 30; .* nearest: 24 or 32"),
        (lambda: MLPConfig(inputs=1, outputs=1, hidden=(8, 0)), r"hidden = \[8, 0\]; .* replace 0"),
    ],
)
def test_impossible_sizes_get_a_sentence(build: Any, sentence: str) -> None:
    """What was found, the rule and legal values stand in the message."""
    with pytest.raises(ValueError, match=sentence):
        build()


@pytest.mark.parametrize(
    "table",
    [{"kind": "gpt", "layers": 0}, {"kind": "gpt", "dropout": 1.0}, {"kind": "gpt", "kv_heads": 0},
     {"kind": "gpt", "vocab": 256}, {"kind": "convnet", "classes": 1}, {"kind": "python", "build": "no_colon"}],
)  # fmt: skip
def test_bounds_and_unknown_keys_are_refused(table: dict[str, Any]) -> None:
    """Sizes out of bounds, unknown keys and a build without a colon do not convert."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(table, ModelConfig)


def test_defaults_of_a_gpt_follow_from_its_other_sizes() -> None:
    """Absent kv_heads are all the heads; the hidden width is 4x for GELU, 8/3x rounded up to 32 for SwiGLU."""
    assert GPTConfig(heads=8, width=128).key_value_heads == 8
    assert GPTConfig(heads=8, width=128, kv_heads=2).key_value_heads == 2
    assert GPTConfig(width=128, feed_forward="gelu").hidden_width == 512
    assert GPTConfig(width=128).hidden_width == 352
    assert GPTConfig(width=96).hidden_width == 256
    assert GPTConfig(feed_forward_width=100).hidden_width == 100
