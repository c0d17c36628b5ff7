"""The dashboard, the alert rules and vLLM's names, held against what live nodes really say."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdd.metrics_vllm import NAMES
from tests.cluster import Node, free_port
from tests.e2e.conftest import complete, prompt_of
from tests.ops.conftest import eventually, program, started
from tests.tree.imports import ROOT

RULES = ROOT / "etc/prometheus/pdd.rules.yml"
DASHBOARD = ROOT / "etc/grafana/pdd.json"
Series = dict[str, list[dict[str, str]]]  # name of a sample → the labels of each


def scrape(*nodes: Node) -> Series:
    found: Series = {}
    for node in nodes:
        with urllib.request.urlopen(f"{node.url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample.labels)
    return found


def expressions(path: pathlib.Path) -> list[str]:
    if path.suffix == ".json":
        return [target["expr"] for panel in json.loads(path.read_text())["panels"] for target in panel["targets"]]
    return re.findall(r"^ +expr: (.*)$", path.read_text(), re.M)


def unknown(expression: str, live: Series) -> list[str]:
    """What of an expression no series has: names, labels in {…} and in `by (…)`, values after `=`."""
    found = []
    names = re.findall(r"\b(pdd_\w+)(?:\{([^}]*)\})?", expression)
    for name, matchers in names:
        if name not in live:
            found.append(name)
            continue
        for label, operator, value in re.findall(r'(\w+)(!?[=~]+)"([^"]*)"', matchers):
            values = {labels.get(label) for labels in live[name]}
            if label != "instance" and (values == {None} or (operator in ("=", "!=") and value not in values)):
                found.append(f"{name}{{{label}{operator}{value}}}")
    labels = {label for name, _ in names for each in live.get(name, []) for label in each} | {"instance"}
    grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
    return found + sorted(grouped - labels)


@pytest.mark.parametrize("path", [RULES, DASHBOARD], ids=lambda path: path.name)
def test_every_name_and_label_is_in_a_live_scrape(path: pathlib.Path, pair: dict[str, Node]) -> None:
    complete(pair["d0"].url, prompt_of(40))
    live = scrape(pair["p0"], pair["d0"])
    told = expressions(path)
    assert len(told) >= 10
    # without an RDMA NIC there is no line rate; pdd_metrics(7) and a unit test hold that name
    live.setdefault("pdd_nic_link_utilization_ratio", [{"nic": "n"}])
    assert {each: unknown(each, live) for each in told if unknown(each, live)} == {}


def test_a_wrong_name_label_or_value_is_seen() -> None:
    live: Series = {"pdd_a_total": [{"why": "x"}]}
    assert unknown("sum by (why) (rate(pdd_a_total{why=\"x\"}[5m]))", live) == []
    assert unknown("pdd_b_total", live) == ["pdd_b_total"]
    assert unknown('pdd_a_total{how="x"}', live) == ["pdd_a_total{how=x}"]
    assert unknown('pdd_a_total{why!="y"}', live) == ["pdd_a_total{why!=y}"]
    assert unknown("sum by (how) (pdd_a_total)", live) == ["how"]


def test_vllm_names_say_the_same_as_ours(pair: dict[str, Node]) -> None:
    complete(pair["d1"].url, prompt_of(40, seed=2))
    with urllib.request.urlopen(f"{pair['d1'].url}/metrics", timeout=10) as answer:
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    assert {name for name in families if name.startswith("vllm:")} == set(NAMES.values())
    for ours, theirs in NAMES.items():
        assert [sample.value for sample in families[theirs].samples] == [sample.value for sample in families[ours].samples]
        for sample in families[theirs].samples:
            assert sample.name.startswith("vllm:")
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("tiny", "0")
            assert "outcome" not in sample.labels
    assert next(s.value for s in families["vllm:e2e_request_latency_seconds"].samples if s.name.endswith("_count")) >= 1


@pytest.mark.slow
def test_a_real_prometheus_scrapes_and_evaluates_the_rules(pair: dict[str, Node], tmp_path: pathlib.Path) -> None:
    prometheus = program("prometheus")
    subprocess.run([program("promtool", "prometheus"), "check", "config", str(ROOT / "etc/prometheus/prometheus.yml")],
                   check=True, capture_output=True)
    targets = json.dumps([f"127.0.0.1:{node.port}" for node in pair.values()])
    config = (ROOT / "etc/prometheus/prometheus.yml").read_text().replace(": 5s", ": 1s").replace("pdd.rules.yml", str(RULES))
    config = re.sub(r"targets: .*", f"targets: {targets}", config)
    (tmp_path / "prometheus.yml").write_text(config)
    url = f"http://127.0.0.1:{free_port()}"

    def ask(path: str) -> Any:
        with urllib.request.urlopen(f"{url}/api/v1/{path}", timeout=5) as answer:
            return json.load(answer)["data"]

    def alerts() -> set[str]:
        return {alert["labels"]["alertname"] for alert in ask("alerts")["alerts"]}

    with started([prometheus, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
                  f"--web.listen-address={url.removeprefix('http://')}"], tmp_path / "log"):
        eventually("scrape of all three nodes", lambda: [t["health"] for t in ask("targets")["activeTargets"]] == ["up"] * 3)
        eventually("value", lambda: ask("query?query=pdd_kv_pool_pages")["result"])
        eventually("evaluation", lambda: all(r["health"] == "ok" for g in ask("rules")["groups"] for r in g["rules"]))
        assert len(ask("rules")["groups"][0]["rules"]) == len(expressions(RULES))
        assert alerts() == set(), "a healthy cluster alarms nobody"
        pair["p0"].kill()
        eventually("alert", lambda: {"PddNodeDown", "PddNoPrefiller", "PddPeerDown"} <= alerts())
