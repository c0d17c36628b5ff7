"""The wheel and the PEX files, built and used for real: slow, and they need an index."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

import pytest

from pdd.version import VERSION
from tests.cluster import Node
from tests.e2e.conftest import complete, prompt_of
from tests.ops.conftest import SETS
from tests.tree.imports import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def dist() -> pathlib.Path:
    """PDD_TEST_DIST if it is set, else built here."""
    if given := os.environ.get("PDD_TEST_DIST"):
        return pathlib.Path(given).resolve()
    done = subprocess.run([str(ROOT / "tools/pack.sh"), "pex"], capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]  # builds the wheel on its way
    return ROOT / "dist"


@pytest.fixture
def clean() -> Iterator[dict[str, str]]:
    """An environment that knows nothing of this checkout, with a cache of its own."""
    with tempfile.TemporaryDirectory(prefix="pdd-pex-") as cache:
        kept = {name: os.environ[name] for name in ("LANG", "OMP_NUM_THREADS") if name in os.environ}
        python = os.path.dirname(shutil.which("python3.11") or "/usr/bin/python3")
        yield {**kept, "PATH": f"{python}:/usr/bin:/bin", "HOME": cache, "PEX_ROOT": f"{cache}/pex"}


def test_the_wheel_is_what_auditwheel_calls_it(dist: pathlib.Path) -> None:
    [wheel] = dist.glob("pdd_node-*.whl")
    assert "manylinux" in wheel.name
    shown = subprocess.run([str(ROOT / "build/pack-venv/bin/auditwheel"), "show", str(wheel)], capture_output=True, text=True, check=True)
    text = " ".join(shown.stdout.split())
    tag = next(word for word in wheel.name.removesuffix(".whl").split("-") if word.startswith("manylinux"))
    assert f'consistent with the following platform tag: "{tag}"' in text
    for library in ("libfabric", "libcuda", "libibverbs", "libtorch", "libgomp"):
        assert library not in text, "it is to be found at run time, or not at all"


def test_the_light_file_looks_and_says_what_it_lacks(dist: pathlib.Path, clean: dict[str, str], tmp_path: pathlib.Path) -> None:
    def pdd(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(dist / "pdd-light"), *words], env=clean, capture_output=True, text=True, check=False, cwd=tmp_path)

    assert pdd("-V").stdout == f"pdd {VERSION}\n"
    assert pdd("topology", "--json").returncode in (0, 7)
    assert pdd("--run-dir", str(tmp_path), "-i", "x", "status").returncode == 3
    assert "torch" in pdd("serve", "--demo", "--role", "both", "--run-dir", str(tmp_path)).stderr
    assert pdd("serve", "--demo", "--role", "both", "--run-dir", str(tmp_path)).returncode == 78


def test_two_nodes_of_the_whole_file_answer(dist: pathlib.Path, clean: dict[str, str], tiny_model: pathlib.Path,
                                            run_dir: pathlib.Path) -> None:  # fmt: skip
    """Roles, ranks and the native core work from it, and libfabric is the one inside it."""
    prefiller = Node("p0", "prefill", tiny_model, run_dir, sets=SETS)
    decoder = Node("d0", "decode", tiny_model, run_dir, sets=SETS, peers=[prefiller.peer_address])
    try:
        for node in (prefiller, decoder):
            serve = node.argv.index("serve")
            node.argv = [str(dist / "pdd"), *node.argv[serve:]]
            node.env = {**clean, "PYTHONUNBUFFERED": "1", "PDD_FABRIC__LOCAL": "off"}
            node.start()
            node.wait_ready(300)  # the first run unpacks
        decoder.wait("its peer", lambda status: status["peers"][0]["state"] == "up", 30)
        assert complete(decoder.url, prompt_of(40), max_tokens=4).usage["completion_tokens"] >= 1
        version = decoder.control("/version")
        assert clean["PEX_ROOT"] in version["libfabric"]
        assert version["torch"]
    finally:
        for node in (prefiller, decoder):
            node.kill()
