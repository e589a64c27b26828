"""Metrics from printed lines: valid patterns, numbers and lines."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from nblaunch.errors import ArgumentError
from nblaunch.launch.options import Options
from nblaunch.launch.output.reports import PrintedMetrics, compile_patterns, search
from nblaunch.launch.output.tails import Piece

ACCURACY = r"Accuracy: (?P<accuracy>[\d.]+)"
ANYTHING = r"x=(?P<x>\S+)"


@pytest.fixture
def printed() -> PrintedMetrics:
    """Searches for the accuracy."""
    return PrintedMetrics(compile_patterns(ACCURACY))


def values(records: list[dict[str, Any]]) -> list[float]:
    return [value for record in records for value in record["metrics"].values()]


def found(line: str, *patterns: str) -> dict[str, Any] | None:
    return search(line, compile_patterns(patterns))


# ------------------------------------------------------------------ which patterns are taken
@pytest.mark.parametrize(
    "given", [ACCURACY, re.compile(ACCURACY), [ACCURACY], (re.compile(ACCURACY),)], ids=["text", "re", "list", "tuple"]
)
def test_a_pattern_may_be_text_or_compiled_or_several_of_them(given: Any) -> None:
    assert compile_patterns(given) == (re.compile(ACCURACY),)


@pytest.mark.parametrize("given", [None, [], ()])
def test_no_pattern_is_no_pattern(given: Any) -> None:
    assert compile_patterns(given) == ()


def test_the_flags_of_a_compiled_pattern_are_kept() -> None:
    (pattern,) = compile_patterns(re.compile(ACCURACY, re.IGNORECASE))
    assert search("ACCURACY: 0.5", [pattern]) == {"step": None, "metrics": {"accuracy": 0.5}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "metric_patterns=3: must be a string, a compiled pattern, or a list of them"),
        ({ACCURACY}, f"metric_patterns={ {ACCURACY}!r}: must be a string, a compiled pattern, or a list of them"),
        ([ACCURACY, None], "metric_patterns=None: must be a string, a compiled pattern, or a list of them"),
        (b"(?P<x>.)", "metric_patterns=b'(?P<x>.)': must be str, not bytes"),
        ([re.compile(b"(?P<x>.)")], "metric_patterns=b'(?P<x>.)': must be str, not bytes"),
        ("(?P<x>.", "metric_patterns='(?P<x>.': not a regular expression: missing ), unterminated subpattern at pos"),
        (f"(?P<x>.){{{10**30}}}", "{1000000000000000000000000000000}': not a regular expression: the repetition numb"),
        (
            r"loss: ([\d.]+)",
            r"metric_patterns='loss: ([\\d.]+)': name the group that holds the number, as in (?P<loss>[\d.]+)",
        ),
        ("", r"metric_patterns='': name the group that holds the number, as in (?P<loss>[\d.]+)"),
        (
            [ACCURACY, r"epoch (?P<step>\d+)"],
            r"metric_patterns='epoch (?P<step>\\d+)': has a step, but no metric: add a named group, as in (?P<loss>",
        ),
        ([ACCURACY] * 101, "metric_patterns=<101 patterns>: at most 100"),
    ],
)
def test_a_pattern_that_can_find_nothing_is_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        Options(metric_patterns=given)


def test_the_options_hold_the_patterns() -> None:
    assert Options().metric_patterns is None
    options = Options(metric_patterns=ACCURACY)  # type: ignore[arg-type]  # before the check
    assert options.metric_patterns == (re.compile(ACCURACY),)


# ------------------------------------------------------------------ numbers
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.93", 0.93),
        ("93", 93.0),
        ("93.", 93.0),
        (".5", 0.5),
        ("-1.5e-3", -0.0015),
        ("+2E4", 20000.0),
        ("1,234", 1234.0),
        ("-1,234,567.8", -1234567.8),
        ("93.1%", 93.1),
        ("93.1%,", 93.1),
        ("0.93.", 0.93),
        ("1,234,", 1234.0),
        ("inf", math.inf),
        ("-Infinity", -math.inf),
    ],
)
def test_numbers_are_recognized(text: str, value: float) -> None:
    assert found(f"x={text}", ANYTHING) == {"step": None, "metrics": {"x": value}}


def test_nan_is_a_number_as_a_loss_that_explodes_must_be_seen() -> None:
    record = found("x=nan", ANYTHING)
    assert record is not None
    assert math.isnan(record["metrics"]["x"])


@pytest.mark.parametrize("text", ["low", "1.2.3", "1,23", "1,2345", "12_34", "0x1f", "1e", "%", ".", "--1", "1-2", "²"])
def test_non_numbers_are_left_out(text: str) -> None:
    assert found(f"x={text}", ANYTHING) is None


@pytest.mark.parametrize(
    ("text", "step"),
    [("7", 7), ("1,234", 1234), ("40%", 40), ("7:", 7), ("-1", -1), ("1.5", None), ("last", None), ("9" * 19, None)],
)
def test_a_step_is_a_whole_number(text: str, step: int | None) -> None:
    assert found(f"epoch {text} x=1", r"epoch (?P<step>\S+) x=(?P<x>\d)") == {"step": step, "metrics": {"x": 1.0}}


def test_a_group_that_takes_no_part_is_left_out() -> None:
    pattern = r"loss (?P<loss>[\d.]+)(?: acc (?P<accuracy>[\d.]+))?(?: at (?P<step>\d+))?"
    assert found("loss 0.5", pattern) == {"step": None, "metrics": {"loss": 0.5}}
    assert found("loss 0.5 acc 0.9 at 3", pattern) == {"step": 3, "metrics": {"loss": 0.5, "accuracy": 0.9}}


def test_a_step_alone_is_no_record() -> None:
    assert found("epoch 3 loss low", r"epoch (?P<step>\d+) loss (?P<loss>\w+)") is None


def test_one_line_with_several_matches_is_one_record() -> None:
    line = "epoch 3 loss 0.5 acc 0.9"
    patterns = (r"epoch (?P<step>\d+) loss (?P<loss>\S+)", r"acc (?P<accuracy>\S+)", r"acc (?P<loss>\S+)")
    assert found(line, *patterns) == {"step": 3, "metrics": {"loss": 0.5, "accuracy": 0.9}}


# ------------------------------------------------------------------ lines
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"Accuracy: 0.5\nelse\nAccuracy: 0.6\r\n", [0.5, 0.6]),
        (b"\x1b[1mAccuracy:\x1b[0m \x1b[32m0.5\x1b[0m\n", [0.5]),
        (b"\x1b]0;a title\x07Accuracy: 0.5\n", [0.5]),
        (b"Accuracy: 0.1\rAccuracy: 0.2\rAccuracy: 0.3\n", [0.3]),
        (b"\rAccuracy: 0.1\r              \rdone\n", []),
        (b"\rAccuracy: 0.1\r\x1b[Kepoch 2\r\n", []),
        (b"Accuracy: 0.1\b2\n", [0.2]),
        (b"\xff caf\xc3\xa9 Accuracy: 0.5 \xe2\x82\n", [0.5]),
        (b"no line end, Accuracy: 0.5", [0.5]),
        (b"\rAccuracy: 0.1\rAccuracy: 0.2", [0.2]),
        (b"", []),
    ],
)
def test_a_line_is_what_a_terminal_would_show(printed: PrintedMetrics, data: bytes, expected: list[float]) -> None:
    assert values(printed.search(Piece(data)) + printed.finish()) == expected


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_it_does_not_matter_how_a_line_is_split_over_looks(printed: PrintedMetrics, size: int) -> None:
    data = "é \x1b[1mAccuracy: 0.1\x1b[0m\nAccuracy: 0.2\rAccuracy: 0.3\r\nAccuracy: 0.4\n".encode()
    records = []
    for at in range(0, len(data), size):
        records += printed.search(Piece(data[at : at + size]))
    assert values(records) == [0.1, 0.3, 0.4]
    assert values(printed.finish()) == []


@pytest.mark.parametrize("colour", [b"", b"\x1b[0m"])
@pytest.mark.parametrize("at_once", [True, False])
def test_of_a_long_line_both_ends_are_searched(printed: PrintedMetrics, colour: bytes, at_once: bool) -> None:
    for line, expected in (
        ([colour, b"Accuracy: 0.1", b"x" * 100_000, b"Accuracy: 0.2\n"], [0.1]),
        ([colour, b"x" * 100_000, b"Accuracy: 0.2", b"y" * 100_000, b"\n"], []),
        ([colour, b"x" * 100_000, b"Accuracy: 0.3\n"], [0.3]),
    ):
        parts = [b"".join(line)] if at_once else line
        assert values([record for part in parts for record in printed.search(Piece(part))]) == expected


@pytest.mark.parametrize("at_once", [True, False])
def test_of_a_bar_that_is_redrawn_for_long_the_last_state_counts(printed: PrintedMetrics, at_once: bool) -> None:
    states = [b"\r%3d%%|%s| Accuracy: 0.%04d" % (n // 50, b"#" * 40, n) for n in range(5000)]
    parts = [b"".join(states)] if at_once else states
    assert [record for part in parts for record in printed.search(Piece(part))] == []
    assert values(printed.search(Piece(b"\nAccuracy: 0.7\n"))) == [0.4999, 0.7]


def test_of_a_flood_the_beginning_and_the_end_are_searched(printed: PrintedMetrics) -> None:
    piece = Piece(b"Accuracy: 0.1\nAccur", 3, 99, b"Accuracy: 0.2\nAccuracy: 0.3")
    assert values(printed.search(piece)) == [0.1, 0.2]
    assert values(printed.finish()) == [0.3]
    assert (printed.lines, printed.matches) == (4, 3)
