"""Bytes for people."""

import pytest

from irc.analysis.units import amount


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.96, "1.0 kB"),
        (1000, "1.0 kB"),
        (1536, "1.5 kB"),
        (999_940, "999.9 kB"),
        (999_960, "1.0 MB"),
        (16.06e9, "16.1 GB"),
        (5e15, "5000.0 TB"),
    ],
)
def test_amounts_have_three_digits_or_fewer(size: float, text: str) -> None:
    assert amount(size) == text
