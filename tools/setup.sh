#!/usr/bin/env bash
# Makes .venv ready: Debian packages when missing (and allowed), wheels, the native build. Quick when nothing changed.
# Usage: tools/setup.sh VENV        Environment: TORCH (requirement to install, default below)
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: tools/setup.sh VENV}
torch=${TORCH:-torch==2.13.0}
python=${PYTHON:-python3}
say() { if [ -t 2 ]; then printf '\033[1m· %s\033[0m\n' "$*" >&2; else printf '· %s\n' "$*" >&2; fi; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

"$python" - <<'PY' || die "pdd needs Python >= 3.11; point PYTHON at one (PYTHON=/path/to/python3.11 make ...)"
import sys
sys.exit(sys.version_info < (3, 11))
PY

# -- Debian packages: what the native build needs ---------------------------------------------------------------------
missing=()
command -v g++ >/dev/null || missing+=(g++)
[ -e /usr/include/rdma/fabric.h ] || missing+=(libfabric-dev)
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
"$python" - <<'PY' || missing+=(python3-dev)
import pathlib, sys, sysconfig
sys.exit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists())
PY
if [ ${#missing[@]} -gt 0 ]; then
  sudo=""
  [ "$(id -u)" -eq 0 ] || sudo="sudo -n"
  if ! command -v apt-get >/dev/null || ! $sudo true 2>/dev/null; then
    die "please install first: ${missing[*]}   (Debian, Ubuntu: sudo apt-get install ${missing[*]})"
  fi
  say "installing Debian packages: ${missing[*]}"
  $sudo apt-get update -qq
  DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

# -- the virtual environment ------------------------------------------------------------------------------------------
[ -x "$venv/bin/python" ] || { say "making $venv"; "$python" -m venv "$venv"; }
stamp="$venv/.pdd-setup"
want=$( { echo "$torch"; cat pyproject.toml CMakeLists.txt tools/setup.sh
  find native -type f \( -name '*.cc' -o -name '*.cpp' -o -name '*.h' -o -name 'CMakeLists.txt' \) -print0 | sort -z | xargs -0 cat
  } | sha256sum | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then exit 0; fi

pip() { "$venv/bin/python" -m pip --disable-pip-version-check -q "$@" 2> >(grep -v 'is ignored: it is neither' >&2); }
say "installing build tools"
pip install "scikit-build-core>=0.11" "nanobind>=2.4" "ninja" "cmake>=3.25"
# torch first and by name, so that nothing else chooses a CUDA build of several GB
"$venv/bin/python" -c 'import torch' 2>/dev/null || { say "installing $torch (the largest part; once)"; pip install "$torch"; }
say "building the native core, installing pdd and its wheels"
pip install --no-build-isolation -e '.[engine,fabric,dev]'
echo "$want" > "$stamp"
