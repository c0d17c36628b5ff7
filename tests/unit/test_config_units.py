"""Durations and sizes: what is read, what is refused, and that formatting reads back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd import units


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("30s", 30),
        ("1m30s", 90),
        ("2h", 7200),
        ("1.5s", 1.5),
        ("0s", 0),
        ("30", 30),
        ("0.5", 0.5),
        ("1d", 86400),
        ("80us", 80e-6),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "30.", "s", "-1s", "1 s", "1s ago", "s1", "1x", "1ss", "1e3s", "١s"])
def test_no_durations(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        units.parse_duration(text)


@pytest.mark.parametrize(
    ("text", "count"), [("1B", 1), ("4096", 4096), ("64KiB", 65536), ("8MiB", 8 << 20), ("1.5GB", 1_500_000_000), ("2TiB", 2 << 40)]
)
def test_sizes(text: str, count: int) -> None:
    assert units.parse_size(text) == count


@pytest.mark.parametrize("text", ["", "8.5", "8M", "8mib", "MiB", "-8MiB", "8 MiB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        units.parse_size(text)


@given(st.integers(min_value=0, max_value=10**12))
def test_formatted_durations_and_sizes_read_back(number: int) -> None:
    assert units.parse_duration(units.format_duration(number / 1e6)) == pytest.approx(number / 1e6, abs=1e-6)
    assert units.parse_size(units.format_size(number)) == number


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "-"),
        (85e-6, "85us"),
        (0.0041, "4.1ms"),
        (0.142, "142ms"),
        (12.4, "12.4s"),
        (65, "1m05s"),
        (11520, "3h12m"),
        (90000, "1d01h"),
    ],
)
def test_shown_durations(seconds: float | None, shown: str) -> None:
    assert units.show_duration(seconds) == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [(None, "-"), (0, "0 B"), (999, "999 B"), (4096, "4.1 kB"), (38.2e9, "38.2 GB"), (999.9e6, "1000 MB")],
)
def test_shown_bytes(count: float | None, shown: str) -> None:
    assert units.show_bytes(count) == shown


@given(st.floats(min_value=0, max_value=1e15))
def test_shown_values_are_narrow(number: float) -> None:
    assert len(units.show_bytes(number)) <= 9
    assert len(units.show_duration(min(number, 8e7))) <= 7
