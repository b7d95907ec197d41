#!/bin/sh
# `make gpu`: on a machine with one GPU, in about four minutes (SECONDS_LEFT=240), and without a network. Installs
# nothing: the Python that is named needs PyTorch with CUDA, numpy and Shoal's few pure dependencies, or wheels of those in
# the folder wheels/. Builds the C core, then measures and tests, what matters most first:
#
#     the sides that say whether Shoal costs speed    docs/benchmarks/gpu.json, alone on the machine
#     each layout on tensors of the GPU               docs/benchmarks/gpu.md
#     the tests that need a GPU                       beside, too
#     the other sides, codecs and optimizers          docs/benchmarks/gpu.json
#
# Each is a process of its own that writes what it knows as it goes, and ends when its seconds are over.
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
needed = "torch numpy safetensors msgspec tomli_w typer rich blake3 matplotlib setuptools pytest hypothesis".split()
if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
    sys.exit("make gpu: " + ", ".join(missing) + " cannot be imported: install them, or lay their wheels into wheels/")
from benchmarks.gpu import require_gpu
from shoal.errors import ShoalError
try: require_gpu()
except ShoalError as error: sys.exit(f"make gpu: {error}")'
end=$(($(date +%s) + ${SECONDS_LEFT:-240}))
"$python" setup.py -q build_ext --inplace
failed=
# part NAME SECONDS COMMAND...: nothing takes anything from what is behind it. The last line says what failed. A part is
# asked to end when its seconds are over, and ended 20 s later.
part() {
    name=$1 most=$2 left=$((end - $(date +%s)))
    shift 2
    [ "$left" -lt "$most" ] && most=$left
    if [ "$most" -lt 10 ]; then
        echo "make gpu: no time is left for: $name" >&2
        failed="$failed $name"
        return
    fi
    echo "make gpu: $name, $most s"
    timeout -k 10 $((most + 20)) "$@" --limit-s "$most" || failed="$failed $name"
}
figures="$python -m benchmarks.gpu --out docs/benchmarks/gpu.json"
part speed 100 $figures --sides first
(part layouts 80 "$python" -m benchmarks.gpu --layouts docs/benchmarks/gpu.md; [ -z "$failed" ]) &
layouts=$!
# The files alone: a machine with a GPU has not all that other tests import.
# shellcheck disable=SC2046
timeout -k 10 100 "$python" -m pytest -m gpu --durations=0 $(grep -rlE 'mark\.gpu\b' --include='test_*.py' tests) || failed="$failed tests"
wait "$layouts" || failed="$failed layouts"
part "other sides" 90 $figures --sides others
part kernels 40 $figures --kernels
[ -z "$failed" ] || { echo "make gpu: failed:$failed" >&2; exit 1; }
