"""Followers of growing logs: printed lines, spools, and the end of a log."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nblaunch.engines.rank_files import LogFile
from nblaunch.launch.output import follower
from nblaunch.launch.output.follower import PrintedLog, Spool
from nblaunch.launch.output.terminal_lines import last_lines
from nblaunch.launch.views import LogLines

MANY = 1 << 30


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank0.out"


@pytest.fixture
def printed(log: Path) -> PrintedLog:
    return PrintedLog(0, "out", LogFile(log))


def append(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


def look(printed: PrintedLog, most: int = MANY, backlog: int = MANY) -> LogLines:
    printed.grow()
    return printed.read(most, backlog)


class Unreadable(LogFile):
    """A log that this process cannot open now: it has no descriptor left."""

    def read(self, start: int, end: int) -> bytes:
        return b""


# ------------------------------------------------------------------ printed lines
def test_a_log_is_read_once_it_is_there(log: Path, printed: PrintedLog) -> None:
    assert printed.grow() == 0
    append(log, b"one\ntw")
    assert printed.grow() == 6
    assert look(printed) == LogLines(0, "out", str(log), ["one"], ["tw"])
    assert printed.grow() == 0
    append(log, b"o\n")
    assert look(printed).lines == ["two"]
    append(log, b"three")
    assert look(printed).open == ["three"]
    assert printed.finish() == LogLines(0, "out", str(log), ["three"], [])


def test_of_a_flood_the_first_and_the_last_lines_are_read(log: Path, printed: PrintedLog) -> None:
    append(log, b"begin\n")
    look(printed)
    append(log, b"cut")
    look(printed)
    append(log, b"\n" + b"".join(b"line %04d\n" % number for number in range(1000)))
    lines = look(printed, backlog=1003).lines
    assert lines[:3] == ["cut", "line 0000", "line 0001"]
    gap = lines.index("… 9,130 bytes not shown …")
    assert lines[gap:] == [lines[gap], *(f"line {number:04}" for number in range(925, 1000))]
    os.truncate(log, 70 << 20)  # a hole: it takes no room
    append(log, b"\nend\n")
    assert look(printed, backlog=80).lines[0].startswith("… 73,")
    append(log, b"begin " + b"x" * 100_000 + b" end")
    shown, _ = look(printed, backlog=1000).lines
    assert shown.startswith("begin xx")


def test_what_cannot_be_read_now_is_read_later(tmp_path: Path) -> None:
    append(tmp_path / "log", b'{"n": 1}\n')
    log, spool = PrintedLog(0, "out", Unreadable(tmp_path / "log")), Spool(Unreadable(tmp_path / "log"))
    assert look(log).lines == []
    assert all_of(spool) == []
    log.log = spool.log = LogFile(tmp_path / "log")
    assert look(log).lines == ['{"n": 1}']
    assert all_of(spool) == [{"n": 1}]


def test_a_log_that_the_user_cuts_goes_on_from_its_beginning(log: Path, printed: PrintedLog) -> None:
    append(log, b"a long first part\n")
    look(printed)
    log.write_bytes(b"new\n")
    assert look(printed).lines == ["new"]
    printed.grow()
    log.unlink()
    assert look(printed).lines == []


@settings(derandomize=True, deadline=None)
@given(st.lists(st.text("ab\n", max_size=80), max_size=6), st.integers(1, 64))
def test_every_line_is_read_exactly_once(tmp_path_factory: pytest.TempPathFactory, parts: list[str], most: int) -> None:
    log = tmp_path_factory.mktemp("log") / "rank0.out"
    printed = PrintedLog(0, "out", LogFile(log))
    lines: list[str] = []
    for part in parts:
        append(log, part.encode())
        lines += look(printed, most).lines
    while printed.grow():
        lines += printed.read(most, MANY).lines
    lines += printed.finish().lines
    assert lines == "".join(parts).splitlines()


# ------------------------------------------------------------------ spools
def all_of(spool: Spool) -> list[dict[str, Any]]:
    return [record for records in spool.read() for record in records]


def test_a_spool_gives_whole_records(tmp_path: Path) -> None:
    path = tmp_path / "rank0.spool"
    spool = Spool(LogFile(path))
    assert all_of(spool) == []
    append(path, b'{"step": 1}\n{"step"')
    assert all_of(spool) == [{"step": 1}]
    append(path, b": 2}\n" + json.dumps({"metrics": {"loss": float("inf")}}).encode() + b"\n")
    assert all_of(spool) == [{"step": 2}, {"metrics": {"loss": float("inf")}}]
    assert all_of(spool) == []


def test_a_flood_of_reports_is_read_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "_RECORDS_BLOCK_BYTES", 1000)
    path = tmp_path / "rank0.spool"
    append(path, b"".join(b'{"step": %d}\n' % step for step in range(1000)))
    spool = Spool(LogFile(path))
    blocks = list(spool.read())
    assert max(map(len, blocks)) < 100
    assert [record["step"] for block in blocks for record in block] == list(range(1000))


def test_a_malformed_report_is_counted_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rank0.spool"
    append(path, b"not json\n[1]\n\xff\n" + b"[" * 100_000 + b'\n{"step": 1}\n')
    spool = Spool(LogFile(path))
    with caplog.at_level(logging.WARNING):
        assert all_of(spool) == [{"step": 1}]
    assert caplog.text.count("contains a malformed report") == 4
    assert "contains a malformed report: b'not json'" in caplog.text
    append(path, b"x" * ((1 << 20) + 1))
    assert all_of(spool) == []
    append(path, b'\n{"step": 2}\n')
    assert all_of(spool) == [{"step": 2}]


# ------------------------------------------------------------------ the end of a log
@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", ""),
        (b"one\ntwo\n", "one\ntwo"),
        (b"a\nb\nc\nd", "b\nc\nd"),
        (b" 10%|#\r 20%|##\nb", " 20%|##\nb"),
        (b"\x1b[31mred\x1b[0m\0\xff\x07\ttab", "red\ufffd\ttab"),
        ("\x9b31m é".encode(), "31m é"),
    ],
)
def test_last_lines(log: Path, data: bytes, text: str) -> None:
    append(log, data)
    assert last_lines(LogFile(log), count=3) == text


def test_last_lines_reads_the_end_alone(log: Path) -> None:
    append(log, b"a" * 100 + b"\nsecond\nthird\n")
    assert last_lines(LogFile(log), max_bytes=20) == "second\nthird"
    append(log, b"b" * 100)
    assert last_lines(LogFile(log), max_bytes=20) == "b" * 20


# ------------------------------------------------------------------ files of a rank


def test_a_log_is_no_link_to_a_file_elsewhere(log: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    log.symlink_to(secret)
    assert LogFile(log).read(0, 6) == b""
