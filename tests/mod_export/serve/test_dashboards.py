"""The alerts and the Grafana dashboard in deploy/: their PromQL, and its names against the metrics of a real server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from serving import PATIENCE_S, Server

DEPLOY = Path(__file__).parents[3] / "deploy"
FROM_PROMETHEUS = {"job", "instance"}
"""Labels that Prometheus adds to what it scrapes."""
GRAFANA = {"$__rate_interval": "5m"}


def rules() -> list[dict[str, Any]]:
    content = yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text(encoding="utf-8"))
    return [rule for group in content["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    content = json.loads((DEPLOY / "grafana-dashboard.json").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = content["panels"]
    return found


def expressions() -> list[str]:
    found = [rule["expr"] for rule in rules()]
    found += [target["expr"] for panel in panels() for target in panel["targets"]]
    for name, value in GRAFANA.items():
        found = [expression.replace(name, value) for expression in found]
    return found


def parts(expression: Any) -> Iterator[Any]:
    """The expression and all that it is made of."""
    yield expression
    for name in ("expr", "lhs", "rhs", "param", "vector_selector", "vs"):
        inner = getattr(expression, name, None)
        if isinstance(inner, promql_parser.Expr):
            yield from parts(inner)
    for argument in getattr(expression, "args", []):
        yield from parts(argument)


@pytest.fixture(scope="module")
def labels(server: Server) -> dict[str, set[str]]:
    """Name of a metric of a server that has had requests of each kind -> its labels."""
    with httpx2.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        body = {"prompt": "def f(", "max_tokens": 3, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert client.post("/v1/completions", json={**body, "n": 0}).status_code == 400
        server.service.metrics.reloaded("taken")
        text = client.get("/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found: dict[str, set[str]] = {"up": set()}
    for sample in samples:
        found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_asks_for_what_there_is(expression: str, labels: dict[str, set[str]]) -> None:
    parsed = promql_parser.parse(expression)
    selectors = [part for part in parts(parsed) if isinstance(part, promql_parser.VectorSelector)]
    # The parser has found every metric that a reader sees.
    names = set(re.findall(r"\b(?:mod_export_\w+|up)\b(?=[{\s\[)]|$)", expression))
    assert {selector.name for selector in selectors} == names
    assert names
    known = FROM_PROMETHEUS.union(*(labels[selector.name] for selector in selectors))
    for selector in selectors:
        asked = {matcher.name for matcher in selector.matchers.matchers}
        assert asked <= FROM_PROMETHEUS | labels[selector.name], selector.name
    grouped = {name for clause in re.findall(r"by \(([^)]*)\)", expression) for name in clause.split(", ") if name}
    assert grouped <= known


def test_every_metric_is_shown(labels: dict[str, set[str]]) -> None:
    """What is on no panel would not be found."""
    shown = " ".join(target["expr"] for panel in panels() for target in panel["targets"])
    kinds = r"_(total|bucket|count|sum|created)$"
    families = {re.sub(kinds, "", name) for name in labels if name.startswith("mod_export_")}
    # The share per scrape is what the panel computes for a time; the server's own page shows it.
    assert {name for name in families if name not in shown} == {"mod_export_site_selected_share"}


def test_alerts_say_what_is_wrong() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["alert"].startswith("ModExport")
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"]
        used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        # What an aggregation leaves out, an annotation cannot show.
        kept = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", rule["expr"])))) or FROM_PROMETHEUS
        assert used <= kept, rule["alert"]


def test_the_job_is_that_of_the_scrape_configuration() -> None:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
    config = next(document for document in documents if document["kind"] == "ConfigMap")
    (scrape,) = yaml.safe_load(config["data"]["mod-export.yaml"])["scrape_configs"]
    jobs = {job for rule in rules() for job in re.findall(r'job="([^"]*)"', rule["expr"])}
    assert jobs == {scrape["job_name"]}


def test_panels_lie_beside_each_other() -> None:
    cells = [
        (column, row)
        for place in (panel["gridPos"] for panel in panels())
        for column in range(place["x"], place["x"] + place["w"])
        for row in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(column for column, _ in cells) < 24
    identifiers = [panel["id"] for panel in panels()]
    assert len(set(identifiers)) == len(identifiers)
    assert all(panel["description"] for panel in panels())
