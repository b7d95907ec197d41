#!/bin/sh
# `make gpu`: on a machine with one GPU, in about four minutes, and without a network. Installs nothing: the Python that
# is named needs PyTorch with CUDA, numpy and Shoal's few pure dependencies, or wheels of those in the folder wheels/.
# Builds the C core, runs the tests that need a GPU, and writes the tables docs/benchmarks/gpu.json (speed) and gpu.md
# (each layout on tensors of the GPU).
set -eu
python=${1:-python3}
site=out/gpu/site
mkdir -p "$site"
for wheel in wheels/*.whl; do
    [ -e "$wheel" ] && "$python" -m pip install -q --no-index --no-deps --upgrade --target "$site" "$wheel"
done
if ! "$python" -c 'import importlib.metadata as m; m.version("shoal")' 2>/dev/null; then
    version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
    mkdir -p "$site/shoal-$version.dist-info"
    printf 'Metadata-Version: 2.1\nName: shoal\nVersion: %s\n' "$version" > "$site/shoal-$version.dist-info/METADATA"
fi
PYTHONPATH="$site:src:.${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
"$python" -c 'import importlib.util, sys
needed = "torch numpy msgspec typer setuptools pytest hypothesis".split()
if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
    sys.exit("make gpu: " + ", ".join(missing) + " cannot be imported: install them, or lay their wheels into wheels/")
from benchmarks.gpu import require_gpu
from shoal.errors import ShoalError
try: require_gpu()
except ShoalError as error: sys.exit(f"make gpu: {error}")'
"$python" setup.py -q build_ext --inplace
# A test or a measurement that fails takes nothing from those behind it; the last line says that one did.
failed=
"$python" -m pytest -m gpu -q --durations=0 || failed="$failed tests"
"$python" -m benchmarks.gpu --out docs/benchmarks/gpu.json || failed="$failed speed"
"$python" -m benchmarks.gpu --kernels --limit-s 30 --out docs/benchmarks/gpu.json || failed="$failed kernels"
"$python" -m benchmarks.gpu --layouts docs/benchmarks/gpu.md || failed="$failed layouts"
[ -z "$failed" ] || { echo "make gpu: failed:$failed" >&2; exit 1; }
