"""HTML that ranks display: what is kept, and that nothing gets through that runs or loads."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch.notebook.safe_html import _ATTRIBUTES, _ELEMENTS, MAX_BYTES, safe_html

PNG = "data:image/png;base64,iVBORw0KGgo="


# ------------------------------------------------------------------ what stays
@pytest.mark.parametrize(
    "html",
    [
        "<h2>A <em>title</em></h2><p>text<br>more</p>",
        '<table border="1" class="dataframe"><tbody><tr><td>1</td></tr></tbody></table>',
        "<ul><li>one</li></ul><pre><code>x &lt; y &amp; z</code></pre>",
        '<span style="color:#ff0000;font-weight:bold">red</span>',
        '<div style="background:linear-gradient(90deg, #d65f5f 50.0%, transparent 50.0%)">bar</div>',
        f'<img alt="dot" width="3" src="{PNG}">',
        "<details><summary>more</summary>less</details>",
    ],
)
def test_harmless_html_stays_as_it_is(html: str) -> None:
    assert safe_html(html) == html


def test_a_link_opens_a_page_of_its_own() -> None:
    link = '<a href="https://x.org/?a=1&amp;b=2" rel="noopener noreferrer" target="_blank">x</a>'
    assert safe_html('<a onclick="go()" href="https://x.org/?a=1&b=2">x</a>') == link


def test_a_table_of_pandas_keeps_its_cells_and_its_class() -> None:
    html = pd.DataFrame({"loss": [0.5, 0.25]})._repr_html_()
    safe = safe_html(html)
    assert '<table border="1" class="dataframe">' in safe
    assert re.findall(r"<t[hd]>([^<]*)</t[hd]>", safe) == ["", "loss", "0", "0.50", "1", "0.25"]
    assert "tbody tr th" not in safe  # the style sheet


def test_colours_of_a_pandas_styler_become_the_cells_own() -> None:
    rules = "#T_1_row0_col0, #T_1_row1_col0 { background-color: #ffff00; } td { color: red; }"
    sheet = f"<style type='text/css'>{rules}</style>"
    safe = safe_html(f'{sheet}<table><tr><td id="T_1_row0_col0" class="data">1</td><td>2</td></tr></table>')
    assert safe == '<table><tr><td style="background-color:#ffff00">1</td><td>2</td></tr></table>'


# ------------------------------------------------------------------ what goes
@pytest.mark.parametrize(
    ("html", "safe"),
    [
        ("a<script>alert(1)</script>b", "ab"),
        ("a<script>alert(1)", "a"),
        ("<b onclick='alert(1)' onmouseover=alert(1)>x</b>", "<b>x</b>"),
        ("<a href='javascript:alert(1)'>x</a>", "<a>x</a>"),
        ("<a href=' java\nscript:alert(1)'>x</a>", "<a>x</a>"),
        ("<img src='https://x.org/y.png' onerror=alert(1)>x", "x"),
        ("<img src='data:text/html;base64,AAAA'>x", "x"),
        ("<iframe src='https://x.org'>inside</iframe>x", "x"),
        ("<object data=x><embed src=y>z</object>x", "x"),
        ("<svg onload=alert(1)><circle/></svg>x", "x"),
        ("<math><mi href='javascript:1'>y</mi></math>x", "x"),
        ("<link rel=stylesheet href=x><meta http-equiv=refresh content=0><base href=//x.org>x", "x"),
        ("<form action=//x.org><input name=a><button>go</button></form>", "go"),
        ("<p style='background:url(//x.org/a.png)'>x</p>", "<p>x</p>"),
        ("<p style='color:red;position:fixed;top:0'>x</p>", '<p style="color:red">x</p>'),
        ("<p style='margin-top:-500px'>x</p>", "<p>x</p>"),
        ("<p style='width:expression(alert(1))'>x</p>", "<p>x</p>"),
        ("<p style='color:\\72 ed'>x</p>", "<p>x</p>"),
        ("<p id=x name=y class='nblaunch-1 jp-Button dataframe'>x</p>", '<p class="dataframe">x</p>'),
        ("</div></div><b>x", "<b>x</b>"),
        ("<!-- <script> --><!DOCTYPE html><?php x ?>x", "x"),
        (
            "<b title='\"><script>alert(1)</script>'>x</b>",
            '<b title="&quot;&gt;&lt;script&gt;alert(1)&lt;/script&gt;">x</b>',
        ),
        ("&lt;script&gt;alert(1)&lt;/script&gt;", "&lt;script&gt;alert(1)&lt;/script&gt;"),
    ],
)
def test_markup_that_runs_loads_or_covers_the_page_is_removed(html: str, safe: str) -> None:
    assert safe_html(html) == safe


@pytest.mark.parametrize(
    "html", ["<div id='plot'></div><script>draw()</script>", "", " <p> </p>", "x" * (MAX_BYTES + 1)]
)
def test_html_that_shows_nothing_is_empty(html: str) -> None:
    assert safe_html(html) == ""


PIECES = st.sampled_from([
    "<", ">", "/", "'", '"', "=", " ", "\n", "&lt;", "&#60;", "<!--", "-->", "<b ", "<script", "</script>",
    "<style>", "</style>", "<svg>", "<img src=", "onerror=alert(1)", "javascript:", "style=", "url(", "x", "</b>",
    "<table>", "]]>",
])  # fmt: skip


class _Checker(HTMLParser):
    """Asserts that all markup is on the lists, and closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in _ELEMENTS
        assert {name for name, _ in attrs} <= _ATTRIBUTES | {"src", "href", "rel", "target", "class", "style"}
        if tag not in ("br", "col", "hr", "img", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)


@given(st.lists(PIECES, max_size=30).map("".join))
def test_any_text_becomes_listed_markup_that_is_closed(html: str) -> None:
    checker = _Checker()
    safe = safe_html(html)
    checker.feed(safe)
    checker.close()
    assert checker.open == []
    assert safe_html(safe) == safe
