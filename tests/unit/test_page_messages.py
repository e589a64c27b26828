"""The messages between panel and page: their JSON, and malformed messages of a page."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nblaunch.notebook.page_messages import (
    Changes,
    Delta,
    FromPage,
    LineEntry,
    LogEnd,
    LogPart,
    PointEntry,
    Request,
    Resync,
    StateEntry,
    from_content,
    to_content,
)


def test_a_message_has_the_parts_that_are_set() -> None:
    state = StateEntry("running", countdown="", attempt=0, log_dir="/logs", seconds=None, message="")
    changes = Changes(state=state, metrics=[PointEntry("loss", 0, 1.0, None, 0)])
    content = to_content(
        Delta(seq=3, now=1.5, changes=changes, logs=[LogPart(0, 1, "out", 5, [LineEntry(1.25, "x")], [])])
    )
    assert json.loads(json.dumps(content)) == {
        "kind": "delta",
        "seq": 3,
        "now": 1.5,
        "changes": {
            "state": {
                "name": "running",
                "countdown": "",
                "attempt": 0,
                "log_dir": "/logs",
                "seconds": None,
                "message": "",
            },
            "metrics": [["loss", 0, 1.0, None, 0]],
        },
        "logs": [{"attempt": 0, "rank": 1, "stream": "out", "first": 5, "lines": [[1.25, "x"]], "open": []}],
    }
    assert to_content(Delta(seq=4, now=2.0)) == {"kind": "delta", "seq": 4, "now": 2.0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"kind": "stop", "launch": "L1"}, Request("stop", "L1")),
        (
            {"kind": "resync", "request": 4, "logs": [[0, 1, "err", 9]]},
            Resync(request=4, logs=[LogEnd(0, 1, "err", 9)]),
        ),
        ({"kind": "record", "launch": "L1"}, Request("record", "L1")),
        ({"kind": "look", "launch": "L1", "rank": 1}, Request("look", "L1", 1)),
    ],
)
def test_the_messages_of_a_page_are_read(content: dict[str, Any], message: FromPage) -> None:
    assert from_content(content) == message


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"kind": ["stop"]},
        {"kind": "stop"},
        {"kind": "resync", "request": 1},
        {"kind": "resync", "request": 1, "logs": [[0, 1]]},
        {"kind": "look", "launch": "L1", "rank": -1},
    ],
)
def test_a_malformed_message_is_none(content: dict[str, Any]) -> None:
    assert from_content(content) is None
