"""PromQL for the panels: what a panel's expression is put together from. Series are named without `raylens_`."""

PREFIX = "raylens_"
APPLICATION = 'application=~"$application",node=~"$node"'
"""The series of one or all applications and nodes: a selection of deployments leaves whole requests out."""
DEPLOYMENT = f'{APPLICATION},deployment=~"$deployment"'
"""As above, and of one or all deployments: for the rows of the stages."""
REPLICA = f'{DEPLOYMENT},replica=~"$replica"'
"""As above, and of one or all replicas. Only gauges have the label."""
NODE = 'NodeAddress=~"$node"'
"""Series of Ray's own that are about a node."""
_NEVER_ZERO = "1e-9"


def series(name: str, selection: str, *conditions: str) -> str:
    """`conditions`: further ones, such as `part="model"`."""
    return f"{PREFIX}{name}{{{','.join((selection, *conditions))}}}"


def total(expression: str, *tags: str) -> str:
    by = f" by ({', '.join(tags)})" if tags else ""
    return f"sum{by} ({expression})"


def rate(counter: str, *tags: str) -> str:
    """`counter`: its selected series. Returns how much it grows in a second."""
    return total(f"rate({counter}[$__rate_interval])", *tags)


def counted(counter: str, *tags: str, of: str = DEPLOYMENT) -> str:
    return rate(series(f"{counter}_total", of), *tags)


def of_replicas(gauge: str, *tags: str) -> str:
    return total(series(gauge, REPLICA), *tags)


def quantile(quantile: float, histogram: str, selection: str, *tags: str) -> str:
    """Returns NaN, which Grafana does not draw, for a time in which nothing was observed."""
    return f"histogram_quantile({quantile}, {rate(series(f'{histogram}_bucket', selection), *tags, 'le')})"


def mean(histogram: str, selection: str, *tags: str) -> str:
    """Returns nothing for a time in which nothing was observed."""
    return share(
        rate(series(f"{histogram}_sum", selection), *tags), rate(series(f"{histogram}_count", selection), *tags)
    )


def share(part: str, whole: str) -> str:
    """Returns nothing for a time in which there is no whole: a hit rate without a query is not 0."""
    return f"{part} / ({whole} > 0)"


def share_or_zero(part: str, whole: str) -> str:
    """Returns 0 for a time in which there is no whole, for what is bad: without requests none fails."""
    return f"{part} / clamp_min({whole}, {_NEVER_ZERO})"
