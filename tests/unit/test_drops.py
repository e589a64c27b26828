"""Dropped output: noted without disk space, and worded for users."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nblaunch.errors import ArgumentError
from nblaunch.wire.drops import Dropped, Drops, Table, log_limit


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    table = Table(str(tmp_path), ranks=3)
    yield table
    table.close()


def test_a_rank_and_its_children_set_flags_of_their_own_without_room(table: Table, tmp_path: Path) -> None:
    before = (tmp_path / "drops").stat().st_size
    first, last = Drops(str(tmp_path), 0), Drops(str(tmp_path), 2)
    first.note("output", errno.ENOSPC)
    child = os.fork()
    if not child:
        first.note("reports", errno.EDQUOT)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    last.note("output", 0)
    assert [table.read(rank) for rank in range(3)] == [Dropped(True, True, errno.EDQUOT), Dropped(), Dropped(True)]
    assert (table.read(0).what, table.read(0).why) == ("output and reports", os.strerror(errno.EDQUOT))
    assert (table.read(2).what, table.read(2).why) == ("output", "NBLAUNCH_MAX_LOG_BYTES")
    table.clear(0)
    assert not table.read(0)
    assert (tmp_path / "drops").stat().st_size == before
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
