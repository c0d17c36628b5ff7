"""What `make install` and the Debian package put where; and the package for real: installed on a machine with systemd, its
unit started, crashed, misconfigured, stopped, the package upgraded, removed and purged."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

from pdd.version import VERSION
from tests.ops.conftest import ASK, UNIT, eventually, status
from tests.ops.machine import Machine
from tests.tree.imports import ROOT


# -- make install ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    destination = tmp_path_factory.mktemp("destination")
    install(destination)
    return destination


def install(destination: pathlib.Path) -> None:
    environment = {**os.environ, "DESTDIR": str(destination), "PREFIX": "/usr", "PYTHONPATH": str(ROOT)}
    subprocess.run([str(ROOT / "tools/install.sh"), sys.executable, "-m", "pdd"], check=True, env=environment, capture_output=True)


def test_install_puts_everything_where_its_readers_look(installed: pathlib.Path) -> None:
    files = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    assert files == {
        "etc/pdd/pdd.toml", "usr/lib/systemd/system/pdd@.service", "usr/lib/sysusers.d/pdd.conf",
        "usr/share/bash-completion/completions/pdd", "usr/share/zsh/site-functions/_pdd",
        "usr/share/fish/vendor_completions.d/pdd.fish", "usr/share/doc/pdd-node/README.md",
        *(f"usr/share/man/man{page.suffix[1:]}/{page.name}" for page in (ROOT / "man").iterdir()),
        *(f"usr/share/doc/pdd-node/examples/{path.relative_to(ROOT / 'etc')}" for path in (ROOT / "etc").rglob("*")
          if path.is_file() and path.name != "pdd.toml"),
    }  # fmt: skip
    assert {path.stat().st_mode & 0o777 for path in installed.rglob("*") if path.is_file()} == {0o644}
    for script in ("bash-completion/completions/pdd", "zsh/site-functions/_pdd", "fish/vendor_completions.d/pdd.fish"):
        assert "made by `pdd completion" in (installed / "usr/share" / script).read_text()


def test_install_leaves_settings_alone(tmp_path: pathlib.Path) -> None:
    install(tmp_path)
    settings = tmp_path / "etc/pdd/pdd.toml"
    settings.write_text("[node]\nrole = 'both'\n")
    install(tmp_path)
    assert settings.read_text() == "[node]\nrole = 'both'\n"


# -- the package's own files, without building it ----------------------------------------------------------------------
def test_the_control_file_says_what_the_package_needs() -> None:
    text = (ROOT / "tools/deb/control").read_text()
    fields = dict(re.findall(r"^([\w-]+): (.*)$", text, re.M))
    assert (fields["Package"], fields["Conflicts"]) == ("pdd-node", "pdd")
    assert "systemd-standalone-sysusers" in fields["Depends"]
    filled = set(re.findall(r"@([A-Z_]+)@", text))
    assert filled == set(re.findall(r"@([A-Z_]+)@", (ROOT / "tools/pack.sh").read_text()))


@pytest.mark.parametrize("script", ["tools/install.sh", "tools/pack.sh", *(f"tools/deb/{n}" for n in ("postinst", "prerm", "postrm"))])
def test_a_script_parses_and_stops_at_the_first_failure(script: str) -> None:
    path = ROOT / script
    text = path.read_text()
    shell = text.splitlines()[0].split("/")[-1].split()[-1]
    subprocess.run([shell, "-n", str(path)], check=True)
    assert re.search(r"^set -eu?", text, re.M)
    assert path.stat().st_mode & 0o100


def test_nothing_is_started_or_enabled_by_the_package() -> None:
    scripts = "".join((ROOT / "tools/deb" / name).read_text() for name in ("postinst", "prerm", "postrm"))
    run = "\n".join(line for line in scripts.splitlines() if not line.lstrip().startswith("echo "))
    assert re.findall(r"systemctl (enable|start|restart|preset)\b", run) == []


# -- the package on a machine ------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_package_from_installation_to_purge(host: Machine) -> None:
    # installed: nothing runs, nothing is enabled
    host.run("dpkg -i /shared/pdd-node.deb", timeout=300)
    assert host.out("pdd -V") == f"pdd {VERSION}"
    assert host.run(f"systemctl is-enabled {UNIT}", check=False).stdout.strip() == "disabled"
    assert host.show(UNIT, "ActiveState") == "inactive"
    assert host.out("id -un pdd") == "pdd"
    assert host.exists("/usr/share/man/man1/pdd.1.gz")
    assert host.exists("/usr/share/bash-completion/completions/pdd")
    assert "Conflicts" in host.out("dpkg -s pdd-node")
    host.run("dpkg --verify pdd-node")

    # wrong settings: told, exit 78, not started again
    host.run("printf '[node]\\nrole = \"bth\"\\n' > /etc/pdd/b0.toml")
    assert host.run(f"systemctl start {UNIT}", check=False).returncode != 0
    assert (host.show(UNIT, "ExecMainStatus"), host.show(UNIT, "NRestarts")) == ("78", "0")
    assert "is not a role" in host.out(f"journalctl -u {UNIT} --no-pager")

    # started: a token could be served when systemctl returns
    host.run("printf '[node]\\nrole = \"both\"\\n[model]\\npath = \"/srv/tiny\"\\n[kv]\\nnum_pages = 64\\n' > /etc/pdd/b0.toml")
    host.run("pdd config check /etc/pdd/b0.toml")
    host.run(f"systemctl reset-failed; systemctl enable --now {UNIT}")
    assert host.show(UNIT, "ActiveState") == "active"
    assert status(host)["state"] == "ready"
    assert int(host.out(ASK)) >= 1
    assert "ready" in host.show(UNIT, "StatusText")
    main = host.show(UNIT, "MainPID")
    assert host.out(f"stat -c %U /proc/{main}") == "pdd"
    assert host.out(f"grep Seccomp: /proc/{main}/status").split()[-1] == "2"
    assert host.out(f"grep CapBnd: /proc/{main}/status").split()[-1] == "0" * 16
    assert host.out("stat -c '%a' /run/pdd/b0/status.sock /run/pdd/b0/control.sock").split() == ["666", "660"]

    # reload, where the unit has one
    if host.show(UNIT, "ExecReload"):
        host.run(f"systemctl reload {UNIT}")
        assert host.show(UNIT, "MainPID") == main

    # crashed: started again, by itself, as another life of the node
    boot = status(host)["boot_id"]
    host.run(f"kill -KILL {main}")
    eventually("restart", lambda: host.show(UNIT, "NRestarts") == "1" and host.show(UNIT, "ActiveState") == "active", 60)
    assert status(host)["boot_id"] != boot
    assert int(host.out(ASK)) >= 1
    main = host.show(UNIT, "MainPID")

    # upgraded while it runs: settings stay, the node goes on and is named
    host.run("echo '# mine' >> /etc/pdd/pdd.toml")
    told = host.out("dpkg -i --force-confold /shared/pdd-node.deb")
    assert f"nodes still run version {VERSION}" in told
    assert host.show(UNIT, "MainPID") == main
    assert host.out("tail -1 /etc/pdd/pdd.toml") == "# mine"

    # stopped: drained, exit 0
    host.run(f"systemctl stop {UNIT}")
    assert (host.show(UNIT, "Result"), host.show(UNIT, "ExecMainStatus")) == ("success", "0")
    assert host.out(f"journalctl -u {UNIT} --no-pager").endswith("pdd: stopped")

    # removed while it runs: it is stopped first
    host.run(f"systemctl start {UNIT}")
    main = host.show(UNIT, "MainPID")
    host.run("dpkg -r pdd-node")
    assert not host.exists(f"/proc/{main}")
    assert not host.exists("/opt/pdd")
    assert not host.exists("/usr/bin/pdd")
    assert host.exists("/etc/pdd/pdd.toml")

    # purged: what it made is gone, what the user made is there
    host.run("dpkg -P pdd-node")
    assert not host.exists("/etc/pdd/pdd.toml")
    assert host.exists("/etc/pdd/b0.toml")
    assert host.exists("/srv/tiny/config.json")
    for place in ("/var/cache/pdd", "/run/pdd", "/var/lib/pdd", "/var/log/pdd", f"/etc/systemd/system/multi-user.target.wants/{UNIT}"):
        assert not host.exists(place), place
    assert host.run("getent passwd pdd", check=False).returncode != 0
