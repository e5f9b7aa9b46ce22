"""The view of `raylens top`: tables in the terminal's own colours, side by side on a wide terminal."""

import math
import time
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from raylens.deployments.operator import figures
from raylens.deployments.operator.snapshot import Cache, Deployment, KeyUse, Replica, Snapshot

_WIDE_COLUMNS = 110
_BAR_COLUMNS = 10
_NAME_COLUMNS = 14  # at most, of a key's name
_NEARLY_FULL = 0.9
_GOOD, _BAD = "green", "bold red"


class View:
    """Draws the latest snapshot, and how long the server has been silent."""

    def __init__(
        self, url: str, snapshot: Snapshot | None = None, *, late_s: float = math.inf, fits_screen: bool = False
    ) -> None:
        """`late_s`: longest silence before the view reports it. `fits_screen`: hide replicas below the screen."""
        self._url, self._snapshot, self._late_s, self._fits_screen = url, snapshot, late_s, fits_screen
        self._problem = ""
        self._read_at = time.monotonic()

    def show(self, snapshot: Snapshot | None) -> None:
        """`snapshot`: None while there is only one page."""
        self._snapshot = snapshot or self._snapshot
        self._problem = ""
        self._read_at = time.monotonic()

    def fail(self, problem: str) -> None:
        self._problem = problem

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts: list[RenderableType] = [self._head()]
        silent_s = time.monotonic() - self._read_at
        if self._problem or silent_s > self._late_s:
            reason = f": {self._problem}" if self._problem else ""
            parts.append(Text(f"no answer since {figures.duration(silent_s)}{reason}", style=_BAD))
        if self._snapshot is None:
            parts.append(Text("reading ..."))
        else:
            parts += _body(self._snapshot, is_wide=options.max_width >= _WIDE_COLUMNS)
            taken = len(console.render_lines(Group(*parts), options))
            room = max(0, console.height - taken - 2) if self._fits_screen else None
            parts += [Text(), _replicas(self._snapshot.replicas, room)]
        yield from parts

    def _head(self) -> Text:
        head = Text.assemble(("Raylens", "bold"), f"  {self._url}", no_wrap=True, overflow="ellipsis")
        if self._snapshot is not None:
            head.append(f"  {self._snapshot.version}  {time.strftime('%H:%M:%S')}")
            head.append(f"  last {figures.seconds(self._snapshot.seconds)}")
        return head


def _body(snapshot: Snapshot, *, is_wide: bool) -> list[RenderableType]:
    requests, latencies, budgets = _requests(snapshot), _latencies(snapshot), _budgets(snapshot)
    deployments, caches, keys = _deployments(snapshot.deployments), _caches(snapshot.caches), _keys(snapshot.keys)
    rows = [[requests, latencies], [deployments], [caches], [budgets], [keys]]
    if is_wide:
        rows = [[requests, latencies, budgets], [deployments, keys], [caches]]
    parts: list[RenderableType] = [_stages(snapshot), *_warnings(snapshot)]
    for row in rows:
        if tables := [table for table in row if table.row_count]:
            grid = Table.grid(padding=(0, 2), pad_edge=False)
            grid.add_row(*tables)
            parts += [Text(), grid]
    return parts


def _table(*columns: str) -> Table:
    """The first column has text; the others have numbers unless their titles end in a space."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        is_text = number == 0 or column.endswith(" ")
        table.add_column(column.strip(), justify="left" if is_text else "right", no_wrap=True)
    return table


def _stages(snapshot: Snapshot) -> Text:
    line = Text("stages ")
    for stage in snapshot.stages:
        name = f"{stage.model} {stage.name}".strip()
        if stage.is_ready:
            line.append(" ● ", _GOOD).append(name)
        else:
            age = "" if stage.heartbeat_age_s is None else f", silent for {figures.duration(stage.heartbeat_age_s)}"
            line.append(f" ○ {name} not ready{age}", _BAD)
    return line


def _requests(snapshot: Snapshot) -> Table:
    requests, tokens = snapshot.requests, snapshot.tokens
    table = _table("", "per s", "share", "since start")
    table.add_row("requests ended", figures.rate(requests.per_s), "", figures.count(requests.ended))
    table.add_row("  within SLO", figures.rate(requests.goodput), figures.percent(requests.goodput_ratio), "")
    errors = Text(figures.percent(requests.error_ratio), _BAD if requests.error_ratio else "")
    table.add_row("errors", figures.rate(requests.errors_per_s), errors, figures.count(requests.errors))
    table.add_row("tokens generated", figures.rate(tokens.generated_per_s), "", figures.count(tokens.generated))
    table.add_row("prompt tokens", figures.rate(tokens.prompt_per_s), "", "")
    return table


def _warnings(snapshot: Snapshot) -> Iterable[Text]:
    if snapshot.requests.rejections:
        refused = ", ".join(f"{count} for {reason}" for reason, count in snapshot.requests.rejections.items())
        yield Text(f"refused for want of room: {refused}", _BAD)
    if snapshot.preemptions or snapshot.recomputed:
        yield Text(f"since start: {snapshot.preemptions:,} preempted, {snapshot.recomputed:,} calls made again")


def _latencies(snapshot: Snapshot) -> Table:
    table = _table("latency", "p50", "p99")
    for latency in snapshot.latencies:
        table.add_row(latency.name, figures.seconds(latency.p50), figures.seconds(latency.p99))
    return table


def _deployments(deployments: list[Deployment]) -> Table:
    table = _table("deployment", "replicas", "ended", "work ", "waiting", "in work", "per s ")
    for deployment in deployments:
        replicas = Text(str(deployment.replicas), "" if deployment.replicas else _BAD)
        head: list[RenderableType] = [deployment.name, replicas, str(deployment.ended or "")]
        for work in deployment.works:
            numbers = (figures.count(work.waiting), figures.count(work.in_work))
            table.add_row(*head, work.name, *numbers, f"{figures.rate(work.per_s)} {work.unit}")
            head = ["", "", ""]
        if not deployment.works:
            table.add_row(*head)
    return table


def _caches(caches: list[Cache]) -> Table:
    table = _table("cache", "hits", "per s ", "full ", "size ", "evicted")
    for cache in caches:
        size = f"{figures.percent(cache.usage)} of the KV caches"
        if cache.num_bytes is not None:
            size = f"{figures.size(cache.num_bytes)} of {figures.size(cache.capacity_bytes)}"
        queries = (figures.percent(cache.hit_ratio), f"{figures.rate(cache.queries_per_s)} {cache.unit}")
        evictions = "" if cache.evictions is None else figures.count(cache.evictions)
        table.add_row(cache.name, *queries, _bar(cache.usage, warns=False), size, evictions)
    return table


def _replicas(replicas: list[Replica], room: int | None) -> Table:
    """Shows at most `room` lines below the titles, engines first."""
    table = _table("replica", "node ", "up", "KV cache ", "", "running", "waiting", "prompt")
    now = time.time()
    ordered = sorted(replicas, key=lambda one: one.kv_usage is None)
    shown = ordered if room is None or len(ordered) <= room else ordered[: max(0, room - 1)]
    for one in shown:
        row: list[RenderableType] = [f"{one.deployment} {one.name}", one.node, figures.duration(now - one.started_at)]
        if one.kv_usage is not None:
            row += [_bar(one.kv_usage), figures.percent(one.kv_usage)]
            row += map(figures.count, (one.running, one.waiting, one.waiting_prompt_tokens))
        table.add_row(*row)
    if len(shown) < len(ordered):
        table.add_row(f"and {len(ordered) - len(shown)} more")
    return table


def _budgets(snapshot: Snapshot) -> Table:
    table = _table("admission", "used ", "", "of")
    for budget in snapshot.budgets:
        show = figures.size if budget.resource == "bytes" else figures.short
        usage = budget.used / budget.limit if budget.limit else 0.0
        table.add_row(budget.resource, _bar(usage), show(budget.used), show(budget.limit))
    table.add_row("waiting", "", figures.count(snapshot.waiting_for_room))
    table.add_row("uploads", f"{snapshot.uploaded_files:,} files", figures.size(snapshot.uploaded_bytes))
    return table


def _keys(keys: list[KeyUse]) -> Table:
    table = _table("API key", "requests", "per s", "tokens", "per s")
    table.columns[0].max_width = _NAME_COLUMNS
    for use in keys:
        requests = (figures.short(use.requests), figures.rate(use.requests_per_s))
        table.add_row(use.name, *requests, figures.short(use.tokens), figures.rate(use.tokens_per_s))
    return table


def _bar(usage: float | None, *, warns: bool = True) -> Text:
    """`warns`: highlight a nearly full bar."""
    if usage is None:
        return Text()
    filled = min(_BAR_COLUMNS, round(usage * _BAR_COLUMNS))
    style = _BAD if warns and usage >= _NEARLY_FULL else "blue"
    return Text.assemble(("█" * filled, style), ("░" * (_BAR_COLUMNS - filled), "dim"))
