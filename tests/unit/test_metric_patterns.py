"""Metrics from printed lines: valid patterns, numbers and lines."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from nblaunch.errors import ArgumentError
from nblaunch.launch.options import Options
from nblaunch.launch.output.reports import PrintedMetrics, compile_patterns, search

ACCURACY = r"Accuracy: (?P<accuracy>[\d.]+)"
ANYTHING = r"x=(?P<x>\S+)"


def found(line: str, *patterns: str) -> dict[str, Any] | None:
    return search(line, compile_patterns(patterns))


# ------------------------------------------------------------------ which patterns are taken
@pytest.mark.parametrize(
    "given", [ACCURACY, re.compile(ACCURACY), [ACCURACY], (re.compile(ACCURACY),)], ids=["text", "re", "list", "tuple"]
)
def test_a_pattern_may_be_text_or_compiled_or_several_of_them(given: Any) -> None:
    assert compile_patterns(given) == (re.compile(ACCURACY),)


def test_the_flags_of_a_compiled_pattern_are_kept() -> None:
    (pattern,) = compile_patterns(re.compile(ACCURACY, re.IGNORECASE))
    assert search("ACCURACY: 0.5", [pattern]) == {"step": None, "metrics": {"accuracy": 0.5}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "metric_patterns=3: must be a string, a compiled pattern, or a list of them"),
        ({ACCURACY}, f"metric_patterns={ {ACCURACY}!r}: must be a string, a compiled pattern, or a list of them"),
        ([ACCURACY, None], "metric_patterns=None: must be a string, a compiled pattern, or a list of them"),
        (b"(?P<x>.)", "metric_patterns=b'(?P<x>.)': must be a string"),
        ("(?P<x>.", "metric_patterns='(?P<x>.': not a regular expression: missing ), unterminated subpattern at pos"),
        (f"(?P<x>.){{{10**30}}}", "{1000000000000000000000000000000}': not a regular expression: the repetition numb"),
        (
            r"loss: ([\d.]+)",
            r"metric_patterns='loss: ([\\d.]+)': name the group that holds the number, as in (?P<loss>[\d.]+)",
        ),
        (
            [ACCURACY, r"epoch (?P<step>\d+)"],
            r"metric_patterns='epoch (?P<step>\\d+)': name the group that holds the number, as in (?P<loss>",
        ),
    ],
)
def test_a_pattern_that_can_find_nothing_is_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        Options(metric_patterns=given)


# ------------------------------------------------------------------ numbers
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.93", 0.93),
        ("93.", 93.0),
        (".5", 0.5),
        ("-1.5e-3", -0.0015),
        ("1,234", 1234.0),
        ("-1,234,567.8", -1234567.8),
        ("93.1%,", 93.1),
        ("1,234,", 1234.0),
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


def test_one_line_with_several_matches_is_one_record() -> None:
    line = "epoch 3 loss 0.5 acc 0.9"
    patterns = (r"epoch (?P<step>\d+) loss (?P<loss>\S+)", r"acc (?P<accuracy>\S+)", r"acc (?P<loss>\S+)")
    assert found(line, *patterns) == {"step": 3, "metrics": {"loss": 0.5, "accuracy": 0.9}}


# ------------------------------------------------------------------ lines
def test_lines_are_searched_without_their_colours_and_counted() -> None:
    printed = PrintedMetrics(compile_patterns(ACCURACY))
    lines = ["\x1b[1mAccuracy:\x1b[0m \x1b[32m0.5\x1b[0m", "", "else", "no line end, Accuracy: 0.6"]
    records = printed.search(lines, 7.0)
    assert [(record["time"], record["metrics"]["accuracy"]) for record in records] == [(7.0, 0.5), (7.0, 0.6)]
    assert (printed.lines, printed.matches) == (3, 2)
