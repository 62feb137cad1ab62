"""Writes everything here that follows from something else: `python -m deploy.monitoring.generate`.

grafana/*.json          the dashboards, from content.py
consoles/gspo.html      the same panels as one page that Prometheus itself serves, from content.py and page.html
prometheusrule.yaml     the rules for the Prometheus operator, from rules/*.yaml

An alert's runbook_url is a path in this repository. With `--docs https://git.example.com/gspo/blob/main/`, where people who
get the alerts can read the repository, prometheusrule.yaml has whole addresses.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any, Final

import yaml

from deploy.monitoring.content import DASHBOARDS
from deploy.monitoring.grafana import as_json

HERE: Final = Path(__file__).parent
RULES: Final = HERE / "rules"
SELECTED: Final = {"release": "kube-prometheus-stack"}
"""What kube-prometheus-stack selects rules by: the name of its Helm release."""
PLACE: Final = "/*DASHBOARDS*/[]"
HEADER: Final = (
    "# Generated from deploy/monitoring/rules by `python -m deploy.monitoring.generate`; change the rules there.\n"
)


def generated(docs: str = "") -> dict[Path, str]:
    """Each file's text, by its path below this directory. ``docs``: what a runbook's path is appended to."""
    files = {Path("grafana") / f"{page.uid}.json": as_json(page) for page in DASHBOARDS}
    files[Path("consoles/gspo.html")] = console()
    files[Path("prometheusrule.yaml")] = prometheus_rule(docs)
    return files


def console() -> str:
    """The local page. Prometheus reads it as a Go template, in which two braces begin an action: none may be left."""
    pages = json.dumps([dataclasses.asdict(page) for page in DASHBOARDS]).replace("{{", "\\u007b\\u007b")
    return (HERE / "page.html").read_text(encoding="utf-8").replace(PLACE, pages.replace("</", "<\\/"))


def rule_groups() -> list[dict[str, Any]]:
    """All groups of the rule files, in the files' order."""
    groups: list[dict[str, Any]] = []
    for path in sorted(RULES.glob("*.yaml")):
        groups += yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    return groups


def prometheus_rule(docs: str = "") -> str:
    """The rules as the Prometheus operator takes them: its kind wraps the groups, which kustomize cannot do."""
    groups = rule_groups()
    for rule in (rule for group in groups for rule in group["rules"] if "annotations" in rule):
        rule["annotations"]["runbook_url"] = docs + rule["annotations"]["runbook_url"]
    wrapped = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "gspo", "labels": {"app.kubernetes.io/name": "gspo", **SELECTED}},
        "spec": {"groups": groups},
    }
    return HEADER + yaml.safe_dump(wrapped, sort_keys=False, width=120)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.monitoring.generate")
    parser.add_argument(
        "--docs", default="", metavar="URL", help="where people read this repository: runbooks get whole URLs"
    )
    for path, text in generated(parser.parse_args().docs).items():
        target = HERE / path
        target.parent.mkdir(exist_ok=True)
        target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
