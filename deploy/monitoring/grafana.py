"""The dashboards as Grafana reads them (schema of Grafana 11.6)."""

from typing import Final

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, SortOrder, TooltipDisplayMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef, GridPos, VariableRefresh

from deploy.monitoring.panels import Dashboard, Panel, Row, Unit

COLUMNS: Final = 24
"""Of Grafana's grid."""
HEIGHT: Final = 8
GRAFANA_UNITS: Final[dict[Unit, str]] = {
    "short": "short", "percentunit": "percentunit", "s": "s", "bytes": "bytes", "nats": "suffix: nats",
    "tokens/s": "suffix: tok/s", "/s": "cps", "versions": "short",
}  # fmt: skip
SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")


def as_json(page: Dashboard) -> str:
    """The text of a dashboard's file: the same for the same panels."""
    builder = (
        dashboard.Dashboard(page.title)
        .uid(page.uid)
        .description(page.description)
        .tags(["gspo"])
        .refresh("10s")
        .time("now-1h", "now")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("namespace")
            .label("Run")
            .datasource(SOURCE)
            .query("label_values(gspo_broker_policy_version, namespace)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .include_all(True)
            .all_value(".*")
        )
    )
    top, number = 0, 1
    for row in page.rows:
        builder.with_row(dashboard.Row(row.title).id(number).grid_pos(_place(0, top, COLUMNS, 1)))
        top = _add_panels(builder, row, top + 1, number + 1)
        number += 1 + len(row.panels)
    return JSONEncoder(sort_keys=True, indent=2).encode(builder.build()) + "\n"


def _add_panels(builder: dashboard.Dashboard, row: Row, top: int, number: int) -> int:
    """Panels side by side, at most three, numbered from ``number``; returns the line below them."""
    width = COLUMNS // min(3, len(row.panels))
    per_line = COLUMNS // width
    for index, panel in enumerate(row.panels):
        place = _place(index % per_line * width, top + index // per_line * HEIGHT, width, HEIGHT)
        builder.with_panel(_panel(panel).id(number + index).grid_pos(place))
    return top + -(-len(row.panels) // per_line) * HEIGHT


def _panel(panel: Panel) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.description)
        .datasource(SOURCE)
        .unit(GRAFANA_UNITS[panel.unit])
        .line_width(2)
        .fill_opacity(5)
        .legend(common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).show_legend(True))
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )
    if panel.top is not None:
        made = made.min(0).max(panel.top)
    for index, query in enumerate(panel.queries):
        made = made.with_target(
            prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(chr(ord("A") + index)).range()
        )
    return made


def _place(x: int, y: int, width: int, height: int) -> GridPos:
    return GridPos(x=x, y=y, w=width, h=height)
