#!/usr/bin/env bash
# Builds and runs the C++ tests, plainly or under a sanitizer.
# Usage: tools/native_tests.sh VENV [address|thread]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: tools/native_tests.sh VENV [address|thread]} sanitizer=${2:-}
bin="$PWD/$venv/bin"
[ -x "$bin/cmake" ] || bin="$venv/bin"
build="build/native-tests${sanitizer:+-$sanitizer}"
"$bin/cmake" -S . -B "$build" -G Ninja -DCMAKE_MAKE_PROGRAM="$bin/ninja" -DPython_EXECUTABLE="$bin/python" \
  -DPDD_NATIVE_TESTS=ON -DPDD_SANITIZE="$sanitizer" >/dev/null
"$bin/cmake" --build "$build"
exec "$bin/ctest" --test-dir "$build" --output-on-failure
