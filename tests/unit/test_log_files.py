"""Followers of growing logs: tails, spools, and the end of a log."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nblaunch.engines.growing_file import GrowingFile
from nblaunch.launch.output import log_files
from nblaunch.launch.output.log_files import Piece, Spool, Tail, last_lines


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank0.out"


@pytest.fixture
def tail(log: Path) -> Iterator[Tail]:
    tail = Tail(log)
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
    source = tail._log
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
    tail._log.size()  # opens it
    assert tail.read(100) == Piece(b"0123456789")


@settings(derandomize=True, deadline=None)
@given(st.lists(st.text("ab\n", max_size=80), max_size=6), st.integers(8, 64))
def test_a_tail_gives_the_ends_and_counts_the_middle(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str], limit: int
) -> None:
    log = tmp_path_factory.mktemp("tail") / "rank0.out"
    tail = Tail(log)
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
    spool = Spool(path)
    assert all_of(spool) == []
    append(path, b'{"step": 1}\n{"step"')
    assert all_of(spool) == [{"step": 1}]
    append(path, b": 2}\n" + json.dumps({"metrics": {"loss": float("inf")}}).encode() + b"\n")
    assert all_of(spool) == [{"step": 2}, {"metrics": {"loss": float("inf")}}]
    assert all_of(spool) == []
    spool.close()


def test_a_flood_of_reports_is_read_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "_RECORDS_BLOCK_BYTES", 1000)
    path = tmp_path / "rank0.spool"
    append(path, b"".join(b'{"step": %d}\n' % step for step in range(1000)))
    spool = Spool(path)
    blocks = list(spool.read())
    assert max(map(len, blocks)) < 100
    assert [record["step"] for block in blocks for record in block] == list(range(1000))
    spool.close()


def test_a_malformed_report_is_counted_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rank0.spool"
    append(path, b"not json\n[1]\n\xff\n" + b"[" * 100_000 + b'\n{"step": 1}\n')
    spool = Spool(path)
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
    assert last_lines(log, count=3) == text


def test_last_lines_reads_the_end_alone(log: Path) -> None:
    append(log, b"a" * 100 + b"\nsecond\nthird\n")
    assert last_lines(log, max_bytes=20) == "second\nthird"
    append(log, b"b" * 100)
    assert last_lines(log, max_bytes=20) == "b" * 20


def test_last_lines_of_no_file(log: Path) -> None:
    assert last_lines(log) == ""
