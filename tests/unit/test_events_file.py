"""The events of a launch in a file: read as they were written, by a reader that follows, and after a full disk."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from nblaunch.launch.events_file import EVENTS, EventsFile, EventsReader, ends_of, from_line, to_line
from nblaunch.launch.views import (
    Begun,
    Countdown,
    Displays,
    Ended,
    Event,
    Failure,
    LaunchInfo,
    LogLines,
    Logs,
    Note,
    Outcome,
    Preparing,
    RanksChanged,
    RanksPlaced,
    RankStatus,
    Reports,
    StacksShown,
    Started,
    Stuck,
    Tick,
)

INFO = LaunchInfo(
    "4-1-a", "train, run r", 3, "cuda", Path("/logs/r"), 2, is_session=True, hosts=["a", "b"], only=[0, 2]
)
FAILURE = Failure(1, "ValueError", "no", "Cell In[3], line 4", "x = 1", "Traceback …", ("rank 0 died",), "more")
NEVER: Any = None


def record(step: int) -> dict[str, Any]:
    return {"time": 5.5, "step": step, "metrics": {"loss": 0.25}}


def content(event: Event) -> Any:
    """Return what an event says, without what only its writer can use."""
    said = asdict(event)  # type: ignore[call-overload]  # each event is a dataclass
    if "info" in said:
        del said["info"]["env"], said["info"]["files"]
    if isinstance(event, Preparing):
        said["cancel"] = event.cancel is not None
    return json.loads(json.dumps(said, default=str))


# ------------------------------------------------------------------ lines
@pytest.mark.parametrize(
    "event",
    [
        Preparing("waiting for Slurm job 7"),
        Preparing("waiting for Slurm job 7", lambda: None),
        Started(INFO),
        Started(LaunchInfo("4-1-a", "train", 1, "cpu", Path("/logs/r"))),
        RanksChanged([RankStatus(0, "starting", 0), RankStatus(1, "running", 77)]),
        Note("rank 0 raised ÄÖÜ \N{SNOWMAN}\nin two lines"),
        Stuck(["rank 0 waits"], [0]),
        Stuck(),
        Countdown("killed in 3 s"),
        StacksShown({0: "a stack", 10: "another"}),
        Reports(1, [record(4)], is_printed=True),
        Ended(Outcome("finished", 3.25, "")),
        Ended(Outcome("failed", 3.25, "rank 1 failed", FAILURE, at=1e9)),
    ],
    ids=lambda event: type(event).__name__,
)
def test_an_event_is_read_as_it_was_written(event: Event) -> None:
    line = to_line(event, 12.3456)
    assert line is not None
    assert line.count(b"\n") == 1
    read = from_line(line)
    assert read is not None
    assert read[0] == 12.346
    assert type(read[1]) is type(event)
    assert content(read[1]) == content(event)


def test_what_other_files_have_is_not_written() -> None:
    elsewhere = [
        Begun(NEVER, False, lambda: 0.0),
        RanksPlaced(NEVER),
        Logs([LogLines(0, "out", "rank0.out", ["a line"])]),
        Reports(0, [record(1)]),
        Displays(0, []),
        Tick(),
    ]
    assert [to_line(event, 1.0) for event in elsewhere] == [None] * len(elsewhere)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b'{"at": 1.0, "event": "No',
        b"\0\0\0\n",
        b"[]\n",
        b'{"event": "Note", "text": "no time"}\n',
        b'{"at": 1.0, "event": "OfTheNextVersion", "text": ""}\n',
        b'{"at": 1.0, "event": "Note", "text": "", "new_field": 1}\n',
        b'{"at": 1.0, "event": "Started", "launch_id": "a"}\n',
        b'{"at": 1.0, "event": "Ended", "outcome": {}}\n',
    ],
)
def test_a_torn_line_or_one_of_another_version_is_passed_over(line: bytes, tmp_path: Path) -> None:
    assert from_line(line) is None
    whole = to_line(Note("after it"), 2.0)
    assert whole is not None
    (tmp_path / EVENTS).write_bytes(line.rstrip(b"\n") + b"\n" + whole)
    assert [event for _, event in EventsReader(tmp_path).read()] == [Note("after it")]
    assert [event for _, event in ends_of(tmp_path)] == [Note("after it")]


# ------------------------------------------------------------------ files
def test_a_reader_follows_the_writer(tmp_path: Path) -> None:
    reader, file = EventsReader(tmp_path), EventsFile(lambda info: tmp_path)
    assert [*reader.read()] == []
    file.on(Note("before there is a folder"))
    file.open(tmp_path)
    file.on(Note("one"))
    file.on(Note("two"))
    assert [event for _, event in reader.read()] == [Note("one"), Note("two")]
    line = to_line(Note("three"), 3.0)
    assert line is not None
    with (tmp_path / EVENTS).open("ab", buffering=0) as half:
        half.write(line[:9])
        assert [*reader.read()] == []
        half.write(line[9:])
    assert [*reader.read()] == [(3.0, Note("three"))]
    assert [*reader.read()] == []


def test_a_countdown_is_written_when_it_changes(tmp_path: Path) -> None:
    file = EventsFile(lambda info: tmp_path)
    file.open(tmp_path)
    for text in ("killed in 2 s", "killed in 2 s", "killed in 1 s", "killed in 1 s", ""):
        file.on(Countdown(text))
    assert [content(event)["text"] for _, event in ends_of(tmp_path)] == ["killed in 2 s", "killed in 1 s", ""]


def test_an_attempt_with_a_folder_of_its_own_ends_the_one_before(tmp_path: Path) -> None:
    file = EventsFile(lambda info: info.log_dir)
    folders = [tmp_path / "first", tmp_path / "second"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        file.on(Started(LaunchInfo("a", "train", 1, "cpu", folder, number)))
    (_, first), (_, end) = ends_of(folders[0])
    assert isinstance(first, Started)
    assert isinstance(end, Ended)
    assert (end.outcome.state, end.outcome.message) == ("failed", f"its ranks were restarted: see {folders[1]}")
    assert [type(event) for _, event in ends_of(folders[1])] == [Started]


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Let this process write files up to this size: the system writes a part, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_the_events_of_that_time_and_no_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, reader = EventsFile(lambda info: tmp_path), EventsReader(tmp_path)
    file.open(tmp_path)
    file.on(Note("before"))
    with room_for((tmp_path / EVENTS).stat().st_size + 20):
        file.on(Note("torn"))
        file.on(Note("nothing of it"))
    assert [event for _, event in reader.read()] == [Note("before")]
    assert "lacks events" in caplog.text
    file.on(Note("after"))
    file.on(Note("at the end"))
    assert [event for _, event in reader.read()] == [Note("after"), Note("at the end")]


def test_the_ends_of_a_long_file_are_read_alone(tmp_path: Path) -> None:
    file = EventsFile(lambda info: tmp_path)
    file.open(tmp_path)
    for number in range(100):
        file.on(Note(f"note {number}"))
    texts = [content(event)["text"] for _, event in ends_of(tmp_path, most=300)]
    assert texts[0] == "note 0"
    assert texts[-1] == "note 99"
    assert 4 <= len(texts) <= 10
    assert texts == sorted(texts, key=lambda text: int(text[5:]))
    assert ends_of(tmp_path / "nowhere") == []
    size = (tmp_path / EVENTS).stat().st_size
    for most in range(size // 2, size // 2 + 100):  # no line is torn where both ends meet
        assert len(ends_of(tmp_path, most)) >= 99
