"""Builds PromQL expressions for the panels. Series are named without `raylens_`."""

PREFIX = "raylens_"
APPLICATION = 'application=~"$application",node=~"$node"'
"""Selects series by application and node, for whole requests: a filter by deployment would drop them."""
DEPLOYMENT = f'{APPLICATION},deployment=~"$deployment"'
"""Selects by deployment, too, for the rows of the stages."""
REPLICA = f'{DEPLOYMENT},replica=~"$replica"'
"""Selects by replica, too. Only gauges have this label."""
NODE = 'NodeAddress=~"$node"'
"""Selects Ray's own series of a node."""
_NEVER_ZERO = "1e-9"


def series(name: str, selection: str, *conditions: str) -> str:
    """`conditions`: further ones, such as `part="model"`."""
    return f"{PREFIX}{name}{{{','.join((selection, *conditions))}}}"


def total(expression: str, *tags: str) -> str:
    by = f" by ({', '.join(tags)})" if tags else ""
    return f"sum{by} ({expression})"


def rate(counter: str, *tags: str) -> str:
    """Returns the growth per second of `counter`, an expression of selected series."""
    return total(f"rate({counter}[$__rate_interval])", *tags)


def counted(counter: str, *tags: str, of: str = DEPLOYMENT) -> str:
    return rate(series(f"{counter}_total", of), *tags)


def of_replicas(gauge: str, *tags: str) -> str:
    return total(series(gauge, REPLICA), *tags)


def quantile(quantile: float, histogram: str, selection: str, *tags: str) -> str:
    """The result is NaN, which Grafana does not draw, while nothing is observed."""
    return f"histogram_quantile({quantile}, {rate(series(f'{histogram}_bucket', selection), *tags, 'le')})"


def mean(histogram: str, selection: str, *tags: str) -> str:
    """The result is empty while nothing is observed."""
    values, count = (rate(series(f"{histogram}_{part}", selection), *tags) for part in ("sum", "count"))
    return share(values, count)


def share(part: str, whole: str) -> str:
    """The result is empty while the whole is 0, because a hit rate without queries is not 0."""
    return f"{part} / ({whole} > 0)"


def share_or_zero(part: str, whole: str) -> str:
    """The result is 0 while the whole is 0, for shares of failures: without requests none fails."""
    return f"{part} / clamp_min({whole}, {_NEVER_ZERO})"
