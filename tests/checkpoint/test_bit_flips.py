"""Every single-bit flip of every file of a checkpoint is noticed, and costs at most that checkpoint."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.commit import newest_verified, read_manifest
from shoal.checkpoint.inspect import verify
from shoal.checkpoint.load import read_all
from shoal.checkpoint.objects import Places
from shoal.errors import CorruptCheckpoint, VerificationFailed
from tests.checkpoint.states import same, saver_for
from tests.waiting import HANG_S

SAMPLE = 60
"""Bits of each file that the suite tries; the stress test tries them all."""


def run_state(step: int, global_samples: int = 48) -> dict:
    """What the engine saves beside the tensors."""
    used = step * global_samples
    return {
        "step": step,
        "samples": used,
        "tokens": used * 16,
        "skipped": 0,
        "identity": {"run.seed": 0},
        "cursor": {"committed": [[0, used]]},
        "scaler": {"dynamic": False, "scale": 1.0, "finite_in_a_row": 0},
        "sync": None,
    }


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    return {"model/w": torch.arange(6.0).view(2, 3) * step, "optimizer/step": torch.tensor(float(step))}


@pytest.fixture
def run(tmp_path) -> Path:
    """A run directory with the checkpoints of steps 10 and 20."""
    saver = saver_for(tmp_path)
    for step in (10, 20):
        saver.save(step, tensors_of(step), run_state(step), layout={"replicate": 1})
        assert all(report.committed for report in saver.wait(HANG_S))
    return tmp_path


def files_of_the_newest(directory: Path) -> list[Path]:
    """The manifest, the objects that the checkpoint of step 20 does not share, and the pointer to it."""
    places = Places(directory)
    older, newer = (read_manifest(places.step(step)).objects for step in (10, 20))
    return [places.manifest(20), *(places.object(digest) for digest in newer if digest not in older), places.latest]


def flipped(path: Path, bits: Iterator[int] | list[int]) -> Iterator[int]:
    """Flips one bit of `path` after the other, and gives its number while it is flipped."""
    whole = path.read_bytes()
    for bit in bits:
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        yield bit
    path.write_bytes(whole)


def expect_noticed(directory: Path, path: Path, bits: list[int]) -> None:
    places = Places(directory)
    assert newest_verified(directory)[1] == []
    for bit in flipped(path, bits):
        found, problems = newest_verified(directory)
        assert found is not None
        assert any(str(path) in problem for problem in problems), f"bit {bit} of {path} went unnoticed"
        assert found.step == (20 if path == places.latest else 10)
        assert same(read_all(found, directory), tensors_of(found.step))
        assert str(path) in [finding.path for finding in verify(directory)]
    assert newest_verified(directory)[1] == []


@pytest.mark.slow
def test_flips_of_every_file_are_noticed(run):
    """A start resumes from the checkpoint before; where `latest` alone is damaged, from the newest one."""
    for path in files_of_the_newest(run):
        count = 8 * path.stat().st_size
        expect_noticed(run, path, random.Random(0).sample(range(count), min(SAMPLE, count)))


@pytest.mark.stress
def test_all_flips_of_every_file_are_noticed(run):
    """The same with every bit."""
    for path in files_of_the_newest(run):
        expect_noticed(run, path, list(range(8 * path.stat().st_size)))


def test_no_flip_of_a_manifest_is_read(run):
    """Every bit: none of these contents is a manifest."""
    path = Places(run).manifest(20)
    content = path.read_bytes()
    assert manifests.decode(content, path).step == 20
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(VerificationFailed):
            manifests.decode(bytes(changed), path)


def as_format_1(content: bytes) -> bytes:
    """The file that an earlier version would have written."""
    tree = msgspec.json.decode(content)
    del tree["hash"]
    return msgspec.json.encode(tree | {"format_version": 1}, order="deterministic") + b"\n"


def test_a_manifest_of_an_earlier_version_loads_with_a_note(run):
    """It is whole, and said to be unprotected; the pointer of that version had a name alone."""
    places = Places(run)
    places.manifest(20).write_bytes(as_format_1(places.manifest(20).read_bytes()))
    places.latest.write_text("step-00000020\n")
    found, problems = newest_verified(run)
    assert found is not None
    assert (found.step, found.hash) == (20, "")
    assert same(read_all(found, run), tensors_of(20))
    (note,) = problems
    assert re.search(r"step 20 was written by an earlier version: its manifest has no hash", note)
    assert verify(run) == []


def test_a_new_manifest_cannot_pass_for_an_old_one(run):
    """Version and hash would both have to change."""
    path = Places(run).manifest(20)
    for old, new in ((b'"format_version":2', b'"format_version":1'), (b',"hash":', b',"hush":')):
        with pytest.raises(CorruptCheckpoint):
            manifests.decode(path.read_bytes().replace(old, new), path)


CONTRADICTIONS = {
    "cursor ends elsewhere": {"cursor": {"committed": [[0, 961]]}},
    "cursor begins elsewhere": {"cursor": {"committed": [[1, 960]]}},
    "cursor runs backwards": {"cursor": {"committed": [[500, 1460], [0, 0]]}},
    "intervals that touch": {"cursor": {"committed": [[0, 480], [480, 960]]}},
    "intervals that overlap": {"cursor": {"committed": [[0, 500], [460, 920]]}},
    "position that is no integer": {"cursor": {"committed": [[0, 960.0]]}},
    "negative position": {"cursor": {"committed": [[-480, 480]]}},
    "key of the cursor": {"cursor": {"bommitted": [[0, 960]]}},
    "samples": {"samples": 992},
    "step": {"step": 21},
    "tokens": {"tokens": -1},
    "skipped": {"skipped": 21},
    "no samples": {"samples": None},
}


@pytest.mark.parametrize("change", CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_a_state_that_contradicts_itself_is_passed_over(run, change):
    """Without a hash, as earlier versions wrote, counts still guard each other; `verify` and a start say so."""
    path = Places(run).manifest(20)
    tree = msgspec.json.decode(as_format_1(path.read_bytes()))
    tree["state"] |= change
    path.write_bytes(msgspec.json.encode(tree))
    found, problems = newest_verified(run)
    assert found is not None
    assert found.step == 10
    assert any(str(path) in problem and "contradicts itself" in problem for problem in problems)
    assert str(path) in [finding.path for finding in verify(run)]


def test_digits_of_an_old_cursor_that_flip_are_noticed(run):
    """All flips in the numbers of the cursor, the samples and the step: a sample is never used twice for one."""
    path = Places(run).manifest(20)
    content = as_format_1(path.read_bytes())
    manifests.decode(content, path)
    for pattern in (rb'"committed":(\[\[0,960\]\])', rb'"samples":(960)', rb'"step":(20)'):
        for match in re.finditer(pattern, content):
            for bit in range(8 * match.start(1), 8 * match.end(1)):
                changed = bytearray(content)
                changed[bit // 8] ^= 1 << bit % 8
                try:
                    state = manifests.decode(bytes(changed), path).state
                except CorruptCheckpoint:
                    continue
                assert state == manifests.decode(content, path).state  # such as 0 and -0


def test_what_the_engine_cannot_parse_is_passed_over(run):
    """`accept` has the last word; what it raises but `VerificationFailed` ends the search."""

    def refuse_20(manifest) -> None:
        if manifest.step == 20:
            raise CorruptCheckpoint("the state of step 20 cannot be parsed")

    found, problems = newest_verified(run, accept=refuse_20)
    assert found is not None
    assert (found.step, problems) == (10, ["the state of step 20 cannot be parsed"])
    with pytest.raises(ZeroDivisionError):
        newest_verified(run, accept=lambda manifest: 1 // 0)


def test_the_pointer_tells_of_what_is_gone_and_of_what_was_swapped(run):
    """A checkpoint that vanished, and an older manifest of the same step that came back."""
    places = Places(run)
    manifest, older = places.manifest(20), places.manifest(20).read_bytes()
    saver = saver_for(run)
    saver.save(20, tensors_of(7), run_state(20), layout={})
    assert saver.wait(HANG_S)[0].error is None
    assert newest_verified(run)[1] == []
    manifest.write_bytes(older)
    assert any("has the hash" in problem for problem in newest_verified(run)[1])
    places.step(20).rename(run / "elsewhere")
    found, problems = newest_verified(run)
    assert found is not None
    assert found.step == 10
    assert "names step-00000020, which is not there" in problems[0]


def test_saving_a_step_again_never_looks_like_damage(run):
    """At every point of the save, what lies on the disk is whole and agrees with `latest`: so does a kill there."""
    seen = []
    saver = saver_for(run, on_point=lambda label: seen.append((label, newest_verified(run)[1])))
    saver.save(20, tensors_of(7), run_state(20), layout={})
    assert saver.wait(HANG_S)[0].error is None
    assert "commit/rename.after" in [label for label, _ in seen]
    assert [problems for _, problems in seen if problems] == []
