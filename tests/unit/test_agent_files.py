"""What an agent sends of its ranks' files: complete, in order, and in few messages."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nblaunch.engines.agent import AgentFiles, AgentFolder
from nblaunch.engines.link import PART_BYTES, Message
from nblaunch.wire import launch_files
from nblaunch.wire.launch_files import output_file, rank_file
from nblaunch.wire.link_messages import Written


@pytest.fixture
def files(tmp_path: Path) -> Iterator[AgentFiles]:
    made = AgentFiles(tmp_path, "a-group")
    yield made
    made.close()


def test_the_next_agent_removes_what_a_killed_one_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    living, killed = AgentFolder(), AgentFolder()
    AgentFiles(killed.path, "a-group").directory("/kernel")
    assert killed._lock is not None
    launch_files.release_lock(killed._lock)
    AgentFolder().close()
    assert set(tmp_path.iterdir()) == {living.path}
    living.close()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_someone_removes_is_made_again() -> None:
    folder = AgentFolder()
    shutil.rmtree(folder.path)
    AgentFiles(folder.path, "a-group").close()
    folder.close()
    assert not folder.path.exists()


def taken(messages: list[Message]) -> list[tuple[str, str, bytes]]:
    """The kernel's directory, file and bytes of each piece."""
    found = []
    for message, (data,) in messages:
        assert isinstance(message, Written)
        rest = bytes(data)
        for file, size in message.files:
            found.append((message.log_dir, file, rest[:size]))
            rest = rest[size:]
        assert not rest
    return found


def test_lines_of_all_ranks_share_a_message(files: AgentFiles) -> None:
    directory = files.directory("/kernel")
    for rank in range(8):
        rank_file(directory, rank, "out").write_text(f"a line of {rank}\n")
    messages = list(files.unsent(range(8)))
    assert len(messages) == 1
    assert taken(messages) == [("/kernel", f"rank{rank}.out", f"a line of {rank}\n".encode()) for rank in range(8)]
    assert not list(files.unsent(range(8)))


def test_messages_stay_small(files: AgentFiles) -> None:
    directory = files.directory("/kernel")
    written = {f"rank{rank}.out": bytes([rank]) * (PART_BYTES * 3 // 4) for rank in range(4)}
    written["rank4.out"] = bytes([4]) * (3 * PART_BYTES + 1)
    for name, data in written.items():
        (directory / name).write_bytes(data)
    messages = list(files.unsent(range(5)))
    assert max(len(data[0]) for _, data in messages) <= PART_BYTES
    copies: dict[str, bytes] = {}
    for _, file, data in taken(messages):
        copies[file] = copies.get(file, b"") + data
    assert copies == written


def test_a_display_comes_before_the_record_that_names_it(files: AgentFiles) -> None:
    directory = files.directory("/kernel")
    rank_file(directory, 0, "spool").write_text("a record\n")
    output_file(directory, 0, "1", "png").write_bytes(b"a figure")
    assert [file for _, file, _ in taken(list(files.unsent([0])))] == ["rank0-output1.png", "rank0.spool"]


def test_a_message_is_of_one_task(files: AgentFiles) -> None:
    for log_dir in ("/first", "/second"):
        rank_file(files.directory(log_dir), 0, "out").write_text(log_dir)
    messages = list(files.unsent([0]))
    assert len(messages) == 2
    assert taken(messages) == [("/first", "rank0.out", b"/first"), ("/second", "rank0.out", b"/second")]
