"""What a rank displays becomes records and files, within limits."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nblaunch.launch.output.follower import displays_in
from nblaunch.launch.views import Displays
from nblaunch.ranks import rank_display
from nblaunch.ranks.rank_display import clear, finish, publish
from nblaunch.ranks.report import Context, enter
from nblaunch.wire import display_records
from nblaunch.wire.launch_files import output_file
from tests.unit.fake_engine import FakeWorker

PNG = base64.b64encode(b"\x89PNG").decode()


@pytest.fixture
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A rank's log directory; what it displays is spooled there."""
    monkeypatch.setattr(rank_display, "_outputs", rank_display._Outputs())
    fd = os.open(tmp_path / "rank0.spool", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    enter(Context(0, 0, 1, "cpu", fd, str(tmp_path)))
    yield tmp_path
    enter(None)
    os.close(fd)


def records(spool: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (spool / "rank0.spool").read_text().splitlines()]


class Displaying(FakeWorker):
    """Rank 0, whose bodies are in files."""

    def __init__(self, spool: Path) -> None:
        super().__init__(0)
        self.folder = spool

    def output(self, key: str, mime: str) -> Path:
        return output_file(self.folder, 0, key, display_records.SUFFIXES[mime])


def shown(spool: Path) -> Displays:
    found = displays_in(Displaying(spool), records(spool))
    assert found is not None
    return found


def texts(spool: Path) -> list[str]:
    return [output.text for output in shown(spool).outputs]


def show(text: str, display_id: str = "", update: bool = False) -> None:
    publish({"text/plain": text}, {}, display_id, update=update)


def files(spool: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(spool.glob("rank0-output*"))]


def test_the_most_expressive_type_is_sent_with_its_text(spool: Path) -> None:
    publish({"text/plain": "a table", "text/html": "<b>a</b>", "application/x-other": {}}, {})
    (output,) = shown(spool).outputs
    assert (output.mime, output.body, output.text) == ("text/html", "<b>a</b>", "a table")


@pytest.mark.parametrize("value", [PNG, b"\x89PNG"])
def test_an_image_goes_into_a_file(spool: Path, value: object) -> None:
    publish({"image/png": value, "text/plain": "<Figure>"}, {"image/png": {"width": 40.0, "height": "x"}})
    (output,) = shown(spool).outputs
    assert isinstance(output.body, Path)
    assert output.body.read_bytes() == b"\x89PNG"
    assert (output.text, output.width, output.height) == ("<Figure>", 40, None)


@pytest.mark.parametrize(
    ("bundle", "text"),
    [
        ({"application/json": {"a": [1]}, "text/plain": "<JSON>"}, '{\n  "a": [\n    1\n  ]\n}'),
        ({"application/vnd.jupyter.widget-view+json": {}, "text/plain": "IntSlider()"}, "IntSlider()"),
        ({"application/x-plot": {}}, "<application/x-plot>"),
        ({"image/png": "no base64!", "text/plain": "<Image>"}, "<Image>"),
    ],
)
def test_other_types_become_text(spool: Path, bundle: dict[str, Any], text: str) -> None:
    publish(bundle, {})
    assert [(output.mime, output.body) for output in shown(spool).outputs] == [("text/plain", text)]


def test_an_update_replaces_all_outputs_with_its_id(spool: Path) -> None:
    show("a", "x")
    show("b")
    show("c", "x")
    show("new", "x", update=True)
    show("of no output", "y", update=True)
    assert texts(spool) == ["new", "b", "new"]


def test_clear_removes_outputs_and_their_files(spool: Path) -> None:
    publish({"image/png": PNG}, {})
    clear(wait=False)
    show("new")
    assert (shown(spool).is_cleared, texts(spool), files(spool)) == (True, ["new"], [])


def test_clear_that_waits_keeps_the_outputs_until_the_next(spool: Path) -> None:
    show("old")
    clear(wait=True)
    assert texts(spool) == ["old"]
    show("new")
    assert texts(spool) == ["new"]


def test_a_flood_is_left_out_counted_and_spools_little(spool: Path) -> None:
    for number in range(5000):
        show(str(number))
    finish()
    assert texts(spool) == [str(number) for number in range(display_records.MAX_OUTPUTS)]
    assert shown(spool).left_out == 5000 - display_records.MAX_OUTPUTS
    assert len(records(spool)) < display_records.MAX_OUTPUTS + 20


def test_an_output_that_is_too_large_is_shown_as_text(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display_records, "MAX_OUTPUT_BYTES", 1000)
    publish({"text/html": "<b>" * 1000, "text/plain": "big"}, {})
    assert [(output.mime, output.text) for output in shown(spool).outputs] == [("text/plain", "big")]


def test_updates_without_end_are_bounded(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display_records, "MAX_SPOOLED_BYTES", 20_000)
    show("first", "x")
    for number in range(1000):
        show(str(number), "x", update=True)
    finish()
    assert (spool / "rank0.spool").stat().st_size < 25_000
    assert shown(spool).left_out
