"""The dashboard and the alerts speak of metrics that exist, and every alert has a runbook page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from pd_router.metrics import Metrics
from pd_router.registry import Registry
from support.promql import metrics_and_labels

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "ops" / "dashboards" / "pd-relay.json"
ALERTS = ROOT / "ops" / "alerts" / "pd-relay.yaml"
RUNBOOKS = ROOT / "docs" / "runbooks"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
LABELS = {
    "model_name", "engine", "worker", "role", "state", "end", "code", "kind", "reason", "transport", "finished_reason",
    "le", "job", "stage", "part", "layer", "expert",
}
HEADINGS = ["What it means", "What clients see", "Look at", "Do"]


@pytest.fixture(scope="module")
def series() -> set[str]:
    """Every name that a router's exposition can have."""
    registry = Registry(
        open_channel=lambda address: pytest.fail(address), lease_ms=1, silence_ms=1, max_index_entries=1,
        can_fetch=False, may_degrade=False,
    )
    text = Metrics(registry, "model", lambda: 0, lambda: 0).text().decode()
    return {
        family.name + suffix for family in text_string_to_metric_families(text) for suffix in SUFFIXES[family.type]
    }


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def check(expression: str, series: set[str], *, also: frozenset[str] = frozenset()) -> None:
    names, labels = metrics_and_labels(expression)
    assert names, f"{expression}: no metric"
    assert names <= series | also, f"{expression}: there is no {sorted(names - series - also)}"
    assert labels <= LABELS, f"{expression}: no metric has the labels {sorted(labels - LABELS)}"


def test_the_dashboard_shows_what_there_is(series: set[str]) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len(panels) > 20
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    for panel in panels:
        assert panel["title"] and panel["description"] and panel["datasource"]["uid"] == "${datasource}"
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= 24, panel["title"]
        for target in panel["targets"]:
            check(target["expr"], series)
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            check(variable["query"]["query"].replace(", model_name", ""), series)


def test_what_workers_and_requests_tell_is_on_the_dashboard(series: set[str]) -> None:
    """A metric of our own that nobody would see is not worth its cost."""
    shown = DASHBOARD.read_text() + ALERTS.read_text()
    own = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in series if name.startswith("pdrelay_")}
    unseen = {name for name in own if name not in shown and f"{name}_total" not in series}
    assert unseen <= {"pdrelay_blocks", "pdrelay_free_blocks", "pdrelay_host_cache_bytes", "pdrelay_waiting_sequences"}


def test_alerts_speak_of_what_there_is_and_have_their_page(series: set[str]) -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names)) > 10
    for rule in rules():
        check(rule["expr"], series, also=frozenset({"up"}))
        assert re.fullmatch(r"\d+[sm]", rule["for"]), rule
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule
        page = (ROOT / rule["annotations"]["runbook"]).read_text()
        assert page.startswith(f"# {rule['alert']}\n"), rule["alert"]
        assert re.findall(r"^## (.+)$", page, re.MULTILINE) == HEADINGS, rule["alert"]
        assert "".join(rule["expr"].split()) in "".join(page.split()), rule["alert"]
        assert rule["annotations"]["summary"] in page


def test_every_page_has_its_alert() -> None:
    pages = {path.name for path in RUNBOOKS.glob("*.md")} - {"README.md"}
    assert pages == {Path(rule["annotations"]["runbook"]).name for rule in rules()}
    overview = (RUNBOOKS / "README.md").read_text()
    assert all(f"({page})" in overview for page in pages)


def test_a_metric_that_does_not_exist_is_found(series: set[str]) -> None:
    with pytest.raises(AssertionError, match="there is no"):
        check("rate(pdrelay_requests[5m])", series)
    with pytest.raises(AssertionError, match="no metric has the labels"):
        check('sum by (wroker) (pdrelay_workers{role="x"})', series)
