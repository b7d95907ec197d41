#!/bin/sh
# The shared-memory core under the sanitizers; slow, and not part of the tests. Any argument: the number of rounds.
set -e
here=$(cd "$(dirname "$0")" && pwd)
core="$here/../../../../src/shoal/comm/shm/core"
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
for kind in address,undefined thread; do
    sources=$(ls "$core"/*.c | grep -v /python.c)
    ${CC:-cc} -std=gnu11 -g -O1 -Wall -Wextra -DSHOAL_ONE_TARGET -fsanitize=$kind -fno-sanitize-recover=all \
        -I"$core" "$here/stress.c" $sources -o "$out/stress" -pthread
    echo "-fsanitize=$kind"
    "$out/stress" "${1:-40}"
done
