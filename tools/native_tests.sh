#!/usr/bin/env bash
# Builds and runs the C++ tests, plainly or under a sanitizer; or builds and runs one of their programs.
# Usage: tools/native_tests.sh VENV [address|thread|"" [PROGRAM ARGUMENT...]]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: tools/native_tests.sh VENV [address|thread|\"\" [PROGRAM ARGUMENT...]]} sanitizer=${2:-}
shift $(($# < 2 ? $# : 2))
bin="$PWD/$venv/bin"
[ -x "$bin/cmake" ] || bin="$venv/bin"
build="build/native-tests${sanitizer:+-$sanitizer}"
"$bin/cmake" -S . -B "$build" -G Ninja -DCMAKE_MAKE_PROGRAM="$bin/ninja" -DPython_EXECUTABLE="$bin/python" \
  -DPDD_NATIVE_TESTS=ON -DPDD_SANITIZE="$sanitizer" >/dev/null
if [ $# -gt 0 ]; then
  "$bin/cmake" --build "$build" --target "$1"
  exec "$(find "$build/tests" -name "$1" -type f -perm -u+x)" "${@:2}"
fi
"$bin/cmake" --build "$build"
exec "$bin/ctest" --test-dir "$build" --output-on-failure
