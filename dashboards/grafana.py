"""The dashboard in Grafana's JSON, by Grafana's own SDK, whose types are generated from Grafana's schema."""

import json
from collections.abc import Sequence
from string import ascii_uppercase

from grafana_foundation_sdk.builders import common as ui
from grafana_foundation_sdk.builders import dashboard as grafana
from grafana_foundation_sdk.builders import prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard

from dashboards.panels import Panel, Row
from dashboards.promql import PREFIX

_PANEL_HEIGHT = 8
_DATASOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
_REPLICAS = f"{PREFIX}replica_start_time_seconds"
"""Every replica has a series of this metric."""
_VARIABLES = {
    "application": "{}",
    "deployment": '{application=~"$application"}',
    "replica": '{application=~"$application",deployment=~"$deployment"}',
    "node": '{application=~"$application"}',
}
"""Labels to select series by, each with the selection of replicas that provide its values."""


def dashboard_json(rows: Sequence[Row]) -> str:
    """Returns the dashboard in the format of Grafana 11.6."""
    board = (
        grafana.Dashboard("Raylens")
        .uid("raylens")
        .tags(["raylens"])
        .version(1)
        .time("now-30m", "now")
        .refresh("10s")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .with_variable(grafana.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for label, replicas in _VARIABLES.items():
        board.with_variable(_variable(label, replicas))
    number = 0
    for row in rows:
        board.with_row(grafana.Row(row.title).id(number := number + 1))
        for panel in row.panels:
            board.with_panel(_graph(panel).id(number := number + 1).span(row.panel_width))
    return json.dumps(board.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _variable(label: str, replicas: str) -> grafana.QueryVariable:
    return (
        grafana.QueryVariable(label)
        .label(label.capitalize())
        .datasource(_DATASOURCE)
        .query(f"label_values({_REPLICAS}{replicas}, {label})")
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(dashboard.VariableOption(selected=True, text="All", value="$__all"))
    )


def _graph(panel: Panel) -> timeseries.Panel:
    graph = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.description)
        .datasource(_DATASOURCE)
        .height(_PANEL_HEIGHT)
        .unit(panel.unit)
        .min(0)
        .show_points(common.VisibilityMode.NEVER)
        .fill_opacity(60 if panel.stacked else 10)
        .legend(ui.VizLegendOptions().display_mode(common.LegendDisplayMode.LIST).show_legend(True))
        .tooltip(ui.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING))
    )
    for letter, (legend, expression) in zip(ascii_uppercase, panel.queries.items(), strict=False):
        target = prometheus.Dataquery().ref_id(letter).datasource(_DATASOURCE)
        graph.with_target(target.expr(expression).legend_format(legend))
    if panel.stacked:
        graph.stacking(ui.StackingConfig().mode(common.StackingMode.NORMAL))
    if panel.limit is not None:
        steps = [dashboard.Threshold(color="green"), dashboard.Threshold(value=panel.limit, color="red")]
        graph.thresholds(grafana.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps))
        graph.thresholds_style(ui.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED))
    return graph
