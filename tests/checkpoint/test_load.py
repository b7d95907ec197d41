"""Loading: any layout from any other, damage named and passed over, another model refused."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.commit import checkpoints, newest_verified, read_manifest
from shoal.checkpoint.load import read_all, read_into
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.objects import Places
from shoal.errors import CorruptCheckpoint, UsageError
from shoal.state import Target
from tests.checkpoint.states import light, same, save, saver_for, state_of


def saved(directory: Path, *steps: int) -> Manifest:
    """Checkpoints of `steps`; the manifest of the last."""
    saver = saver_for(directory, keep=9)
    for step in steps:
        assert save(saver, step).committed
    return read_manifest(checkpoints(directory)[0])


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@light
@given(st.data(), shapes, st.integers(40, 300))
def test_any_box_of_a_tensor_can_be_loaded(tmp_path_factory, data, shape, object_bytes):
    """Saved whole, loaded in any box, into memory that is not contiguous too: the same elements as the slice."""
    directory = tmp_path_factory.mktemp("boxes")
    whole = torch.arange(prod(shape), dtype=torch.int32).view(shape)
    save(saver_for(directory, object_bytes=object_bytes), 1, {"model/w": whole})
    offset = tuple(data.draw(st.integers(0, size)) for size in shape)
    part = tuple(data.draw(st.integers(0, size - at)) for size, at in zip(shape, offset, strict=True))
    into = torch.full(part[::-1], -1, dtype=torch.int32).permute(tuple(reversed(range(len(part)))))
    read_into(read_manifest(checkpoints(directory)[0]), directory, {"model/w": Target(into, shape, offset)})
    index = tuple(slice(at, at + size) for at, size in zip(offset, part, strict=True))
    assert torch.equal(into, whole[index])


def test_tensors_are_filled_in_place(tmp_path):
    """The very tensors that were given hold the values, parameters that require gradients included."""
    manifest = saved(tmp_path, 3)
    mine = {name: torch.zeros_like(tensor) for name, tensor in state_of(3).items()}
    mine["model/weight"] = torch.nn.Parameter(mine["model/weight"])
    address = mine["model/weight"].data_ptr()
    assert read_into(manifest, tmp_path, mine) == []
    assert same(mine, state_of(3))
    assert mine["model/weight"].data_ptr() == address


def test_what_was_read_does_not_change_with_the_file(tmp_path):
    """`read_all` gives memory of its own."""
    tensors = read_all(saved(tmp_path, 3), tmp_path, "model/")
    for path in Places(tmp_path).objects.iterdir():
        path.write_bytes(b"\xff" * path.stat().st_size)
    assert same(tensors, {name: tensor for name, tensor in state_of(3).items() if name.startswith("model/")})


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {
    "bit": (flipped, "does not hash to its name"),
    "end": (truncated, "bytes, not"),
    "file": (Path.unlink, "is missing"),
}


@pytest.mark.parametrize(("harm", "said"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named_and_the_checkpoint_before_is_used(tmp_path, harm, said):
    """The sentence has the step, the file and the tensors that it holds; every object counts."""
    manifest = saved(tmp_path, 1, 2)
    older = read_manifest(checkpoints(tmp_path)[1])
    for digest in set(manifest.objects) - set(older.objects):
        path = Places(tmp_path).object(digest)
        content = path.read_bytes()
        harm(path)
        found, problems = newest_verified(tmp_path)
        assert found == older
        (sentence,) = problems
        holds = [tensor.name for tensor in manifest.tensors if digest in [box.object for box in tensor.boxes]]
        assert all(word in sentence for word in ("step 2", str(path), said, holds[0]))
        path.write_bytes(content)
    assert newest_verified(tmp_path) == (manifest, [])


@pytest.mark.parametrize("content", [b"", b"{}", b"\x80\x04]", None])
def test_a_damaged_manifest_is_named_and_the_one_before_is_used(tmp_path, content):
    """Empty, foreign or missing."""
    saved(tmp_path, 1, 2)
    path = Places(tmp_path).manifest(2)
    path.write_bytes(content) if content is not None else path.unlink()
    found, problems = newest_verified(tmp_path)
    assert found is not None
    assert found.step == 1
    assert len(problems) == 1
    assert str(path) in problems[0]


def test_nothing_there_is_no_problem_and_all_damaged_is_one(tmp_path):
    """A new run starts; a run whose checkpoints are all lost says so."""
    assert newest_verified(tmp_path) == (None, [])
    for digest in saved(tmp_path, 1).objects:
        Places(tmp_path).object(digest).unlink()
    found, problems = newest_verified(tmp_path)
    assert found is None
    assert problems


def test_a_folder_under_another_name_is_not_that_step(tmp_path):
    """A checkpoint that was copied by hand to another step would set the clock of the run."""
    saved(tmp_path, 1)
    Places(tmp_path).step(1).rename(Places(tmp_path).step(5))
    with pytest.raises(CorruptCheckpoint, match="holds step 1: rename it to step-00000001"):
        read_manifest(Places(tmp_path).step(5))


def test_another_model_is_refused_before_anything_is_changed(tmp_path):
    """The message lists the first few names that are missing, too many or of other shapes, and counts the rest."""
    manifest = saved(tmp_path, 1)
    mine = {name: torch.zeros_like(tensor) for name, tensor in state_of(1).items()}
    mine |= {f"model/layer{n}": torch.zeros(2) for n in range(5)}
    mine["model/weight"] = torch.zeros(41, 70)
    del mine["model/bias"]
    with pytest.raises(UsageError, match="holds another model") as caught:
        read_into(manifest, tmp_path, mine)
    message = str(caught.value)
    assert "model/weight [70, 41] there, [41, 70] here" in message
    assert "missing in it: model/layer0, model/layer1, model/layer2 and 2 more" in message
    assert "only in it: model/bias" in message
    assert "Set run.directory to a new folder" in message
    assert not any(tensor.any() for tensor in mine.values())


def test_masks_of_other_layers_are_refused_with_the_key_that_names_them(tmp_path):
    """Where both have some, and nothing else differs."""
    weights, bits = {"model/w": torch.ones(4)}, {name: torch.ones(1, dtype=torch.uint8) for name in ("body", "head")}
    all_masks = {f"sparsity/mask/{name}": each for name, each in bits.items()}
    save(saver_for(tmp_path), 1, weights | all_masks)
    manifest = read_manifest(checkpoints(tmp_path)[0])
    fewer = weights | {"sparsity/mask/body": bits["body"]}
    with pytest.raises(UsageError, match=r"only in it: sparsity/mask/head\. They are masks .* sparsity\.layers"):
        read_into(manifest, tmp_path, fewer)
    with pytest.raises(UsageError, match=r"Set run\.directory"):
        read_into(manifest, tmp_path, fewer | {"model/other": torch.ones(4)})


def test_weights_alone_load_strictly_without_the_optimizer(tmp_path):
    """Names are compared within the families that are asked for; within them all must agree."""
    manifest = saved(tmp_path, 1)
    mine = {name: torch.zeros_like(t) for name, t in state_of(1).items() if name.startswith("model/")}
    read_into(manifest, tmp_path, mine)
    assert torch.equal(mine["model/weight"], state_of(1)["model/weight"])
    del mine["model/bias"]
    with pytest.raises(UsageError, match="only in it: model/bias"):
        read_into(manifest, tmp_path, mine)


def test_without_strict_what_is_not_there_is_told(tmp_path):
    """The names that were not filled come back, untouched; shapes must agree all the same."""
    manifest = saved(tmp_path, 1)
    mine = {"model/weight": torch.zeros(70, 41), "model/new": torch.full((2,), 5.0)}
    assert read_into(manifest, tmp_path, mine, strict=False) == ["model/new"]
    assert torch.equal(mine["model/weight"], state_of(1)["model/weight"])
    assert torch.equal(mine["model/new"], torch.full((2,), 5.0))
    with pytest.raises(UsageError, match="other shapes"):
        read_into(manifest, tmp_path, {"model/weight": torch.zeros(2)}, strict=False)


def test_another_element_type_is_cast_only_on_demand(tmp_path):
    """Silent rounding is refused; asked for, it is PyTorch's."""
    manifest = saved(tmp_path, 1)
    mine = {"model/weight": torch.zeros(70, 41, dtype=torch.float16)}
    with pytest.raises(UsageError, match="model/weight is float32, not float16"):
        read_into(manifest, tmp_path, mine, strict=False)
    read_into(manifest, tmp_path, mine, strict=False, cast=True)
    assert torch.equal(mine["model/weight"], state_of(1)["model/weight"].half())


def test_an_object_that_is_not_what_the_manifest_says_is_refused(tmp_path):
    """A well-formed object with other boxes in it never reaches a tensor."""
    manifest = saved(tmp_path, 1)
    a, b = sorted(manifest.objects, key=lambda digest: manifest.objects[digest])[:: len(manifest.objects) - 1]
    Places(tmp_path).object(a).write_bytes(Places(tmp_path).object(b).read_bytes())
    with pytest.raises(CorruptCheckpoint, match=a):
        read_all(manifest, tmp_path)
