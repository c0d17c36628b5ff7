"""The unit of the package on a machine with systemd, beyond its plain life: looked at from inside its sandbox, hung, and run on
across an upgrade to a newer version of the package."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest

from pdd.version import VERSION
from tests.ops.conftest import ASK, UNIT, eventually, status
from tests.ops.machine import Machine
from tests.tree.imports import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NEWER = "99.0.1"
SETTINGS = """[node]
role = "both"
[model]
path = "/srv/tiny"
[kv]
num_pages = 64
[engine]
step_timeout = "4s"
"""


@pytest.fixture(scope="module")
def served(host: Machine) -> Machine:
    """The package is installed and its unit runs."""
    told = host.run("dpkg -i /shared/pdd-node.deb", timeout=300).stdout
    assert "nothing runs yet; cp /etc/pdd/pdd.toml" in told  # what to do next
    (host.shared / "b0.toml").write_text(SETTINGS)
    host.run("cp /shared/b0.toml /etc/pdd/b0.toml")
    # Shorter than the unit's minute, and a limit that a machine can have without privileges over its host.
    drop_in = "[Service]\\nWatchdogSec=6\\nRestartSec=1\\nLimitMEMLOCK=4M\\n"
    host.run(f"mkdir -p /etc/systemd/system/{UNIT}.d && printf '{drop_in}' > /etc/systemd/system/{UNIT}.d/test.conf")
    host.run(f"systemctl daemon-reload && systemctl start {UNIT}")
    assert status(host)["state"] == "ready"
    return host


def lives(host: Machine) -> int:
    """Times that systemd has started the unit again by itself."""
    return int(host.show(UNIT, "NRestarts"))


def journal(host: Machine) -> str:
    return host.out(f"journalctl -u {UNIT} --no-pager")


def test_a_check_from_inside_the_unit_sees_its_limits_and_leaves_the_node_alone(served: Machine) -> None:
    main, boot = served.show(UNIT, "MainPID"), status(served)["boot_id"]
    lost = served.run("pdd -i b0 check --under-unit", check=False)
    assert (lost.returncode, "systemctl start dbus" in lost.stderr) == (2, True), lost.stderr
    served.run("systemctl start dbus.socket")
    done = served.run("pdd -i b0 --json check --under-unit", check=False)
    assert done.returncode in (0, 7), done.stderr
    rows = {row["id"]: row for row in json.loads(done.stdout)["checks"]}
    # This shell has neither the unit's limits, of the drop-in too, nor its sandbox nor its directories.
    assert "4.19 MB" in rows["D020"]["message"], rows["D020"]
    assert "not permitted" in rows["D061"]["message"], rows["D061"]  # ProtectClock=
    assert "/var/lib/pdd/b0" in rows["D062"]["message"], rows["D062"]
    assert not [row for row in rows.values() if row["level"] == "fail"], rows
    here = {row["id"]: row["message"] for row in json.loads(served.run("pdd -i b0 --json check", check=False).stdout)["checks"]}
    assert [word in here[key] for key, word in (("D020", "4.19 MB"), ("D061", "not permitted"), ("D062", "/pdd/b0"))] == [False] * 3
    assert served.run("pdd check --under-unit", check=False).returncode == 2
    # It was another process with the same directories, and they are all still there.
    assert (served.show(UNIT, "MainPID"), status(served)["boot_id"]) == (main, boot)
    assert int(served.out(ASK)) >= 1


def test_a_rank_that_hangs_in_a_step_ends_the_node_which_is_started_again(served: Machine) -> None:
    before = lives(served)
    main = served.show(UNIT, "MainPID")
    [rank] = [str(each["pid"]) for each in status(served)["ranks"]]  # type: ignore[attr-defined]
    served.run(f"kill -STOP {rank}")
    served.run(f"{ASK} 2>/dev/null", check=False)
    eventually("restart", lambda: lives(served) == before + 1 and served.show(UNIT, "ActiveState") == "active", 60)
    assert "E751" in journal(served)
    assert not served.exists(f"/proc/{main}")
    assert not served.exists(f"/proc/{rank}")
    assert int(served.out(ASK)) >= 1


def test_a_node_that_makes_no_progress_is_aborted_by_the_watchdog_and_started_again(served: Machine) -> None:
    before = lives(served)
    main = served.show(UNIT, "MainPID")
    assert main != "0", "no node runs"
    served.run(f"kill -STOP {main}")  # its main loop and its engine; systemd's SIGABRT comes with a SIGCONT
    eventually("restart", lambda: lives(served) == before + 1 and served.show(UNIT, "ActiveState") == "active", 60)
    eventually("the stacks of all threads", lambda: "Fatal Python error: Aborted" in journal(served) and "run_forever" in journal(served), 10)
    assert not served.exists(f"/proc/{main}")
    assert status(served)["state"] == "ready"
    assert int(served.out(ASK)) >= 1


# -- an upgrade --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def newer_deb(deb: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The package of this tree with another version and another comment in its conffile. PDD_TEST_NEWER_DEB if it is set."""
    if given := os.environ.get("PDD_TEST_NEWER_DEB"):
        return pathlib.Path(given).resolve()
    tree = tmp_path_factory.mktemp("newer")
    names = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    for name in ("pyproject.toml", "pdd/version.py"):
        text = (tree / name).read_text()
        assert f'"{VERSION}"' in text
        (tree / name).write_text(text.replace(f'"{VERSION}"', f'"{NEWER}"', 1))
    (tree / "etc/pdd.toml").write_text((tree / "etc/pdd.toml").read_text() + "# of the newer version\n")
    if (ROOT / "build/wheels").is_dir():  # what pip chose for the first one
        shutil.copytree(ROOT / "build/wheels", tree / "build/wheels")
    done = subprocess.run([str(tree / "tools/pack.sh"), "deb"], env={**os.environ, "PYTHON": "/usr/bin/python3"}, capture_output=True,
                          text=True, check=False, timeout=1500)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    [built] = (tree / "dist").glob("pdd-node_*.deb")
    return built


def test_a_node_runs_on_across_an_upgrade_and_is_the_newer_one_once_restarted(served: Machine, newer_deb: pathlib.Path) -> None:
    shutil.copy(newer_deb, served.shared / "newer.deb")
    served.run("echo '# mine' >> /etc/pdd/pdd.toml")
    mine = served.out("cat /etc/pdd/pdd.toml")
    settings = served.out("cat /etc/pdd/b0.toml")
    main, boot = served.show(UNIT, "MainPID"), status(served)["boot_id"]
    told = served.run("dpkg -i --force-confold /shared/newer.deb", timeout=300).stdout
    assert f"nodes still run version {VERSION}" in told
    assert served.out("dpkg-query -W -f '${Version}' pdd-node") == NEWER
    assert served.out("pdd -V") == f"pdd {NEWER}"

    # the running node is what it was, and whatever it has not yet loaded is not missing
    assert (served.show(UNIT, "MainPID"), status(served)["boot_id"], status(served)["version"]) == (main, boot, VERSION)
    assert int(served.out(ASK)) >= 1
    assert re.search(rf"{re.escape(NEWER)}[\s\S]*{re.escape(VERSION)}", served.out("pdd -i b0 version"))
    for look in ("status", "requests", "peers", "top --once", "check --live", "bundle --out /tmp/bundle.tar.gz", "logs", "topology", "reload"):
        done = served.run(f"pdd -i b0 {look}", check=False)
        assert done.returncode in (0, 7), f"{look}: {done.returncode} {done.stderr}"
    assert "Traceback" not in journal(served).rpartition("Fatal Python error")[2].partition("started")[2]

    # settings that somebody has edited are kept, and what the newer version says is beside them
    assert served.out("cat /etc/pdd/pdd.toml") == mine
    assert served.out("tail -1 /etc/pdd/pdd.toml.dpkg-dist") == "# of the newer version"
    assert served.out("cat /etc/pdd/b0.toml") == settings

    restarted = served.run(f"systemctl restart {UNIT}", check=False)
    assert restarted.returncode == 0, journal(served)[-4000:]
    assert (status(served)["state"], status(served)["version"]) == ("ready", NEWER)
    assert int(served.out(ASK)) >= 1

    # purged in one go while it runs
    main = served.show(UNIT, "MainPID")
    served.run("dpkg -P pdd-node", timeout=200)
    assert not served.exists(f"/proc/{main}")
    for place in ("/opt/pdd", "/usr/bin/pdd", "/etc/pdd/pdd.toml", "/etc/pdd/pdd.toml.dpkg-dist", "/var/lib/pdd", "/var/cache/pdd", "/run/pdd"):
        assert not served.exists(place), place
    assert served.exists("/etc/pdd/b0.toml")
