"""The record of a launch in a saved notebook."""

from __future__ import annotations

import base64
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nblaunch.launch.views import Failure
from nblaunch.notebook.charts import PART_STROKES, Point
from nblaunch.notebook.record import RankTail, Record, as_html, as_text

DETERMINISTIC = settings(derandomize=True, deadline=None)
LOGS = "/logs/20261121-train"
ACCURACY = {rank: [(float(epoch), 0.9 + epoch / 100 + rank / 1000) for epoch in range(5)] for rank in range(2)}
FINISHED = Record(
    name="train",
    state="finished",
    seconds=12.34,
    message="",
    ranks="2 ranks",
    device="cpu",
    ended_at=1_795_254_000.0,
    metrics={"loss": {0: [(0, 2.0), (1, 1.0)], 1: [(0, 2.0), (1, 1.0)]}, "accuracy": ACCURACY},
    tails=[RankTail(rank, (f"hello from {rank}", "bye"), False, f"{LOGS}/rank{rank}.out") for rank in range(2)],
    notes=[],
    failure=None,
    log_dir=LOGS,
    charts=[["loss"], ["accuracy"]],
)
FAILURE = Failure(
    rank=1,
    type_name="ValueError",
    message="no such class: 12",
    where="Cell In[3], line 4",
    source="loss = criterion(logits, labels)",
    traceback="Traceback (most recent call last):\n  Cell In[3], line 4, in train\nValueError: no such class: 12\n",
    others=("rank 0: RuntimeError: Connection closed by peer",),
)
FAILED = replace(FINISHED, state="failed", message="rank 1: ValueError", failure=FAILURE)

HEX = "#[0-9a-f]{3,6}"
RGBA = r"rgba\(\d+,\d+,\d+,0?\.\d+\)"
LENGTHS = r"(\d+px|0|auto)( (\d+px|0|auto))*"
SURVIVES = {
    "background": f"transparent|{HEX}|{RGBA}",
    "border": f"1px solid {RGBA}",
    "border-left": f"4px solid {HEX}",
    "border-radius": LENGTHS,
    "box-sizing": "border-box",
    "color": HEX,
    "cursor": "pointer",
    "display": "block|inline-block",
    "font-size": LENGTHS,
    "height": "auto",
    "line-height": r"\d\.\d",
    "margin": LENGTHS,
    "margin-top": LENGTHS,
    "max-width": "100%",
    "opacity": r"0\.\d",
    "overflow-wrap": "break-word",
    "overflow-x": "auto",
    "padding": LENGTHS,
    "text-transform": "capitalize",
    "vertical-align": "top",
    "white-space": "pre-wrap|nowrap",
    "width": LENGTHS,
    "word-break": "normal",
}
"""Of the styles that JupyterLab 4.6 leaves in a notebook that it does not trust, those used here."""
TAGS = {"div", "b", "span", "pre", "code", "details", "summary", "img"}
ATTRIBUTES = {
    "div": {"style", "class"},
    "img": {"style", "src", "alt", "width", "height"},
    "details": {"style", "open"},
}
HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(1)> ' ]]> &amp; $x$ \ud800\x00\x9b\ufffe"


class Page(HTMLParser):
    """A page that holds only what is allowed in it: tags in pairs, attributes and styles."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.text = ""
        self.images: list[ET.Element] = []
        self.alts: list[str] = []
        self.open: list[str] = []
        """The text of each part that is unfolded from the start."""
        self._stack: list[str] = []
        self._opened: list[int] = []
        self.feed(html)
        self.close()
        assert self._stack == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS
        assert {name for name, _ in attributes} <= ATTRIBUTES.get(tag, {"style"})
        values = dict(attributes)
        for style in filter(None, (values.get("style") or "").split(";")):
            name, _, value = style.partition(":")
            assert re.fullmatch(SURVIVES[name], value), style
        if tag == "img":
            self._image(values)
        else:
            assert ("class" in values) == (not self._stack)
            self._stack.append(tag)
            self._opened.append(len(self.text) if "open" in values else -1)

    def _image(self, values: dict[str, str | None]) -> None:
        head, _, data = (values["src"] or "").partition(",")
        assert head == "data:image/svg+xml;base64"
        image = ET.fromstring(base64.b64decode(data))
        self.images.append(image)
        self.alts.append(values["alt"] or "")

    def handle_endtag(self, tag: str) -> None:
        assert self._stack.pop() == tag
        start = self._opened.pop()
        if start >= 0:
            self.open.append(self.text[start:])
        self.text += "\n" if tag in ("div", "summary", "pre") else ""

    def handle_data(self, data: str) -> None:
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", data)
        self.text += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    def handle_decl(self, decl: str) -> None:
        raise AssertionError(decl)

    def handle_pi(self, data: str) -> None:
        raise AssertionError(data)

    def unknown_decl(self, data: str) -> None:
        raise AssertionError(data)


def page(record: Record) -> Page:
    return Page(as_html(record))


def text_of(record: Record) -> str:
    return as_text(as_html(record))


def measured(metrics: Mapping[str, Mapping[int, Sequence[Point]]]) -> Record:
    return replace(FINISHED, metrics=metrics, charts=[[name] for name in metrics])


def tail_of(*lines: str, more: bool = False) -> Record:
    return replace(FINISHED, metrics={}, ranks="1 rank", tails=[RankTail(0, lines, more, f"{LOGS}/rank0.out")])


# ------------------------------------------------------------------ how it went


def test_the_text_has_the_pages_words() -> None:
    first, *lines = text_of(FINISHED).splitlines()
    assert first.startswith("train ✓ Finished in 12.3 s · 2 ranks · cpu · 2026-11-2")
    assert lines == [
        *("loss 1 best 1", "━ mean ━ rank 0 ━ rank 1", "accuracy 0.9405 best 0.9405", "━ mean ━ rank 0 ━ rank 1"),
        *("rank 0", "hello from 0", "bye", "rank 1", "hello from 1", "bye", f"Logs: {LOGS}"),
    ]


@pytest.mark.parametrize(
    ("state", "seconds", "expected"),
    [
        ("running", 3.0, "Running for 3.0 s"),
        ("stopped", 75.2, "Stopped after 1 min 15 s"),
        ("finished", 0.04, "Finished in 40 ms"),
        ("finished", 3960.0, "Finished in 1 h 06 min"),
    ],
)
def test_each_state_says_how_long_it_took(state: str, seconds: float, expected: str) -> None:
    record = replace(FINISHED, state=state, seconds=seconds, ranks="1 rank")
    assert f"{expected} · 1 rank · cpu · 2026-" in page(record).text


def test_a_timeout_is_no_stop_by_hand() -> None:
    shown = page(replace(FINISHED, state="stopped", message="LaunchTimeoutError: train took longer than timeout=4 s."))
    assert "■ Timed out after 12.3 s" in shown.text


def test_the_parts_stand_in_the_order_of_the_panel() -> None:
    shown = page(replace(FAILED, notes=["restarting all ranks"])).text
    parts = ["✗ Failed", "Rank 1 failed", "accuracy 0.9405", "restarting all ranks", "hello from 1", f"Logs: {LOGS}"]
    found = [shown.index(part) for part in parts]
    assert found == sorted(found)


def test_a_launch_that_still_runs_has_the_date_of_the_record() -> None:
    assert "as of" not in page(FINISHED).text
    running = replace(FINISHED, state="running", ended_at=0.0)
    assert re.search(r"… Running for 12.3 s · .* · as of \d{4}-\d{2}-\d{2}", page(running).text)
    # the page's script looks for these two, see static/record.js
    assert as_html(running).startswith(f'<div class="nblaunch-{running.launch_id} nblaunch-running ')
    assert "… Running</b>" in as_html(running)


# ------------------------------------------------------------------ what failed
def test_a_failure_is_on_top_before_its_traceback() -> None:
    shown = page(FAILED).text
    parts = ["Rank 1 failed: ValueError: ", "no such class: 12", "Cell In[3], line 4", FAILURE.source, "Traceback"]
    parts += ["ValueError: no such class: 12", "Connection closed by peer", "accuracy", "hello from"]
    found = [shown.index(part) for part in parts[:-4]]
    found += [shown.index(part, found[-1]) for part in parts[-4:]]
    assert found == sorted(found)
    assert "rank 1: ValueError" not in shown  # the one line that the launch gives is not said twice


def test_the_failed_ranks_traceback_and_log_are_open_and_first() -> None:
    shown = page(FAILED)
    traceback, log = shown.open
    assert "Cell In[3], line 4, in train" in traceback
    assert "hello from 1" in log
    assert shown.text.index("hello from 1") < shown.text.index("hello from 0")


def test_a_failure_that_was_no_ranks_and_has_no_traceback() -> None:
    failure = Failure(-1, "RankLostError", "the reaper was killed", "", "", "", ())
    record = replace(FAILED, failure=failure)
    assert "The launch failed: RankLostError: the reaper was killed\n" in page(record).text
    assert page(record).open == []


def test_a_long_traceback_keeps_its_beginning_and_its_end() -> None:
    traceback = "\n".join(["Traceback:", *(f"  frame {i} {'x' * 90}" for i in range(1000)), "ValueError: it"])
    record = replace(FAILED, failure=replace(FAILURE, traceback=traceback))
    shown = page(record).text
    assert shown.index("Traceback:") < shown.index("frame 1 ") < shown.index("frame 999 ")
    assert "frame 500 " not in shown
    assert re.search(r"frame \d+ x+\n… \d+ lines omitted …\n  frame", shown)


# ------------------------------------------------------------------ what it measured
def test_each_metric_has_its_numbers_and_a_chart_that_is_also_words() -> None:
    shown = page(FINISHED)
    assert shown.text.index("loss 1 best 1") < shown.text.index("accuracy 0.9405 best 0.9405")
    assert [image.findtext("{http://www.w3.org/2000/svg}title") for image in shown.images] == ["loss", "accuracy"]
    assert shown.alts[1] == "chart of accuracy: latest 0.9405, best 0.9405, mean of 2 ranks"


VALIDATED = replace(
    FINISHED,
    metrics={
        "loss": {0: [(step, 2 - step / 100) for step in range(1, 101)]},
        "lr": {0: [(step, 3e-4 * step / 100) for step in range(1, 101)]},
        "samples_per_second": {0: [(step, 1200.0 + step % 3) for step in range(1, 101)]},
        "valid_loss": {0: [(25, 1.8), (50, 1.25), (75, 1.3), (100, 1.4)]},
    },
    charts=[("loss", "valid_loss"), ("lr",), ("samples_per_second",)],
    best={"valid_loss": (50.0, 1.25)},
)


def test_validation_is_a_dashed_line_with_its_best_step() -> None:
    shown = page(VALIDATED)
    assert len(shown.images) == 3
    assert shown.alts[0] == "chart of loss: latest 1, best 1; valid_loss: latest 1.4, best 1.25 at step 50"
    assert "valid_loss 1.4 best 1.25 at step 50" in shown.text
    svg = ET.tostring(shown.images[0], encoding="unicode")
    assert svg.count("stroke-dasharray") == 1
    assert f'<span style="color:{PART_STROKES["valid"].colour}">╍</span>' in as_html(VALIDATED)
    assert svg.count("circle ") == 1


def test_learning_rates_and_throughputs_have_their_own_writing() -> None:
    shown = page(VALIDATED)
    assert "lr 3e-4" in shown.text
    assert "samples_per_second 1.2k/s" in shown.text
    labels = ["".join(text.itertext()) for text in shown.images[2].iter("{http://www.w3.org/2000/svg}text")]
    assert labels[:3] == ["0", "500/s", "1k/s"]


def test_the_legend_stands_at_the_chart() -> None:
    lines = {rank: [(x, x + rank) for x in (0, 1)] for rank in range(3)}
    html = as_html(measured({"a": {0: lines[0]}, "b": lines}))
    words = re.findall(r'<img [^>]*alt="chart of (.)|(mean|rank \d)</span>', html)
    assert ["".join(found) for found in words] == ["a", "mean", "rank 0", "rank 1", "rank 2", "b"]
    assert "━</b> 9 ranks" in as_html(measured({"a": dict.fromkeys(range(9), lines[0])}))


def test_a_metric_with_one_point_is_a_number_without_a_chart() -> None:
    shown = page(measured({"images": {0: [(0, 60000.0)]}, "lost": {0: [(0, math.nan), (1, 1.0)]}}))
    assert shown.images == []
    assert "images 60,000\n" in shown.text


def test_a_constant_is_a_number_without_a_chart() -> None:
    shown = page(measured({"lr": {rank: [(step, 3e-4) for step in range(9)] for rank in (0, 1)}}))
    assert shown.images == []
    assert "lr 3e-4\n" in shown.text


def test_a_launch_without_metrics_and_output() -> None:
    record = replace(FINISHED, metrics={}, tails=[RankTail(0, (), False, f"{LOGS}/rank0.out")], log_dir="")
    assert page(record).text.split("\n")[1:] == ["rank 0 printed nothing", "", "", ""]


# ------------------------------------------------------------------ what the ranks said
def test_the_last_lines_are_kept_and_where_the_others_are() -> None:
    shown = page(tail_of(*(f"line {i}" for i in range(30)), more=True)).text
    assert "… more before in rank0.out\nline 10\nline 11\n" in shown
    assert "\nline 29\n" in shown
    assert "line 9\n" not in shown


@pytest.mark.parametrize(("ranks", "is_whole"), [(4, True), (64, False)])
def test_the_text_keeps_a_warnings_remedy(ranks: int, is_whole: bool) -> None:
    line = f"/lib/python3.11/site-packages/run.py:12: UserWarning: {'the loss is nan, ' * 12}: set clip=1.0"
    tails = [RankTail(rank, (line,), False, "") for rank in range(ranks)]
    text = text_of(replace(FINISHED, tails=tails, notes=[f"{'a note ' * 30}: restart the session"]))
    assert text.count("set clip=1.0\n") == ranks or not is_whole
    assert ": restart the session\n" in text


def test_lines_that_are_folded_away_show_the_last_of_them() -> None:
    assert "rank 0 bye\nhello from 0\nbye\n" in page(FINISHED).text


def test_colours_of_a_terminal_are_left_out() -> None:
    record = tail_of("\x1b[1;31mERROR\x1b[0m \x1b[38;5;15;4mwhite\x1b[0m end")
    assert ">ERROR white end\n" in as_html(record)
    assert "\nERROR white end\n" in text_of(record)


# ------------------------------------------------------------------ hostile, and huge
def hostile(text: str) -> Record:
    """A record that says `text` wherever it can say something."""
    return Record(
        name=text,
        state="failed",
        seconds=1.0,
        message=text,
        ranks="2 ranks",
        device=text,
        ended_at=FINISHED.ended_at,
        metrics={text: {0: [(0, 0.0), (1, 1.0)], 1: [(0, 0.0), (1, 2.0)]}, text + "2": {0: [(0, 0.0)]}},
        tails=[RankTail(rank, (text, f"\x1b[31m{text}"), True, text) for rank in range(2)],
        notes=[text],
        failure=Failure(1, text, text, text, text, text, (text,)),
        log_dir=text,
        charts=[[text], [text + "2"]],
    )


def test_text_of_ranks_cannot_become_a_tag() -> None:
    shown = page(hostile(HOSTILE)).text
    assert shown.count("<img src=x onerror=alert(1)>") >= 10
    text_of(hostile(HOSTILE)).encode()


@DETERMINISTIC
@given(
    st.lists(
        st.text(st.characters(exclude_categories=()))
        | st.sampled_from([HOSTILE, "\x1b[3", "1m", "\x1b]0;", "\n", "\r", '"', "<", "&", "]]>"])
    ).map("".join)
)
def test_whatever_a_rank_says_the_page_stays_whole(text: str) -> None:
    page(hostile(text))
    plain = text_of(hostile(text))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", plain)
    assert len(plain.encode()) <= 8192


LONG = "é<&" * 80_000
COLOURFUL = "\x1b[31ma\x1b[32mb" * 20_000


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        (LONG, 16),
        (COLOURFUL, 64),
        ("x\n" * 100_000, 64),
    ],
    ids=lambda value: repr(value)[:10],
)
def test_the_size_is_bounded_whatever_it_holds(line: str, ranks: int) -> None:
    noise = {rank: [(float(x), math.sin(x * x) + rank) for x in range(300)] for rank in range(min(ranks, 64))}
    record = replace(
        hostile(line),
        tails=[RankTail(rank, (line,) * 30, True, line) for rank in range(ranks)],
        notes=[line] * 100,
        metrics={f"{i}{line[:1000]}": noise for i in range(26)},
        charts=[[f"{i}{line[:1000]}"] for i in range(26)],
        failure=replace(FAILURE, message=line, where=line, source=line, traceback=line * 3, others=(line,) * ranks),
    )
    html = as_html(record)
    sizes = len(html.encode()), len(text_of(record).encode())
    assert sizes[0] <= 150_000
    assert sizes[1] <= 8192
    assert len(Page(html).images) == 12


def test_of_a_thousand_ranks_the_first_are_kept() -> None:
    tails = [RankTail(rank, (f"from {rank}",), False, "") for rank in reversed(range(1000))]
    series = {rank: [(float(x), float(rank)) for x in range(10)] for rank in range(1000)}
    html = as_html(replace(FINISHED, ranks="1000 ranks", tails=tails, metrics={"loss": series}))
    assert len(html.encode()) <= 150_000
    assert "from 15\n" in Page(html).text
    assert "from 16\n" not in Page(html).text
    assert "and 984 more ranks\n" in Page(html).text
