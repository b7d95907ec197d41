"""The C forms of codecs give what the torch forms give."""

from __future__ import annotations

import math
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from shoal.codec import top_k
from shoal.codec.config import CastConfig, TopKConfig
from shoal.codec.kernels import Kernels, compiled, kernels_for, load_kernels, vectors_in
from shoal.codec.quantise import Cast, Quantised, Rounding, Scale
from shoal.codec.top_k import SAMPLE, TopK, exceeding
from shoal.errors import EnvironmentFault

FORMS: list[tuple[Scale, Rounding, int]] = [
    ("largest", "nearest", 127), ("largest", "nearest", 7), ("largest", "stochastic", 127),
    ("largest", "stochastic", 7), ("largest", "stochastic", 1),
    ("norm", "stochastic", 127), ("norm", "stochastic", 7), ("mean", "sign", 1),
]  # fmt: skip
LENGTHS = (0, 1, 7, 64, 65, 1023, 5000, 13_001)
LAST_BIT = 1e-6
"""Of a scale that is a sum: C adds in float64, torch in float32."""

NO_COMPILER = load_kernels() is None and not any(map(shutil.which, ("cc", "gcc", "clang")))
"""Kernels that are missing where there is a compiler are a fault, which the tests show."""
kernels_built = pytest.mark.skipif(NO_COMPILER, reason="Shoal was installed without a C compiler")


def numbers(numel: int, seed: int = 0) -> Tensor:
    """Of many magnitudes, subnormal ones among them; a block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * torch.logspace(-44, 30, max(numel, 1))[:numel]
    x[10:40] = 0
    return x


@kernels_built
@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("block", [8, 9, 64, 5000])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_quantised_numbers_are_those_of_torch(form: tuple[Scale, Rounding, int], block: int, numel: int) -> None:
    """The same digits in the same bytes, scales but for the last bit of sums, and the same decoded bits."""
    scale, rounding, levels = form
    codec, x = Quantised(block=block, levels=levels, scale=scale, rounding=rounding), numbers(numel)
    ours, theirs = codec.encode(x, key=-7), codec.encode_in_torch(x, -7)
    assert torch.allclose(ours[0], theirs[0], rtol=0 if scale == "largest" else LAST_BIT, atol=0)
    if scale != "norm":  # a scale that is off by a bit may move a number to its other level
        assert torch.equal(ours[1], theirs[1])
    wanted = codec.decode_in_torch(ours, numel, torch.float32)
    assert torch.equal(codec.decode(ours, numel), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("form", [form for form in FORMS if form[1] != "stochastic"], ids=str)
def test_what_is_compiled_for_a_gpu_gives_what_torch_gives(form: tuple[Scale, Rounding, int]) -> None:
    """On a CPU, for all lengths by one program: the same bytes, scales but for the last bit of sums."""
    scale, rounding, levels = form
    codec = Quantised(block=64, levels=levels, scale=scale, rounding=rounding)
    for numel in LENGTHS[2:]:
        x = numbers(numel)
        ours = compiled(Quantised.encode_in_torch)(codec, x, 0)
        theirs = codec.encode_in_torch(x, 0)
        assert torch.allclose(ours[0], theirs[0], rtol=0 if scale == "largest" else LAST_BIT, atol=0)
        assert torch.equal(ours[1], theirs[1])
        found = compiled(Quantised.decode_in_torch)(codec, theirs, numel, torch.float32)
        assert torch.equal(found, codec.decode_in_torch(theirs, numel, torch.float32))


@kernels_built
@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3", "float8_e5m2"])
def test_narrow_floats_are_those_of_torch(dtype: Any, numel: int) -> None:
    """Bit by bit, both ways, subnormal numbers included."""
    codec, x = Cast(CastConfig(dtype=dtype, block=1000)), numbers(numel, 1)
    ours, theirs = codec.encode(x), codec.encode_in_torch(x)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert torch.equal(codec.decode(ours, numel), codec.decode_in_torch(ours, numel, torch.float32))


@kernels_built
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_narrow_number_comes_back(dtype: torch.dtype) -> None:
    """All finite bit patterns, with scale 1, widen as torch widens them."""
    kernels = built()
    patterns = torch.arange(1 << (8 * dtype.itemsize))
    narrow = (patterns.to(torch.uint8) if dtype.itemsize == 1 else patterns.to(torch.uint16)).view(dtype)
    narrow = narrow[narrow.float().isfinite()]
    out = torch.empty(narrow.numel())
    kernels.widen(torch.ones(1), narrow, out, block=1 << 20)
    assert torch.equal(out, narrow.float())


@kernels_built
@pytest.mark.parametrize("numel", [n for n in LENGTHS if n])
def test_selection_is_that_of_torch(numel: int) -> None:
    """The places in order, as many as there is room for, and the number of all; NaN exceeds everything."""
    kernels, x = built(), torch.randn(numel, generator=torch.Generator().manual_seed(2))
    x[numel // 2] = torch.nan
    wanted = torch.nonzero(~(x.abs() < 1)).view(-1)
    for room in (0, 3, numel):
        places, found = kernels.select(x, 1.0, room=room)
        assert found == wanted.numel()
        assert torch.equal(places, wanted[:room])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_compiled_selection_serves_all_lengths_and_thresholds(dtype: torch.dtype) -> None:
    """What Inductor makes of it for a GPU, here on a CPU: a program for each threshold would be one for each step."""
    select = compiled(exceeding)
    for number, numel in enumerate(LENGTHS[2:]):
        x = numbers(numel).to(dtype)
        x[[0, 1, 2]] = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=dtype)
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            for least in (0.0, 1e-3, 7.5, torch.inf, torch.nan):
                bound = torch.tensor(least, dtype=dtype)
                assert torch.equal(select(x, bound), exceeding(x, bound))


def many_numbers() -> Tensor:
    """So many that a threshold is estimated."""
    return torch.randn(9 * SAMPLE, generator=torch.Generator().manual_seed(4))


@pytest.mark.slow
@pytest.mark.parametrize("selection", ["exact", "sampled"])
def test_top_k_by_the_compiled_selection_sends_the_same(
    selection: Literal["exact", "sampled"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Payload by payload, what the loop in C selects."""
    codec, x = TopK(TopKConfig(selection=selection)), many_numbers()
    wanted = codec.encode(x)
    calls = []
    monkeypatch.setattr(top_k, "kernels_for", lambda x: None)
    monkeypatch.setattr(top_k, "compiles_for", lambda x: calls.append(x) or True)
    for ours, theirs in zip(codec.encode(x), wanted, strict=True):
        assert torch.equal(ours, theirs)
    assert calls


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make gpu")
@pytest.mark.parametrize("selection", ["exact", "sampled"])
def test_top_k_on_a_gpu_sends_what_a_cpu_sends(selection: Literal["exact", "sampled"]) -> None:
    """The same magnitudes: of equal ones at the border each device takes some."""
    codec, x = TopK(TopKConfig(selection=selection)), many_numbers()
    ours, theirs = codec.encode(x.cuda()), codec.encode(x)
    assert torch.equal(ours[0].abs().cpu().sort().values, theirs[0].abs().sort().values)
    assert torch.equal(codec.decode(ours, x.numel()).count_nonzero().cpu(), theirs[0].count_nonzero())


@kernels_built
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_the_largest_magnitude_shows_what_is_not_finite(bad: float) -> None:
    """Wherever it stands; otherwise it is that of torch."""
    kernels, x = built(), torch.randn(1000)
    assert kernels.largest(x) == float(x.abs().max())
    for place in (0, 500, 999):
        broken = x.clone()
        broken[place] = bad
        assert not torch.tensor(kernels.largest(broken)).isfinite()


@kernels_built
def test_several_vectors_are_measured_and_multiplied_at_once() -> None:
    """The norm of all numbers in float64, also where squares of float32 would overflow; the product bit by bit."""
    vectors = [numbers(numel, seed=numel) for numel in LENGTHS]
    found, whole = vectors_in(vectors), torch.cat(vectors).double()
    assert found is not None
    assert built().joint_norm(found) == pytest.approx(float(torch.linalg.vector_norm(whole)), rel=1e-12)
    wanted = [vector * torch.tensor(0.3) for vector in vectors]
    built().multiply(found, 0.3)
    assert all(map(torch.equal, vectors, wanted))


@kernels_built
def test_several_vectors_are_measured_while_they_are_multiplied() -> None:
    """The norm is that of before, and both are to the bit those of two passes."""
    vectors = [numbers(numel, seed=numel) for numel in LENGTHS]
    wanted = [vector.clone() for vector in vectors]
    found, apart = vectors_in(vectors), vectors_in(wanted)
    assert found is not None
    assert apart is not None
    norm = built().joint_norm(apart)
    built().multiply(apart, 0.3)
    assert built().multiply_measured(found, 0.3) == norm
    assert all(map(torch.equal, vectors, wanted))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@kernels_built
def test_the_norm_of_several_shows_what_is_not_finite(bad: float) -> None:
    """In whichever of them."""
    vectors = [torch.ones(7), torch.ones(70), torch.ones(0)]
    vectors[1][69] = bad
    found = vectors_in(vectors)
    assert found is not None
    assert not math.isfinite(built().joint_norm(found))


def other_vectors() -> dict[str, Tensor]:
    """What no loop may reach by an address."""
    return {
        "float64": torch.zeros(3, dtype=torch.float64),
        "no numbers": torch.zeros(3, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        "with gaps": torch.zeros(6)[::2],
        "one number, repeated": torch.zeros(1).expand(1000),
        "turned": torch.zeros(3, 4).T,
        "of a class of its own": nn.Parameter(torch.zeros(3)),
    }


@pytest.mark.parametrize("kind", other_vectors())
def test_vectors_that_do_not_lie_in_a_row_are_left_to_torch(kind: str) -> None:
    """Each alone, and among others."""
    other = other_vectors()[kind]
    assert vectors_in([other]) is None
    assert vectors_in([torch.zeros(2), other]) is None
    assert vectors_in([]) is None


def test_other_vectors_are_left_to_torch() -> None:
    """float64, and memory that is not a CPU's."""
    assert kernels_for(torch.zeros(3, dtype=torch.float64)) is None
    assert kernels_for(torch.zeros(3, device="meta")) is None


def built() -> Kernels:
    kernels = load_kernels()
    assert kernels is not None
    return kernels


def test_a_library_of_another_version_is_one_sentence(tmp_path: Path) -> None:
    """With what to do; and not as an attribute that is missing somewhere."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("there is no C compiler")
    source, library = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text("int shoal_nothing;\n")
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    with pytest.raises(EnvironmentFault, match=r"another version of Shoal.*build it again"):
        Kernels(library)


@kernels_built
def test_kernels_write_where_the_vector_lies() -> None:
    """Whatever device tensors are made on by default."""
    x = numbers(64)
    codecs = [
        Quantised(block=8, levels=127, scale="largest", rounding="nearest"),
        *(Cast(CastConfig(dtype=dtype)) for dtype in ("bfloat16", "float16")),
    ]
    wanted = [codec.encode(x) for codec in codecs]
    with torch.device("meta"):
        found = [codec.encode(x) for codec in codecs]
        places, _ = built().select(x, 0.0, room=3)
    assert places.tolist() == [0, 1, 2]
    for ours, theirs in zip(found, wanted, strict=True):
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(ours, theirs, strict=True))
