"""What there is to see, once: the panels that Grafana's dashboards and the local page are made of.

``$namespace`` and ``$__rate_interval`` are Grafana's words for the chosen run and for a window that holds a few scrapes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

Unit = Literal["short", "percentunit", "s", "bytes", "nats", "tokens/s", "/s", "versions"]

RUN: Final = 'namespace=~"$namespace"'
WINDOW: Final = "$__rate_interval"


@dataclass(frozen=True)
class Query:
    """One expression; ``legend`` may name labels as {{label}}."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One drawing. ``queries`` share its unit; ``top`` fixes the upper end of the axis."""

    title: str
    unit: Unit
    description: str
    queries: tuple[Query, ...]
    top: float | None = None


@dataclass(frozen=True)
class Row:
    """Panels side by side under a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    """One page."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...] = field(default=())

    def panels(self) -> Iterator[Panel]:
        for row in self.rows:
            yield from row.panels


def latest(metric: str, labels: str = "", by: str = "") -> str:
    """The largest value of a gauge in the run, by some of its labels."""
    return f"max{_by(by)} ({_selected(metric, labels)})"


def total(metric: str, labels: str = "", by: str = "") -> str:
    """A gauge, summed over the run's processes."""
    return f"sum{_by(by)} ({_selected(metric, labels)})"


def rate(metric: str, labels: str = "", by: str = "") -> str:
    """Increase a second of a counter, summed over the run."""
    return f"sum{_by(by)} (rate({_selected(metric, labels)}[{WINDOW}]))"


def share(metric: str, labels: str) -> str:
    """Of a counter's increase within the window, that of the samples with ``labels``; nothing where nothing was counted."""
    return f"{rate(metric, labels)} / ({rate(metric)} > 0)"


def quantile(q: float, metric: str, labels: str = "", by: str = "") -> str:
    """Of a histogram's observations within the window."""
    by_bucket = ", ".join(part for part in ("le", by) if part)
    return f"histogram_quantile({q}, sum by ({by_bucket}) (rate({_selected(f'{metric}_bucket', labels)}[{WINDOW}])))"


def mean(metric: str, labels: str = "") -> str:
    """Mean of a histogram's observations within the window."""
    return f"{rate(f'{metric}_sum', labels)} / {rate(f'{metric}_count', labels)}"


def diagnostic(name: str, bucket: str = "") -> str:
    """One of the last batch's diagnostics (docs/gspo.md), of the batch as a whole or of one bucket."""
    return latest("gspo_learner_diagnostic", f'name="{name}",bucket="{bucket}"')


def diagnostics(name: str, buckets: str) -> str:
    """The same of several buckets, a regular expression: one line for each."""
    return latest("gspo_learner_diagnostic", f'name="{name}",bucket=~"{buckets}"', "bucket")


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""


def _selected(metric: str, labels: str) -> str:
    return f"{metric}{{{RUN}{',' if labels else ''}{labels}}}"
