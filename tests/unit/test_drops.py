"""Dropped output: counted without disk space, and worded for users."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nblaunch.errors import ArgumentError
from nblaunch.wire.drops import Counter, Dropped, Table, log_limit


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    table = Table(str(tmp_path), ranks=3)
    yield table
    table.close()


def test_each_rank_has_counters_of_its_own(table: Table, tmp_path: Path) -> None:
    first, last = Counter(str(tmp_path), 0), Counter(str(tmp_path), 2)
    first.add("out", 100, errno.ENOSPC)
    first.add("err", 20, errno.ENOSPC)
    first.add("reports", 3, errno.ENOSPC)
    last.add("out", 1, 0)
    assert table.read(0) == Dropped(120, 3, errno.ENOSPC)
    assert not table.read(1)
    assert table.read(2) == Dropped(1, 0, 0)


def test_forked_children_add_to_the_counters_of_their_rank(table: Table, tmp_path: Path) -> None:
    counter = Counter(str(tmp_path), 1)
    counter.add("out", 1, errno.ENOSPC)
    for _ in range(5):
        child = os.fork()
        if not child:
            counter.add("out", 10, errno.ENOSPC)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    counter.add("out", 1, errno.ENOSPC)
    assert table.read(1) == Dropped(52, 0, errno.ENOSPC)


def test_counting_takes_no_room(table: Table, tmp_path: Path) -> None:
    before = (tmp_path / "drops").stat().st_size
    Counter(str(tmp_path), 2).add("out", 1 << 40, errno.ENOSPC)
    assert (tmp_path / "drops").stat().st_size == before
    assert table.read(2).output == 1 << 40


def test_a_failed_count_raises_nothing(tmp_path: Path) -> None:
    Counter(str(tmp_path / "no such folder"), 0).add("out", 1, errno.ENOSPC)


@pytest.mark.parametrize(
    ("dropped", "amount", "why"),
    [
        (Dropped(1234, 0, errno.ENOSPC), "1 KB of output", "No space left on device"),
        (Dropped(0, 1, errno.EDQUOT), "1 report", os.strerror(errno.EDQUOT)),
        (Dropped(5_000_000, 2000, 0), "5 MB of output and 2,000 reports", "NBLAUNCH_MAX_LOG_BYTES"),
    ],
)
def test_drops_are_described_in_words(dropped: Dropped, amount: str, why: str) -> None:
    assert (dropped.amount, dropped.why) == (amount, why)


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
