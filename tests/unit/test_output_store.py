"""What ranks display on its way to the page and into the record: parts, replacements, limits."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from nblaunch.launch.views import Displays, Output
from nblaunch.notebook import output_store
from nblaunch.notebook.output_store import OutputStore, content_of


def text(key: str, body: str, size: int | None = None) -> Output:
    return Output(key, "text/plain", body, len(body) if size is None else size, body)


def page_of(store: OutputStore, most: int = 1000) -> dict[int, Any]:
    """What a page has after all parts: contents by number."""
    found: dict[int, bytes] = {}
    while store.has_more:
        parts, data = store.take(most)
        assert len(data) <= most
        at = 0
        for part in parts:
            piece = data[at : at + part.size]
            at += part.size
            found[part.number] = (found.get(part.number, b"") if part.offset else b"") + piece
            assert len(found[part.number]) == part.offset + part.size <= part.total
    return {number: json.loads(data) for number, data in found.items()}


def bodies(store: OutputStore, most: int = 1000) -> list[str]:
    return [content["body"] for content in page_of(store, most).values()]


def test_the_page_gets_each_output_once_in_parts() -> None:
    store = OutputStore()
    entry = store.add(Displays(1, [text("1-1", "a" * 300), text("1-2", "b")]))
    assert (entry.rank, list(entry.numbers), entry.left_out) == (1, [1, 2], 0)
    assert bodies(store, 50) == ["a" * 300, "b"]
    assert not store.has_more


def test_a_replaced_output_keeps_its_place_and_gets_a_new_number() -> None:
    store = OutputStore()
    store.add(Displays(0, [text("1-1", "old"), text("1-2", "second")]))
    entry = store.add(Displays(0, [text("1-1", "new")]))
    assert list(entry.numbers) == [3, 2]
    assert bodies(store) == ["second", "new"]  # the old one is not sent any more


def test_a_page_that_reloads_gets_everything_again() -> None:
    store = OutputStore()
    store.add(Displays(0, [text("1-1", "a" * 500)]))
    assert store.take(20)[0][0][:3] == (1, 0, 20)
    store.rewind()
    assert bodies(store) == ["a" * 500]
    store.rewind()
    assert bodies(store) == ["a" * 500]


def test_outputs_beyond_the_limit_of_the_page_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_store, "MAX_PAGE_BYTES", 10)
    store = OutputStore()
    entry = store.add(Displays(0, [text("1-1", "a" * 8), text("1-2", "b" * 8), text("1-3", "c")], left_out=5))
    assert (list(entry.numbers), entry.left_out) == ([1, 2], 6)
    assert bodies(store) == ["a" * 8, "c"]
    assert store.add(Displays(0, [text("1-2", "b")])).left_out == 5


# ------------------------------------------------------------------ what is shown
def test_an_image_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(b"png")
    output = Output("1-1", "image/png", "<Figure>", 3, path, width=40)
    content = content_of(output)
    assert (content.kind, content.text, content.width) == ("image", "<Figure>", 40)
    assert content.body == f"data:image/png;base64,{base64.b64encode(b'png').decode()}"
    path.unlink()
    assert (content_of(output).kind, content_of(output).body) == ("text", "<Figure>")


def test_html_is_made_safe_and_becomes_text_if_nothing_is_left() -> None:
    html = Output("1-1", "text/html", "a table", 20, "<b onclick=x>hi</b><script>1</script>")
    assert (content_of(html).kind, content_of(html).body) == ("html", "<b>hi</b>")
    plot = Output("1-1", "text/html", "a plot", 20, "<div id=p></div><script>draw()</script>")
    assert (content_of(plot).kind, content_of(plot).body) == ("text", "a plot")


@pytest.mark.parametrize("mime", ["text/markdown", "text/latex", "text/plain"])
def test_markdown_and_latex_are_shown_as_their_source(mime: str) -> None:
    content = content_of(Output("1-1", mime, "<Markdown object>", 5, "**x**"))
    assert (content.kind, content.body) == ("text", "**x**")


# ------------------------------------------------------------------ the record
def test_the_record_has_the_outputs_by_rank() -> None:
    store = OutputStore()
    store.add(Displays(1, [text("2-1", "one")]))
    store.add(Displays(0, [text("1-1", "zero"), text("1-2", "more")]))
    assert store.fits_record
    assert [(each.rank, [c.body for c in each.contents], each.left_out) for each in store.for_record()] == [
        (0, ["zero", "more"], 0),
        (1, ["one"], 0),
    ]


def test_the_record_shares_its_room_and_counts_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_store, "MAX_RECORD_BYTES", 100)
    store = OutputStore()
    store.add(Displays(0, [text(f"1-{n}", "x" * 30) for n in range(9)], left_out=2))
    store.add(Displays(1, [text("2-1", "y" * 30)]))
    assert not store.fits_record
    assert [(each.rank, len(each.contents), each.left_out) for each in store.for_record()] == [(0, 2, 9), (1, 1, 0)]
