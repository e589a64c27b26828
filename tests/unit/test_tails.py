"""Followers of growing logs: tails, spools, and the end of a log."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nblaunch.engines.rank_files import GrowingFile, LogFile, OutputFile
from nblaunch.launch.output import tails
from nblaunch.launch.output.tails import Piece, Spool, Tail, last_lines


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank0.out"


@pytest.fixture
def tail(log: Path) -> Iterator[Tail]:
    tail = Tail(LogFile(log))
    yield tail
    tail.close()


def append(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


# ------------------------------------------------------------------ tails
def test_a_tail_waits_for_its_file(log: Path, tail: Tail) -> None:
    assert tail.read(100) is None
    append(log, b"")
    assert tail.read(100) is None
    append(log, b"one\ntw")
    assert tail.read(100) == Piece(b"one\ntw")
    assert tail.read(100) is None
    append(log, b"o\n")
    assert tail.read(100) == Piece(b"o\n")


def test_a_tail_holds_one_descriptor_that_no_child_gets(log: Path, tail: Tail) -> None:
    append(log, b"x")
    tail.read(100)
    source = tail._opened
    assert isinstance(source, GrowingFile)
    first = source._fd
    append(log, b"y")
    tail.read(100)
    assert first is not None
    assert source._fd == first
    assert not os.get_inheritable(first)
    tail.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first)


def test_a_flood_is_cut_at_line_ends(log: Path, tail: Tail) -> None:
    append(log, b"".join(b"line %04d\n" % number for number in range(1000)))
    piece = tail.read(1000)
    assert piece is not None
    assert piece.head.startswith(b"line 0000\n")
    assert piece.head.endswith(b"\n")
    assert piece.tail.startswith(b"line ")
    assert piece.tail.endswith(b"line 0999\n")
    assert len(piece.head) + len(piece.tail) + piece.skipped_bytes == 10_000
    assert piece.skipped_lines == piece.skipped_bytes // 10 == 900


def test_a_flood_without_line_ends_is_cut_anywhere(log: Path, tail: Tail) -> None:
    append(log, b"x" * 10_000)
    assert tail.read(1000) == Piece(b"x" * 250, 0, 9000, b"x" * 750)


def test_a_huge_flood_is_not_read_to_count_its_lines(log: Path, tail: Tail) -> None:
    append(log, b"begin\n")
    os.truncate(log, 70 << 20)  # a hole: it takes no room
    append(log, b"\nend\n")
    piece = tail.read(1000)
    assert piece is not None
    assert piece.skipped_lines == -1
    assert piece.skipped_bytes > 69 << 20


def test_a_file_that_shrinks_is_followed_from_its_new_end(log: Path, tail: Tail) -> None:
    append(log, b"a long first part\n")
    tail.read(100)
    os.truncate(log, 3)
    assert tail.read(100) is None
    append(log, b"next\n")
    assert tail.read(100) == Piece(b"next\n")


def test_a_file_that_shrinks_while_it_is_read_gives_what_is_left(
    log: Path, tail: Tail, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(log, b"0123456789")
    monkeypatch.setattr(tail, "_appended", lambda: (0, 99))
    tail._opened.size()  # opens it
    assert tail.read(100) == Piece(b"0123456789")


@settings(derandomize=True, deadline=None)
@given(st.lists(st.text("ab\n", max_size=80), max_size=6), st.integers(8, 64))
def test_a_tail_gives_the_ends_and_counts_the_middle(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str], limit: int
) -> None:
    log = tmp_path_factory.mktemp("tail") / "rank0.out"
    tail = Tail(LogFile(log))
    for part in parts:
        data = part.encode()
        append(log, data)
        piece = tail.read(limit)
        if not data:
            assert piece is None
            continue
        assert piece is not None
        middle = data[len(piece.head) : len(data) - len(piece.tail)]
        assert data == piece.head + middle + piece.tail
        assert (piece.skipped_bytes, piece.skipped_lines) == (len(middle), middle.count(b"\n"))
        assert len(piece.head) + len(piece.tail) <= limit
        assert bool(middle) == (len(data) > limit)
    tail.close()


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
    spool.close()


def test_a_flood_of_reports_is_read_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails, "_RECORDS_BLOCK_BYTES", 1000)
    path = tmp_path / "rank0.spool"
    append(path, b"".join(b'{"step": %d}\n' % step for step in range(1000)))
    spool = Spool(LogFile(path))
    blocks = list(spool.read())
    assert max(map(len, blocks)) < 100
    assert [record["step"] for block in blocks for record in block] == list(range(1000))
    spool.close()


def test_a_malformed_report_is_counted_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rank0.spool"
    append(path, b"not json\n[1]\n\xff\n" + b"[" * 100_000 + b'\n{"step": 1}\n')
    spool = Spool(LogFile(path))
    with caplog.at_level(logging.WARNING):
        assert all_of(spool) == [{"step": 1}]
    assert spool.malformed == 4
    assert "contains a malformed report: b'not json'" in caplog.text
    append(path, b"x" * ((1 << 20) + 1))
    assert all_of(spool) == []
    assert spool.malformed == 5
    append(path, b'\n{"step": 2}\n')
    assert all_of(spool) == [{"step": 2}]
    spool.close()


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


def test_last_lines_of_no_file(log: Path) -> None:
    assert last_lines(LogFile(log)) == ""


# ------------------------------------------------------------------ files of a rank
def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"))


def test_a_log_holds_no_descriptor_and_is_readable_while_it_exists(log: Path) -> None:
    before = open_descriptors()
    file = LogFile(log)
    assert (file.name, file.size(), file.read(0, 9)) == (str(log), 0, b"")
    append(log, b"one\ntwo\n")
    assert (file.size(), file.read(4, 7), file.read(4, 100)) == (8, b"two", b"two\n")
    log.write_bytes(b"new")
    assert (file.size(), file.read(0, 8)) == (3, b"new")
    assert open_descriptors() == before
    log.unlink()
    assert (file.size(), file.read(0, 3)) == (0, b"")


def test_a_log_is_no_link_to_a_file_elsewhere(log: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    log.symlink_to(secret)
    assert LogFile(log).read(0, 6) == b""


def test_a_body_is_read_until_it_is_removed(tmp_path: Path) -> None:
    body = OutputFile(tmp_path / "x.png")
    assert body.read() is None
    body.path.write_bytes(b"png")
    assert body.read() == b"png"
