"""Numbers with units, as reports print them: one system everywhere, that of GB/s; and counts."""

from __future__ import annotations

_BYTES = ("B", "kB", "MB", "GB", "TB")


def amount(size: float) -> str:
    """Bytes for people, in a unit that leaves three digits or fewer before the point: `1.5 GB`.

    Units are powers of 1000.
    """
    unit = 0
    while size >= 999.95 and unit + 1 < len(_BYTES):
        size, unit = size / 1000, unit + 1
    return f"{size:.1f} {_BYTES[unit]}" if unit else f"{size:.0f} {_BYTES[unit]}"


def counted(count: int, thing: str) -> str:
    """`1 value`, `2 values`."""
    return f"{count} {thing}{'s' * (count != 1)}"
