"""Bytes in, the lines of a terminal out."""

from __future__ import annotations

import re
import time
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nblaunch.launch.output.terminal_lines import Excerpt, LineAssembler, fair_shares, shorten, without_colours

DETERMINISTIC = settings(derandomize=True, deadline=None)


def lines_of(*pieces: bytes) -> list[str]:
    """What a page shows that takes lines back."""
    assembler, lines = LineAssembler(), list[str]()
    for piece in pieces:
        more = assembler.feed(piece)
        lines = lines[: len(lines) - assembler.retracted] + more
    return lines + assembler.finish()


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([], []),
        ([b"one\ntwo"], ["one", "two"]),
        ([b"windows\r\nline\r\n"], ["windows", "line"]),
        ([b"windows\r", b"\nline"], ["windows", "line"]),
        ([b"\0a\0\0b\x07\x0b\x0c\x7f"], ["ab"]),
        (["é…😀".encode()], ["é…😀"]),
        (["é".encode()[:1], "é".encode()[1:] + b"\n"], ["é"]),
        ([b"\xff\xfeok\n", b"\xe2\x82"], ["\ufffd\ufffdok", "\ufffd"]),
        ([b"old text\r\x1b[Knew\n"], ["new"]),
        ([b"old text\b\b\b\b\x1b[0Knew\n"], ["old new"]),
        ([b"old text\x1b[2K\rnew\n"], ["new"]),
        ([b"one\n\x1b[A\rtwo\x1b[1B\x1b[?25l\n"], ["two"]),
        ([b"\x1b]0;title\x07a\x1b]2;other\x1b\\b\n"], ["ab"]),
        ([b"\x1b]0;ti", b"tle\x07a\n"], ["a"]),
        ([b"\x1b", b"]0;title\x1b", b"\\a\n"], ["a"]),
        ([b"\x1b]0;ti", b"tle\x1b", b"\\a\n"], ["a"]),
        ([b"\x1b]0;never ended\nnext"], ["", "next"]),
        ([b"\x1b(B\x1b7\x1b=a\x1bM"], ["a"]),
        ([b"a\x1b[", b"3", b"1mb\n"], ["a\x1b[31mb\x1b[0m"]),
        ([b"\x1b[>4;2ma"], ["a"]),
    ],
)
def test_shows_what_a_terminal_would(pieces: list[bytes], lines: list[str]) -> None:
    assert lines_of(*pieces) == lines


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"\x1b[31mred\x1b[0m", ["\x1b[31mred\x1b[0m"]),
        (b"\x1b[31mred\x1b[m plain", ["\x1b[31mred\x1b[0m plain"]),
        (b"\x1b[1m\x1b[31mx\x1b[22my\x1b[39mz", ["\x1b[1;31mx\x1b[0m\x1b[31my\x1b[0mz"]),
        (b"\x1b[31ma\x1b[32mb\x1b[0m", ["\x1b[31ma\x1b[0m\x1b[32mb\x1b[0m"]),
        (b"\x1b[38;5;9;48;2;1;2;3mx\x1b[0m", ["\x1b[38;5;9;48;2;1;2;3mx\x1b[0m"]),
        (b"\x1b[31;4:3mx\x1b[4:0my\x1b[0m", ["\x1b[31;4:3mx\x1b[0m\x1b[31my\x1b[0m"]),
        (b"\x1b[31mone\ntwo\x1b[0m\nthree", ["\x1b[31mone\x1b[0m", "\x1b[31mtwo\x1b[0m", "three"]),
        (b"\x1b[31mred\x1b[0m\rX", ["X\x1b[31med\x1b[0m"]),
        (b"\x1b[31m\x1b[0m", []),
    ],
    ids=repr,
)
def test_each_line_carries_its_own_colours(data: bytes, lines: list[str]) -> None:
    assert lines_of(data) == lines
    assert lines_of(*(data[at : at + 1] for at in range(len(data)))) == lines


# ------------------------------------------------------------------ a cursor that moves up
def test_nested_bars_stay_two_lines() -> None:
    assembler = LineAssembler()
    assert assembler.feed(b"before\nouter 0%") == ["before"]
    finished = 0
    for step in range(50):
        finished += len(assembler.feed(b"\n\rinner %d%%\x1b[A\router %d%%" % (step, step))) - assembler.retracted
    assert assembler.partials == ["outer 49%", "inner 49%"]
    assert finished == 0
    assert assembler.feed(b"\n\r         \r\x1b[A\nnext\nlast\n") == ["outer 49%", "next     ", "last"]
    assert assembler.partials == []


def test_the_cursor_goes_up_into_finished_lines_which_are_taken_back() -> None:
    assembler = LineAssembler()
    assert assembler.feed(b"one\n\x1b[31mtwo\x1b[0m\n") == ["one", "\x1b[31mtwo\x1b[0m"]
    assert (assembler.feed(b"\x1b[2A\rONE"), assembler.retracted) == ([], 2)
    assert assembler.partials == ["ONE", "\x1b[31mtwo\x1b[0m"]
    assert assembler.feed(b"\n\nthree") + assembler.finish() == ["ONE", "\x1b[31mtwo\x1b[0m", "three"]


# ------------------------------------------------------------------ long lines
def test_a_long_line_keeps_its_ends() -> None:
    line = b"a" * 2000 + b"-" * 4_996_000 + b"z" * 2000
    expected = "a" * 2000 + "… [characters left out] …" + "z" * 2000
    assert lines_of(line) == lines_of(line + b"\n") == [expected]
    assert lines_of(*(line[at : at + 5000] for at in range(0, len(line), 5000))) == [expected]
    assert shorten(line.decode()) == expected
    assert lines_of(b"a" * 4000) == ["a" * 4000]


def test_the_memory_of_a_long_line_is_bounded() -> None:
    assembler = LineAssembler()
    tracemalloc.start()
    for _ in range(1000):
        assembler.feed(b"x" * 5000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000
    assert len(assembler.partials[0]) < 4100


@pytest.mark.parametrize(
    "pieces",
    [
        [(b"x" * 49 + b"\n") * 200_000],
        [b"x" * 1000] * 1000,
        [(b"\r" + b"x" * 60) * 100_000],
        [b"\x1b["] + [b";"] * 100_000,
        [b"\x1b]"] + [b"x"] * 100_000,
        [b"\x1b[31mx" * 1000 + b"\x07"] * 20,
    ],
    ids=["lines", "long line", "carriage returns", "endless sequence", "endless title", "colours"],
)
def test_it_is_fast_and_quadratic_in_nothing(pieces: list[bytes]) -> None:
    begin = time.process_time()
    lines_of(*pieces)
    lines_of(b"a\nb\n\x1b[2A" * 5000)
    assert time.process_time() - begin < 2  # a tenth of that as measured; what is quadratic takes minutes


# ------------------------------------------------------------------ properties
_TEXT = [b"a", b"bc", b"\n", b"\t", "é".encode(), "😀".encode(), b"x" * 2100, b"\xff", b"\xe2", b"\0", b"\x07"]
_MOVES = [b"\r", b"\r\n", b"\b", b"\x1b[K", b"\x1b[2K", b"\x1b[A", b"\x1b[2A", b"\x1b[B"]
_ESCAPES = [b"\x1b", b"[", b"]", b"0;", b"31m", b"\\", b"\x1b[31m", b"\x1b[0m"]
_TOKENS = st.sampled_from(_TEXT + _MOVES + _ESCAPES)
_STREAMS = st.lists(_TOKENS | st.binary(max_size=5), max_size=40).map(b"".join)


@settings(DETERMINISTIC, max_examples=300)
@given(_STREAMS, st.lists(st.integers(0, 200)))
def test_it_does_not_matter_how_bytes_are_split(data: bytes, cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(data)]
    pieces = [data[start:end] for start, end in pairwise(bounds)]
    assert lines_of(*pieces) == lines_of(data)
    assert lines_of(*(data[at : at + 1] for at in range(len(data)))) == lines_of(data)


@DETERMINISTIC
@given(_STREAMS)
def test_nothing_in_a_line_moves_a_cursor(data: bytes) -> None:
    for line in lines_of(data):
        assert not re.search(r"[\x00-\x08\x0a-\x1f\x7f]", without_colours(line))
        assert "\x1b" not in line or line.rindex("\x1b[0m") == line.rindex("\x1b")
        assert len(without_colours(line)) < 4100


@DETERMINISTIC
@given(st.text("ab…\r\b\n", max_size=60))
def test_it_overwrites_as_a_terminal_does(text: str) -> None:
    screen: list[list[str]] = [[]]
    column = 0
    for character in text:
        if character == "\n":
            screen.append([])
        column = {"\n": 0, "\r": 0, "\b": max(0, column - 1)}.get(character, column + 1)
        if character not in "\n\r\b":
            screen[-1][column - 1 : column] = character
    expected = ["".join(row) for row in screen]
    assert lines_of(text.encode()) == (expected if expected[-1] else expected[:-1])


# ------------------------------------------------------------------ excerpts
def test_an_excerpt_keeps_the_first_and_the_last() -> None:
    excerpt = Excerpt(6, 9, prefix="> ")
    for number in range(1000):
        excerpt.add(str(number))
    assert (excerpt.left_lines, excerpt.left_bytes) == (998, sum(len(str(n)) + 1 for n in range(1, 999)))
    assert excerpt.text("gap") == "> 0\n> gap\n> 999\n"


@DETERMINISTIC
@given(st.lists(st.text("aé", max_size=9), max_size=60), st.integers(0, 200), st.integers(0, 300))
def test_an_excerpt_shows_or_counts_every_line(lines: list[str], kept: int, cut: int) -> None:
    excerpt = Excerpt(kept // 4, kept)
    for line in lines:
        excerpt.add(line)
    excerpt.cut(cut)
    shown = [*excerpt.head, *excerpt.tail]
    assert len(shown) + excerpt.left_lines == len(lines)
    assert shown == lines[: len(excerpt.head)] + lines[len(lines) - len(excerpt.tail) :]
    assert excerpt.size <= min(cut, kept + kept // 4)


@DETERMINISTIC
@given(st.lists(st.integers(0, 50), max_size=8), st.integers(0, 120))
def test_shares_are_fair(wanted: list[int], most: int) -> None:
    shares = fair_shares(wanted, most)
    assert sum(shares) <= most
    assert all(share <= want for share, want in zip(shares, wanted, strict=True))
    cut = [share for share, want in zip(shares, wanted, strict=True) if share < want]
    assert not cut or (max(cut) - min(cut) <= 1 and max(shares) <= max(cut) and sum(shares) == most)
