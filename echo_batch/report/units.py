"""Numbers for people: counts (K, M: 1000), bytes (KiB, MiB: 1024), durations, shares."""


def count(value: float) -> str:
    """1234567 -> '1.23M'; below 10,000 all digits."""
    if value < 10_000:
        return f"{value:,.0f}"
    for unit in ("K", "M", "G"):
        value /= 1000
        if value < 999.5:
            return f"{value:.3g}{unit}"
    return f"{value / 1000:.3g}T"


def size(num_bytes: float) -> str:
    """Bytes -> '1.5 GiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1023.5:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def duration(seconds: float) -> str:
    """Seconds -> '1h02m', '3m05s', '7.3s'."""
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m"


def share(value: float | None) -> str:
    """0.1234 -> '12.3 %'; None -> '-'."""
    return "-" if value is None else f"{100 * value:.1f} %"
