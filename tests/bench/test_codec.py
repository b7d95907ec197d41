"""`shoal bench codec`: what it reports."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch

from shoal.bench.codec import CODECS, _checks, _places, _row
from shoal.bench.codec_accuracy import TASKS, _result
from shoal.bench.codec_times import coding_times, keep_times
from shoal.codec.config import AutoConfig, CodecConfig, NoCodec
from shoal.codec.costs import label
from shoal.config.check import implementation_of
from shoal.planner.predict.coding import measured_time
from shoal.planning.calibration import read_calibration


def test_every_codec_is_measured() -> None:
    """A new table is in the list, or this fails."""
    assert {type(config) for config in CODECS.values()} == {*get_args(CodecConfig)} - {NoCodec, AutoConfig}


def test_rates_count_float32() -> None:
    """Whatever a codec makes of a bucket; a hook that does both at once has one rate."""
    row = _row("int8", 10**9, 2.0, encode_s=4.0, decode_s=1.0, sent_bytes=10**9, error=0.5)
    assert (row["encode_gb_s"], row["decode_gb_s"], row["both_gb_s"]) == (1.0, 4.0, 0.8)
    assert (row["encode_of_memcpy"], row["decode_of_memcpy"], row["fewer_bytes"]) == (0.5, 2.0, 4.0)
    hook = _row("hook", 10**9, 2.0, both_s=8.0, sent_bytes=2 * 10**9, error=0.0)
    assert (hook["encode_gb_s"], hook["both_gb_s"], hook["fewer_bytes"]) == (None, 0.5, 2.0)


def test_promised_figures_are_checked() -> None:
    """Half of a copy's rate for the casts and int8, three passes for the sampled threshold."""
    rows = {name: _row(name, 10**9, 2.0, encode_s=7.0, decode_s=1.0, sent_bytes=1, error=0) for name in CODECS}
    found = {str(one["name"]): one["holds"] for one in _checks(rows)}
    assert found["int8: encode of memcpy's rate"] is False
    assert found["int8: decode of memcpy's rate"] is True
    assert found["top_k_sampled: encode in copies of the bucket"] is False
    assert len(found) == 11


def test_places_fill_the_bucket() -> None:
    """One matrix after the other."""
    at = 0
    for place in _places(2):
        assert place.start == at
        at += place.shape[0] * place.shape[1]
    assert at == 2 * 12 * 512**2


def test_losses_are_paired_by_seed() -> None:
    """Against the uncompressed run of the same seed; only runs with feedback are promised anything."""
    result = _result("gpt", {("none", False): [1.0, 2.0], ("int8", True): [1.01, 2.02], ("int8", False): [1.1, 2.3]})
    rows = {(row["codec"], row["feedback"]): row for row in result["rows"]}
    assert rows["int8", True]["loss_above"] == pytest.approx(0.01)
    assert rows["int8", True]["interval"] == pytest.approx(0.0)
    assert rows["int8", False]["loss_above"] == pytest.approx(0.125)
    assert [(one["name"], one["holds"]) for one in result["checks"]] == [("gpt, int8: loss above uncompressed", True)]
    assert {*TASKS} == {"digits", "gpt", "gpt_plain_sgd"}


@pytest.mark.parametrize("name", ["int8", "power_sgd", "scale_com"])
def test_seconds_of_coding_are_kept_for_predictions(name: str, tmp_path: Path) -> None:
    """Both halves of each are measured, of linear codecs by a sum; a second measurement takes its place."""
    config, path = CODECS[name], tmp_path / "calibration.toml"
    one = implementation_of(config)(config).bound(_places(1)[:1], key=1, rank=0, ranks=1)
    gradient = torch.randn(3 * 512 * 512)
    encode_s, decode_s = coding_times(one, gradient, 1)
    assert encode_s > 0
    assert decode_s > 0
    keep_times({name: {"numbers": 5, "encode_s": encode_s, "decode_s": decode_s}}, CODECS, path)
    kept = keep_times({name: {"numbers": 5, "encode_s": 1.0, "decode_s": decode_s}}, CODECS, path)
    assert [(each.codec, each.encode_s) for each in kept.codecs] == [(label(config), 1.0)]
    assert read_calibration(path) == kept
    assert measured_time(config, kept.codecs) == kept.codecs[0]
