"""Every query of every dashboard and rule asks for metrics that the processes really export. Needs no Prometheus."""

import json
import re

import pytest

from deploy.monitoring.content import DASHBOARDS
from deploy.monitoring.generate import HERE, generated
from deploy.monitoring.panels import Query
from tests.monitoring.promql import Unknown, labels_of, legend_labels, with_recorded
from tests.monitoring.vocabulary import Vocabulary, recorded, rules, vocabulary

DOCS = HERE.parents[1] / "docs" / "guide" / "monitoring.md"
ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}
QUERIES = [
    pytest.param(query, id=f"{page.uid}-{panel.title}-{query.legend}")
    for page in DASHBOARDS
    for panel in page.panels()
    for query in panel.queries
]
SEVERITIES = {"critical", "warning", "info"}


@pytest.fixture(scope="module")
def known() -> Vocabulary:
    return with_recorded(vocabulary(), recorded(rules()))


def runnable(expr: str) -> str:
    """Grafana's variables filled in."""
    return expr.replace("$namespace", ".*").replace("$__rate_interval", "1m")


@pytest.mark.parametrize("query", QUERIES)
def test_a_panel_asks_for_exported_metrics_and_its_legend_names_labels_of_the_answer(
    query: Query, known: Vocabulary
) -> None:
    labels = labels_of(runnable(query.expr), known)
    assert set(legend_labels(query.legend)) == labels


@pytest.mark.parametrize("alert", ALERTS.values(), ids=ALERTS)
def test_an_alert_asks_for_exported_metrics_and_its_text_names_labels_of_the_answer(alert: dict, known: Vocabulary) -> None:  # type: ignore[type-arg]
    labels = labels_of(alert["expr"], known)
    for text in (alert["annotations"]["summary"], alert["annotations"]["description"]):
        assert set(legend_labels(text)) <= labels, text


def test_each_alert_has_a_severity_a_summary_a_description_with_numbers_and_a_runbook() -> None:
    for name, alert in ALERTS.items():
        assert name.startswith("Gspo")
        assert alert["labels"]["severity"] in SEVERITIES
        summary, description = alert["annotations"]["summary"], alert["annotations"]["description"]
        assert "{{" in summary + description or name in ("GspoDiskFilling",), name
        assert len(summary) < 80 < len(summary) + len(description), name
        assert alert["annotations"]["runbook_url"] == f"docs/guide/monitoring.md#{name.lower()}"


def test_each_alert_has_a_section_that_says_what_it_means_what_to_look_at_and_what_to_do() -> None:
    sections = dict(re.findall(r"^### (Gspo\w+)\n(.*?)(?=^##|\Z)", DOCS.read_text(), re.MULTILINE | re.DOTALL))
    assert list(sections) == list(ALERTS), "the sections are in the order of the rules"
    for name, text in sections.items():
        for part in ("**Means:**", "**Look at:**", "**Do:**"):
            assert text.count(part) == 1, (name, part)


def test_every_bound_in_the_documentation_is_that_of_the_rule() -> None:
    lines = re.findall(r"^### (Gspo\w+)\n\n\*(\w+), ([^*]+)\*$", DOCS.read_text(), re.MULTILINE)
    found = {name: (severity, wait) for name, severity, wait in lines}
    assert found == {name: (alert["labels"]["severity"], alert.get("for", "at once")) for name, alert in ALERTS.items()}


MISTAKES = {
    "a metric that no process exports": ("gspo_broker_lag_average_versions", "no process exports gspo_broker_lag_average"),
    "a counter without its _total": ("rate(gspo_learner_wait_seconds[5m])", "no process exports gspo_learner_wait_seconds"),
    "a label that is not there": ('gspo_rollout_status{state="serving"}', "gspo_rollout_status has no label state"),
    "a label by its former name": ('gspo_learner_diagnostic{name="clip_fraction",lag="lag_0"}', "has no label lag"),
    "a value that no series has": ('gspo_rollout_status{status="quarantine"}', "no series of gspo_rollout_status"),
    "a diagnostic without its bucket": ('gspo_learner_diagnostic{name="clip_fraction",bucket=""}', "no series"),
    "a diagnostic that is not made": ('gspo_learner_diagnostic{name="clip_ratio",bucket="all"}', "no series"),
    "an aggregation by a label that is gone": ("sum by (pod) (sum by (namespace) (up))", r"has no \['pod'\]"),
    "a quantile without le": ("histogram_quantile(0.5, sum(rate(gspo_broker_commit_seconds_bucket[5m])))", "has no le"),
    "sides that never match": ("gspo_broker_leases / sum by (namespace) (gspo_broker_leases)", "nothing matches"),
    "on a label of one side": ("up > on (status) gspo_rollout_status", r"on \['status'\]"),
    "a rule of another name": ("namespace:gspo_waiting:ratio > 1", "no process exports namespace:gspo_waiting:ratio"),
}


@pytest.mark.parametrize(("expr", "reason"), MISTAKES.values(), ids=MISTAKES)
def test_a_planted_mistake_is_found(expr: str, reason: str, known: Vocabulary) -> None:
    with pytest.raises(Unknown, match=reason):
        labels_of(expr, known)


def test_an_expression_that_is_not_promql_is_found(known: Vocabulary) -> None:
    with pytest.raises(ValueError, match="expected type"):
        labels_of("rate(gspo_broker_leases)", known)


def test_generated_files_are_up_to_date() -> None:
    made = {HERE / path: text for path, text in generated().items()}
    for path, text in made.items():
        assert path.read_text() == text, f"{path} is stale: python -m deploy.monitoring.generate"
    there = {path for pattern in ("grafana/*", "consoles/*", "prometheusrule.yaml") for path in HERE.glob(pattern)}
    assert there == set(made), "a file that nothing generates"


def test_the_page_has_no_action_of_the_template_language_that_prometheus_applies_to_it() -> None:
    page = next(text for path, text in generated().items() if path.suffix == ".html")
    assert "{{" not in page
    assert page.count("\\u007b\\u007bbucket}}") > 1, "the legends are there, escaped"
    assert "</script>" in page.replace("<\\/", "")
    assert not re.findall(r"https?://", page), "nothing is fetched from elsewhere"


def test_panels_of_a_dashboard_do_not_overlap_and_have_unique_numbers() -> None:

    for path, text in generated().items():
        if path.suffix != ".json":
            continue
        panels = json.loads(text)["panels"]
        cells = [
            (x, y)
            for place in (panel["gridPos"] for panel in panels)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        assert len(cells) == len(set(cells)), path
        assert max(x for x, _ in cells) < 24
        assert len({panel["id"] for panel in panels}) == len(panels)
