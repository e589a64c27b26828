"""The table of the ranks' collectives, and of what they drop: written by a rank, read by the kernel."""

from __future__ import annotations

import errno
import os
import re
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nblaunch.errors import ArgumentError
from nblaunch.wire.tables import ROWS, Begun, CollectiveRows, Dropped, Drops, RankTable, log_limit


@pytest.fixture
def table(tmp_path: Path) -> Iterator[RankTable]:
    made = RankTable(str(tmp_path), 3)
    yield made
    made.close()


def test_the_last_collective_of_each_group_is_read(table: RankTable, tmp_path: Path) -> None:
    rows = CollectiveRows(str(tmp_path), 1)
    first = Begun(1, 3, 100, "0", "", "allreduce", "8 float32", "<cell>")
    other = Begun(1, 4, 200, "g", "0-1", "barrier", "", "<cell>")
    later = Begun(2, 5, 300, "0", "", "broadcast", "8 float32", "é.py")
    for begun in (first, other, later):
        rows.write(begun)
    assert table.begun(1) == [later, other]
    assert table.begun(0) == []
    table.clear_begun(1)
    assert table.begun(1) == []


def test_a_name_that_cannot_be_encoded_leaves_the_row_readable(table: RankTable, tmp_path: Path) -> None:
    CollectiveRows(str(tmp_path), 0).write(Begun(1, 2, 3, "0", file="\udc80.py"))
    assert table.begun(0) == [Begun(1, 2, 3, "0", file="?.py")]


def test_groups_beyond_the_rows_replace_the_one_used_first(table: RankTable, tmp_path: Path) -> None:
    rows = CollectiveRows(str(tmp_path), 0)
    rows.write(Begun(1, 0, 1, "0"))
    for number in range(2, 2 * ROWS, 2):
        rows.write(Begun(1, 0, number, f"group {number}"))
        rows.write(Begun(number, 0, number + 1, "0"))
    found = [each.group for each in table.begun(0)]
    assert found[:3] == ["0", f"group {2 * ROWS - 2}", f"group {2 * ROWS - 4}"]
    assert len(found) == ROWS


def test_a_row_is_never_read_in_the_middle_of_a_write(table: RankTable, tmp_path: Path) -> None:
    rows, over = CollectiveRows(str(tmp_path), 0), threading.Event()

    def write() -> None:
        number = 0
        while not over.is_set():
            number += 1
            rows.write(Begun(number, number, number, "0", "", f"call {number}"))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        found = [each for _ in range(2000) for each in table.begun(0)]
    finally:
        over.set()
        thread.join()
    assert found
    assert all(each.count == each.line == each.time_ns and each.call == f"call {each.count}" for each in found)


def test_a_table_that_does_not_fit_on_the_disk_is_refused(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # as a disk that is full after one page
    try:
        with pytest.raises(OSError, match="No space left"):
            RankTable(str(tmp_path), 64)
        assert (tmp_path / "table").stat().st_size == 4096
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


# ------------------------------------------------------------------ what is dropped
def test_a_rank_and_its_children_set_flags_of_their_own_without_room(table: RankTable, tmp_path: Path) -> None:
    before = (tmp_path / "table").stat().st_size
    first, last = Drops(str(tmp_path), 0), Drops(str(tmp_path), 2)
    CollectiveRows(str(tmp_path), 1).write(Begun(1, 2, 3))
    first.note("output", errno.ENOSPC)
    child = os.fork()
    if not child:
        first.note("reports", errno.EDQUOT)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    last.note("output", 0)
    assert [table.dropped(rank) for rank in range(3)] == [Dropped(True, True, errno.EDQUOT), Dropped(), Dropped(True)]
    assert (table.dropped(0).what, table.dropped(0).why) == ("output and reports", os.strerror(errno.EDQUOT))
    assert (table.dropped(2).what, table.dropped(2).why) == ("output", "NBLAUNCH_MAX_LOG_BYTES")
    table.clear_dropped(0)
    assert not table.dropped(0)
    assert (tmp_path / "table").stat().st_size == before
    Drops(str(tmp_path / "no such folder"), 0).note("output", errno.ENOSPC)


@pytest.mark.parametrize(
    ("env", "limit"),
    [({}, 10**9), ({"NBLAUNCH_MAX_LOG_BYTES": "1000"}, 1000), ({"NBLAUNCH_MAX_LOG_BYTES": "0"}, None)],
)
def test_a_log_has_a_limit_unless_it_is_0(env: dict[str, str], limit: int | None) -> None:
    assert log_limit(env) == limit


@pytest.mark.parametrize("chosen", ["1 GB", "-1", "1e9"])
def test_a_limit_that_is_no_number_is_named(chosen: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"NBLAUNCH_MAX_LOG_BYTES={chosen!r}: must be a number of bytes")):
        log_limit({"NBLAUNCH_MAX_LOG_BYTES": chosen})
