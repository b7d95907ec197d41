"""Arrays are mapped, paired and never unpickled."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.data.corpora import Arrays
from shoal.errors import DataError


def saved(path: Path, array: np.ndarray) -> Path:
    np.save(path, array, allow_pickle=True)
    return path


def test_files_equal_memory(tmp_path: Path):
    """Mapped files give the samples of the arrays they were saved from, one by one and many at once."""
    inputs, targets = np.random.default_rng(0).random((5, 2, 3)), np.arange(5)
    memory = Arrays(inputs, targets)
    files = Arrays(saved(tmp_path / "i.npy", inputs), str(saved(tmp_path / "t.npy", targets)))
    assert isinstance(files.inputs, np.memmap)
    assert len(files) == len(memory) == 5
    assert np.array_equal(files[3][0], inputs[3])
    assert files[3][1] == 3
    ids = np.array([4, 0, 4])
    assert np.array_equal(files.samples_at(ids)[0], inputs[ids])
    assert memory.samples_at(ids)[1].tolist() == [4, 0, 4]


def test_bad_arrays_are_refused(tmp_path: Path):
    """Missing, empty, pickled, foreign, unequal: each has its sentence."""
    good = np.zeros(3)
    with pytest.raises(DataError, match=r"none\.npy is missing: correct the path"):
        Arrays(tmp_path / "none.npy", good)
    with pytest.raises(DataError, match="at least one sample"):
        Arrays(good, np.zeros((0, 2)))
    with pytest.raises(DataError, match="at least one sample"):
        Arrays(np.array(1.0), good)
    with pytest.raises(DataError, match=r"o\.npy is no \.npy array of numbers: write it with numpy\.save, without obj"):
        Arrays(saved(tmp_path / "o.npy", np.array([object()])), good)
    (tmp_path / "empty.npy").touch()
    with pytest.raises(DataError, match=r"no \.npy array"):
        Arrays(tmp_path / "empty.npy", good)
    np.savez(tmp_path / "z.npz", a=good)
    with pytest.raises(DataError, match="several arrays"):
        Arrays(tmp_path / "z.npz", good)
    with pytest.raises(DataError, match="3 inputs and 4 targets"):
        Arrays(good, np.zeros(4))


ODD = ["2**62", "9" * 5000, "(" * 300, "-1", "None", "1.5", "'\\ud800'", "[]", "{}", "3, 4611686018427387904", "0"]


def property_of_a_changed_file(folder: Path, data: st.DataObject) -> None:
    """An odd shape or type in the header, or changed bytes anywhere: an array no larger than the file, or refused."""
    path = folder / "a.npy"
    path.unlink(missing_ok=True)  # what was opened is mapped: the file must not change under it
    np.save(path, np.arange(12.0).reshape(3, 4))
    content = path.read_bytes()
    old = data.draw(st.sampled_from([b"3, 4", b"<f8", b"False", b"'shape'"]))
    content = content.replace(old, data.draw(st.sampled_from(ODD)).encode())
    if data.draw(st.booleans()):
        at, gone = data.draw(st.integers(0, len(content))), data.draw(st.integers(0, 9))
        content = content[:at] + data.draw(st.binary(max_size=9)) + content[at + gone :]
    path.write_bytes(content)
    try:
        found = Arrays(path, path)
    except DataError as error:
        str(error).encode()
    else:
        assert found.inputs.nbytes <= len(content)


@settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_changed_file_is_read_or_refused(tmp_path: Path, data: st.DataObject):
    """A header is Python source to numpy: whatever its parser raises, the user sees a `DataError`."""
    property_of_a_changed_file(tmp_path, data)


@pytest.mark.stress
@settings(deadline=None, max_examples=10_000, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_many_changed_files_are_read_or_refused(tmp_path: Path, data: st.DataObject):
    """The same with a hundred times the examples."""
    property_of_a_changed_file(tmp_path, data)
