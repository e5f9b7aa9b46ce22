"""Formats numbers for quick reading. An unknown number is a dash."""

UNKNOWN = "–"
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def rate(value: float) -> str:
    """12345.6 -> "12,346", 1.23 -> "1.2"."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def count(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.0f}"


def short(value: float) -> str:
    """12345.6 -> "12.3 k"."""
    for unit in ("", " k", " M", " G"):
        if value < 1000 or unit == " G":
            break
        value /= 1000
    return f"{value:.0f}{unit}" if value == int(value) or value >= 100 else f"{value:.1f}{unit}"


def percent(value: float | None) -> str:
    """0.987 -> "98.7 %". Shows 100 % only for exactly 1, and 0 % only for exactly 0."""
    if value is None:
        return UNKNOWN
    if value in (0.0, 1.0):
        return f"{value * 100:.0f} %"
    return f"{min(max(value * 100, 0.1), 99.9):.1f} %"


def seconds(value: float | None) -> str:
    """0.0123 -> "12 ms", 75 -> "75 s"."""
    if value is None:
        return UNKNOWN
    if value < 1:
        return f"{value * 1000:.1f} ms" if value < 0.01 else f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"


def duration(value: float) -> str:
    """An elapsed time in its largest unit: 7300 -> "2 h"."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if value >= length:
            return f"{value // length:.0f} {unit}"
    return f"{max(value, 0):.0f} s"


def size(num_bytes: float | None) -> str:
    """1536 -> "1.5 KiB"."""
    if num_bytes is None:
        return UNKNOWN
    unit = 0
    while num_bytes >= 1024 and unit < len(_BYTE_UNITS) - 1:
        num_bytes /= 1024
        unit += 1
    return f"{num_bytes:.0f} {_BYTE_UNITS[unit]}" if unit == 0 else f"{num_bytes:.1f} {_BYTE_UNITS[unit]}"
