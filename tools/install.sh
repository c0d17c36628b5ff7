#!/usr/bin/env bash
# Installs what surrounds the program: unit, user, settings, man pages, completions, examples for proxies and monitoring.
# The program itself is a wheel, a PEX or in the Debian package; PDD is a command that runs it, to print the completions.
# Usage: tools/install.sh PDD...      Environment: DESTDIR, PREFIX, SYSCONFDIR, ZSHDIR, DOCDIR
# A settings file that is there is left alone.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || { echo "usage: tools/install.sh PDD..." >&2; exit 2; }
dest=${DESTDIR:-} prefix=${PREFIX:-/usr/local} etc=${SYSCONFDIR:-/etc}
lib=$dest$prefix/lib share=$dest$prefix/share
zsh=${ZSHDIR:-$prefix/share/zsh/site-functions} doc=${DOCDIR:-$prefix/share/doc/pdd-node}
put() { install -D -m 644 "$1" "$2"; }

put systemd/pdd@.service "$lib/systemd/system/pdd@.service"
put systemd/pdd.sysusers "$lib/sysusers.d/pdd.conf"
[ -e "$dest$etc/pdd/pdd.toml" ] || put etc/pdd.toml "$dest$etc/pdd/pdd.toml"
for page in man/*; do put "$page" "$share/man/man${page##*.}/${page##*/}"; done
script=$(mktemp)
trap 'rm -f "$script"' EXIT
for shell in bash zsh fish; do
  "$@" completion "$shell" > "$script"
  case $shell in
    bash) target=$share/bash-completion/completions/pdd ;;
    zsh) target=$dest$zsh/_pdd ;;
    fish) target=$share/fish/vendor_completions.d/pdd.fish ;;
  esac
  put "$script" "$target"
done
for file in haproxy/pdd.cfg nginx/pdd.conf prometheus/prometheus.yml prometheus/pdd.rules.yml grafana/pdd.json; do
  put "etc/$file" "$dest$doc/examples/$file"
done
put README.md "$dest$doc/README.md"
