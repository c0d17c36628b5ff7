"""pdd-errors(7), pdd-metrics(7) and pdd-control(7) say what the code does, in both directions."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import pytest

from pdd import errors, findings, metrics
from pdd.control import app, events, schema_events, server
from pdd.doctor.checks import CHECKS
from pdd.doctor.report import GROUPS, PEER_IDS
from pdd.engine.request import FinishReason, RequestState
from pdd.metrics import FAILURE_REASONS, FALLBACKS, OUTCOMES, PAGE_STATES, Metrics, Snapshot
from pdd.metrics_vllm import NAMES
from tests.control.fake_daemon import FakeSource
from tests.tree.imports import ROOT, modules

MAN = ROOT / "man"
PAGES = sorted(path.name for path in MAN.iterdir())


def entries(page: str, form: str) -> dict[str, tuple[str, str]]:
    """Key of each `.It` line of that form → (the rest of the line, the text below it)."""
    found: dict[str, tuple[str, str]] = {}
    for part in re.split(r"^\.It ", (MAN / page).read_text(), flags=re.M)[1:]:
        line, _, text = part.partition("\n")
        if match := re.fullmatch(form, line):
            assert match[1] not in found, f"{match[1]} is there twice"
            found[match[1]] = (match[2] or "", re.split(r"^\.(?:El|Ss|Sh)", text, flags=re.M)[0])
    return found


# -- pdd-errors(7) -----------------------------------------------------------------------------------------------------
OF_THE_CONTROL_API = {"E311": "(HTTP 403)", "E352": "(HTTP 404)", "E353": "(HTTP 405)"}  # no classes: problems only


def facts(kind: type[errors.PddError]) -> str:
    """What the page has in parentheses."""
    found = [f"exit {kind.exit_code}"] if kind.exit_code != errors.EXIT_BUG else []
    found += [f"HTTP {kind.http_status}"] if kind.http_status != 500 else []
    found += ["retry"] if kind.retryable else []
    return f"({', '.join(found)})" if found else ""


def test_pdd_errors_7_has_every_error_with_its_codes_and_no_other() -> None:
    page = {key: rest.strip() for key, (rest, _) in entries("pdd-errors.7", r"(E\d+)( .*)?").items()}
    assert page == {**{key: facts(kind) for key, kind in errors.BY_ID.items()}, **OF_THE_CONTROL_API}


def test_the_problems_without_a_class_are_all_of_them() -> None:
    source = (ROOT / "pdd/control/app.py").read_text()
    named = set(re.findall(r'"(E\d{3})"', source)) - errors.BY_ID.keys()
    assert {key: facts_ for key, facts_ in OF_THE_CONTROL_API.items() if key in named} == OF_THE_CONTROL_API
    assert named == OF_THE_CONTROL_API.keys()


def test_every_error_says_more_than_its_name() -> None:
    short = [key for key, (_, text) in entries("pdd-errors.7", r"(E\d+)( .*)?").items() if len(text.split()) < 8]
    assert short == []


def test_pdd_errors_7_has_every_finding_with_its_level_and_no_other() -> None:
    page = {key: rest.strip() for key, (rest, _) in entries("pdd-errors.7", r"([FT]\d+)( .*)?").items()}
    assert page == {key: f"({level})" for key, level in findings.KINDS.items()}


def test_pdd_errors_7_has_every_check_with_its_group_and_no_other() -> None:
    page = {key: rest.strip() for key, (rest, _) in entries("pdd-errors.7", r"(D\d+)( .*)?").items()}
    known = {check.id: f"({check.group})" for check in CHECKS} | dict.fromkeys(PEER_IDS, "(peer)")
    assert page == known
    assert len(CHECKS) == len({check.id for check in CHECKS})
    text = (MAN / "pdd.1").read_text().split("or groups:\n.Cm ")[1].split("\n")[0]
    assert set(re.findall(r"\w+", text)) == set(GROUPS)


def test_every_finding_is_told_by_code_and_the_code_tells_no_other() -> None:
    told = {each for name, source in modules().items() if name != "pdd.findings"
            for each in re.findall(r'\bfinding\(\s*"(\w+)"', source)}
    assert told == findings.KINDS.keys()


# -- pdd-metrics(7) ----------------------------------------------------------------------------------------------------
def families() -> dict[str, str]:
    """Name as it is scraped → "kind ; labels"."""
    made = Metrics(peers=["p"])
    made.read_from(lambda: Snapshot(nic_utilization={"n": 0.0}))
    found = {}
    for family in made.registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = list(dict.fromkeys(label for sample in family.samples for label in sample.labels if label != "le"))
        found[name] = " ; ".join([family.type, *([" , ".join(labels)] if labels else [])])
    return found


def test_pdd_metrics_7_has_every_metric_with_kind_and_labels_and_no_other() -> None:
    page = entries("pdd-metrics.7", r"Cm (pdd_\w+) Bq (.*)")
    assert {name: rest for name, (rest, _) in page.items()} == families()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("pdd_kv_pages", PAGE_STATES),
        ("pdd_requests_total", OUTCOMES),
        ("pdd_kv_transfer_failures_total", FAILURE_REASONS),
        ("pdd_kv_fallback_total", FALLBACKS),
        ("pdd_kv_transfer_bytes_total", metrics.DIRECTIONS),
    ],
)
def test_the_values_of_a_label_are_in_the_page(name: str, values: tuple[str, ...]) -> None:
    _, text = entries("pdd-metrics.7", r"Cm (pdd_\w+) Bq (.*)")[name]
    lines = re.findall(r"^\.(?:Pq )?Li (.*)$", text, re.M)
    assert {word for line in lines for word in re.findall(r"\w+", line)} == set(values)


def test_the_names_of_vllm_are_in_the_page() -> None:
    page = re.findall(r"^\.It Li (pdd_\w+) Ta Li (vllm:\w+)$", (MAN / "pdd-metrics.7").read_text(), re.M)
    counters = {name.removesuffix("_total") for name, rest in families().items() if rest.startswith("counter")}
    assert dict(page) == {
        ours + suffix: theirs + suffix for ours, theirs in NAMES.items() for suffix in ["_total" if ours in counters else ""]
    }


# -- pdd(1): the words of `pdd requests` -------------------------------------------------------------------------------
def test_the_states_and_reasons_of_requests_are_in_pdd_1() -> None:
    text = (MAN / "pdd.1").read_text().split("\nSTATE is\n")[1].split("\n.It ")[0]
    states = text.split("\nPEER ")[0]
    assert re.findall(r"^\.Cm (\w+)", states, re.M) == [state.value for state in RequestState]
    reasons = re.findall(r"\w+", " ".join(re.findall(r"^\.Li (.*)$", text.split("for its client,")[1], re.M)))
    assert reasons == [reason.value for reason in FinishReason]
    source = (ROOT / "pdd/commands/look.py").read_text()
    header = re.search(r'\["ID", (.*)\]', source)
    assert header is not None
    missing = [name for name in re.findall(r'"(\w+)"', header[1]) if name not in (MAN / "pdd.1").read_text()]
    assert missing == []


# -- pdd-control(7) ----------------------------------------------------------------------------------------------------
def routes(*, private: bool) -> set[str]:
    documents = dict.fromkeys(("status", "peers", "transfers", "requests", "topology"), FakeSource().status)
    documents |= {"waterfall": FakeSource().waterfall} if private else {}
    guard: Any = app.build(FakeSource(), documents, events.Bell(), private=private)
    return {
        f"{method} {re.sub(':[a-z]+', '', route.path)}"
        for route in guard._app.routes
        for method in route.methods - {"HEAD"}
    }


def test_pdd_control_7_has_every_path_of_both_sockets_and_no_other() -> None:
    page = entries("pdd-control.7", r"Cm ((?:GET|POST|DELETE) \S+)( Em control)?")
    assert set(page) == routes(private=True)
    assert {path for path, (rest, _) in page.items() if not rest} == routes(private=False)


def test_pdd_control_7_names_every_kind_of_line() -> None:
    kinds = {kind.__struct_config__.tag for kind in schema_events.EventLine.__args__}
    assert kinds <= set(entries("pdd-control.7", r"Cm (\w+)()"))


def test_the_numbers_of_pdd_control_7_are_the_codes() -> None:
    text = " ".join((MAN / "pdd-control.7").read_text().split())
    assert f"{server._MAX_CONNECTIONS} connections, {app.MAX_STREAMS} streams, ten seconds" in text
    assert (server._HEADER_SECONDS, app.STUCK_SECONDS, app.MAX_BODY) == (10.0, 600.0, 1 << 20)
    assert (events.MIN_INTERVAL, events.MAX_INTERVAL, events.HEARTBEAT_SECONDS) == (0.1, 60.0, 10.0)


# -- all of them -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_clean(page: str) -> None:
    if shutil.which("mandoc") is None:
        pytest.skip("mandoc is not installed")
    result = subprocess.run(
        ["mandoc", "-Tlint", "-Wwarning", str(MAN / page)], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize("page", PAGES)
def test_pages_refer_to_pages_that_are_there(page: str) -> None:
    named = re.findall(r"^\.Xr (pdd\S*) (\d)", (MAN / page).read_text(), re.M)
    assert {f"{name}.{section}" for name, section in named} <= set(PAGES)
    assert named, "it leads nowhere"
