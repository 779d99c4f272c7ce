from __future__ import annotations

from pd_ops.tables import mib, milliseconds, si, table


def test_numbers_stand_right_and_words_left() -> None:
    text = table(("id", "free", "state"), [("a", 5, "ready"), ("long-id", "1200/1456", "lost")])
    assert text.splitlines() == [
        "id            free  state",
        "a                5  ready",
        "long-id  1200/1456  lost",
    ]


def test_a_column_with_a_word_in_it_stands_left() -> None:
    assert table(("x",), [("12",), ("p50 1",)]).splitlines() == ["x", "12", "p50 1"]


def test_units() -> None:
    assert (si(0), si(999), si(1234567), si(2_000_000_000)) == ("-", "999", "1.23 M", "2 G")
    assert mib(3 * 2**20) == "3 MiB"
    assert (milliseconds(None), milliseconds(1.26)) == ("-", "1.3 ms")
