"""The panel's JavaScript and style sheet: their own tests, run by Node, types, format, and the bundle."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest

from nblaunch.notebook.charts import COLOURS, LOG_RATIO, MEAN_COLOUR, PART_STROKES
from nblaunch.notebook.page_messages import Delta, to_content
from nblaunch.notebook.panel import HEARTBEAT_INTERVAL_S
from nblaunch.notebook.panel_state import PanelState
from nblaunch.notebook.widget import STATIC, loader, modules, script
from tests.unit import page_types
from tests.unit.node import HERE, node, tool

MODULES = list(modules("panel.js"))
TYPES = page_types.TARGET.name
"""Typedefs alone: not sent to the page."""
LOADER = "loader.js"
"""Sent with each panel."""


def source(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


# ------------------------------------------------------------------ the logic
def test_javascript() -> None:
    done = node("--test", "--test-reporter=spec", *sorted(HERE.glob("*.test.mjs")))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^ℹ pass \d{3}", done.stdout, re.MULTILINE), done.stdout


def test_points_whose_steps_go_back_keep_their_places_in_bursts() -> None:
    """Messages get lost, long queues are downsampled, and pages that missed messages or were reloaded ask again."""
    random, state = Random(3), PanelState(2)
    names = [f"m{number}" for number in range(8)]
    pages: list[list[dict[str, Any]]] = [[], []]
    count = 0
    for burst in range(60):
        for _ in range(random.choice([1, 3, 400])):
            record = {"step": random.randrange(30), "metrics": {name: count + at for at, name in enumerate(names)}}
            for rank in (0, 1):
                state.add_reports(rank, [record])
            count += 1
        is_reloaded = burst in (20, 59)
        changes = state.snapshot() if is_reloaded else state.delta()
        message = {"whole": is_reloaded, **to_content(Delta(now=0.0, changes=changes))["changes"]}
        pages[0].append(message)
        if is_reloaded or random.random() < 0.5:
            pages[1].append(message)  # this one shows what has arrived meanwhile
    done = node(HERE / "charted.mjs", text=json.dumps([page[:last] for page in pages for last in (20, 59, 60)]))
    assert done.returncode == 0, done.stderr
    tables: list[dict[str, Any]] = json.loads(done.stdout)
    assert len(tables) == 6
    for table in tables:
        assert sorted(table) == names
        for at, name in enumerate(names):
            assert len(table[name]["xs"]) > 5
            for column in [*table[name]["columns"], table[name]["mean"]]:
                for x, y in zip(table[name]["xs"], column, strict=True):
                    assert y in (None, x + at) or y == pytest.approx(x + at), (name, x, y)


def test_the_page_waits_for_two_heartbeats_before_silence() -> None:
    """The page counts a launch as silent only if at least one heartbeat got lost, and asks after three."""
    for name, heartbeats in (("MAX_SILENCE_MS", 2), ("SILENCE_MS", 3)):
        match = re.search(rf"^const {name} = (\d+);", source("kernel.js"), re.MULTILINE)
        assert match is not None
        assert int(match[1]) / 1000 >= heartbeats * HEARTBEAT_INTERVAL_S


# ------------------------------------------------------------------ the files
def test_the_script_is_small() -> None:
    assert len(script().encode()) < 120_000
    assert len(loader().encode()) < 2000  # of each panel in a saved notebook


def test_no_string_spans_lines() -> None:
    """`script` removes indentation."""
    assert [line for name in (*MODULES, LOADER) for line in source(name).splitlines() if line.count("`") % 2] == []


def test_every_module_is_sent() -> None:
    assert sorted([*MODULES, LOADER, TYPES]) == sorted(path.name for path in STATIC.glob("*.js"))


def test_the_types_of_messages_are_current() -> None:
    assert source(TYPES) == page_types.source(), "run python -m tests.unit.page_types"


def test_types_are_checked() -> None:
    done = node(tool("typescript/bin/tsc"), "--project", ".")
    assert done.returncode == 0, done.stdout + done.stderr


def test_prettier_has_formatted_it() -> None:
    done = node(
        tool("prettier/bin/prettier.cjs"), "--config", ".prettierrc.json", "--check", f"{STATIC}/*.js", f"{HERE}/*.mjs"
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_script_is_one_module(tmp_path: Path) -> None:
    bundle = tmp_path / "panel.mjs"
    bundle.write_text(script(), encoding="utf-8")
    done = node("--check", bundle)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(?:import|export).*$", script(), re.MULTILINE) == ["export default { initialize, render };"]


def test_no_module_reaches_out_or_makes_markup_of_text() -> None:
    for name in (*MODULES, LOADER):
        code = re.sub(r"/\*.*?\*/|^\s*//.*$", "", source(name), flags=re.DOTALL | re.MULTILINE)
        assert not re.search(r"https?:|//\w+\.\w", code), name
        assert not re.search(r"\b(?:innerHTML|outerHTML|insertAdjacentHTML|setHTMLUnsafe|srcdoc|DOMParser)\b", code), (
            name
        )
        reaches = r"\beval\b|\bnew Function\b|document\.write|\bfetch\b|XMLHttpRequest|\bconsole\b"
        assert not re.search(reaches, code), name


def selectors(css: str) -> list[str]:
    plain = re.sub(r"/\*.*?\*/", "", css, flags=re.DOTALL)
    found = [part.strip() for rule in re.findall(r"([^{};]+)\{", plain) for part in rule.split(",")]
    return [part for part in found if not re.match(r"@|50%$", part)]


def test_the_style_sheet_touches_nothing_else_on_the_page() -> None:
    found = selectors(source("panel.css"))
    assert len(found) > 80
    for selector in found:
        assert re.search(r"\.nbl-", selector.split()[0]), selector
        assert all(name.startswith("nbl-") for name in re.findall(r"\.([\w-]+)", selector)), selector
    assert not re.search(r"url\(|@import|https?:", source("panel.css"))


def test_the_panel_and_the_record_draw_in_the_same_colours_and_dashes() -> None:
    css, chart = source("panel.css"), source("chart.js")
    assert tuple(re.findall(r"\.nbl-r\d { --nbl-e: (#\w+)", css)) == COLOURS
    assert re.findall(r"\.nbl-ink-mean { color: (#\w+)", css) == [MEAN_COLOUR]
    inks = dict(re.findall(r"\.nbl-ink-(\w+) {[^}]* color: (#\w+)", css))
    dashes = re.search(r"const DASHES = {(.*)};", chart)
    assert dashes is not None
    drawn = {part: numbers.replace(",", "") for part, numbers in re.findall(r"(\w+): \[([^]]*)\]", dashes[1])}
    for part, stroke in PART_STROKES.items():
        assert (inks[part], drawn[part]) == (stroke.colour, stroke.dashes)
    assert f"const LOG_RATIO = {LOG_RATIO};" in chart
