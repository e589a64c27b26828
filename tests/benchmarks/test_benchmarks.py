"""Smoke tests of the benchmarks, with failing contenders too. Figures are never asserted."""

from __future__ import annotations

import argparse
import math

import pytest

from tests.benchmarks import cells, data, gpu, nodes, scale, sessions, toolkit
from tests.benchmarks.__main__ import PARTS, README, _parts, chosen, measure, replaced, table
from tests.benchmarks.contenders import CONTENDERS, Contender
from tests.gpu import gpus
from tests.processes.conftest import _libuv_met, _warm  # noqa: F401  # fixtures that pytest finds by name

HANGS = Contender("hangs", "def launch(function, ranks):\n    time.sleep(600)\n")


def test_a_contender_that_hangs_is_said_to_and_the_table_comes() -> None:
    ours = CONTENDERS[0]
    times = measure(1, (ours,), limit=100.0)
    hanging = measure(1, (HANGS,), limit=1.0)
    assert all(seconds == math.inf for by_name in hanging.values() for seconds in by_name["hangs"])
    both = {name: times[name] | hanging[name] for name in times}
    assert all(0 < seconds < math.inf for by_name in both.values() for seconds in by_name[ours.name])
    rows = table(both, 0.01).splitlines()
    assert rows[0] == "| median of 1, seconds | nblaunch | hangs |"
    assert all(row.endswith("| hangs |") for row in rows[2:5])


def test_a_launch_over_data_is_measured() -> None:
    for name in (*data.WAYS, data.MAPPED):
        found = data.captured_by(name, 16 << 20, 2, 1)
        fastest = min(found.first + found.again + found.changed + found.empty + found.copy)
        assert fastest > 0
        assert fastest < math.inf or "fork" in name  # a fork of a kernel hangs now and then, accelerate's too
        assert captured_row(found).count(" | ") == 6


def test_cells_of_a_session_are_measured() -> None:
    found = sessions.measure(1, 1 << 20, 10, (sessions.OURS,))
    assert all(0 < seconds < math.inf for by_way in found.seconds.values() for (seconds,) in by_way.values())
    rows = sessions.table(found).splitlines()
    assert rows[0] == "| median of 1, milliseconds | nblaunch, session |"
    assert "| held after | 1 cells | 10 cells |" in rows
    assert {len(held) for held in found.held.values()} == {7}


def test_cells_that_hang_are_said_to() -> None:
    own, other = cells.WAYS
    steady, fresh = {own: [0.1], other: [math.inf]}, {own: [[0.3] + [0.1] * 9], other: [[math.inf] * 10]}
    rows = cells.table(cells.Figures(steady, fresh, [[0.2, 0.4]], {"after 8 s": [3_000_000, 4_000_000]})).splitlines()
    assert rows[2] == "| median of 1, in turn, half a second apart | 0.100 | hangs |"
    assert "| after 8 s | 2 | 7 |" in rows


def test_a_way_that_is_not_installed_is_named_without_a_column() -> None:
    seconds: dict[str, dict[str, list[float]]] = {each: {"here": [1.0], "absent": []} for each in sessions.CELLS}
    rows = sessions.table(sessions.Figures(seconds, 1 << 20, {1: {}})).splitlines()
    assert rows[0] == "| median of 1, milliseconds | here |"
    assert "Not measured: absent." in rows


def test_growth_with_simulated_agents_is_measured() -> None:
    rows = nodes.table(nodes.measure((1, 2), 1.0)).splitlines()
    assert rows[0] == "| the links alone: agents of 8 ranks | 1 | 2 | each more |"
    assert "| a whole launch: agents of 8 ranks | 1 | 2 | each more |" in rows


def test_the_toolkit_is_measured_beside_accelerate() -> None:
    found = toolkit.measure(1, 1, 4)
    assert all(0 < seconds < math.inf for by_name in found.seconds.values() for (seconds,) in by_name.values())
    rows = toolkit.table(found).splitlines()
    assert [row.rpartition(" | ")[2] for row in rows if "accelerate.Accelerator" in row] == ["1.000 |"] * 4


def captured_row(found: data.Captured) -> str:
    return data.captured_table(16 << 20, 2, [found])[-1]


def test_tables_replace_what_stands_between_their_markers() -> None:
    text = "above\n<!-- data -->\nold\n<!-- end of data -->\nbelow\n"
    assert replaced(text, "data", "new") == "above\n<!-- data -->\nnew\n<!-- end of data -->\nbelow\n"
    with pytest.raises(ValueError, match="no line <!-- launch --> and <!-- end of launch -->"):
        replaced(text, "launch", "new")


@pytest.mark.parametrize("part", PARTS)
def test_the_readme_has_a_place_for_each_part(part: str) -> None:
    assert "| new |" in replaced(README.read_text(), part, "| new |")


def test_growth_is_the_line_of_least_squares() -> None:
    assert scale.slope({2: 5.0, 4: 9.0, 8: 17.0}) == pytest.approx(2.0)


def test_a_part_is_asked_for_by_its_name() -> None:
    assert _parts("training,launch") == ["training", "launch"]
    with pytest.raises(
        argparse.ArgumentTypeError,
        match="speed: there are launch, cells, sessions, data, scale, day, lines, ",
    ):
        _parts("launch,speed")


def test_gpus_are_measured_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many there are is faked."""

    def none() -> gpus.Gpus:
        raise gpus.NoGpuError("a GPU is needed")

    monkeypatch.setattr(gpus, "number", lambda: 1)
    assert chosen(None) == list(PARTS)
    monkeypatch.setattr(gpus, "number", lambda: 0)
    monkeypatch.setattr(gpus, "found", none)
    assert chosen(None) == [part for part in PARTS if part != "gpu"]
    assert chosen(["launch"]) == ["launch"]
    with pytest.raises(SystemExit, match="--only gpu: a GPU is needed"):
        chosen(["launch", "gpu"])


def test_figures_of_gpus_are_shown_as_tables() -> None:
    """The figures are made up."""
    names = ("nblaunch", "torchrun", "accelerate")
    loops = {model: {name: [1000.0, 3000.0, 2000.0] for name in names} for model in gpu.MODELS}
    launches: dict[str, list[float]] = {"nblaunch": [0.1, 0.3, 0.2], "torchrun": [5.0], "accelerate": []}
    prefetched = {"Prefetcher": [900.0], "each batch on demand": [600.0]}
    rows = gpu.table(gpu.Figures("2 × H100", 2, launches, loops, prefetched, 1_200_000_000)).splitlines()
    assert rows[0] == "On 2 × H100; 2 ranks."
    assert "| a launch from a notebook that has used CUDA, s | 0.200 | 5.000 | impossible |" in rows
    assert "| ResNet-50, 64 images, images/s | 2,000 | 2,000 | 2,000 |" in rows
    assert "| each batch on demand | 600 |" in rows
    assert "| by a session of 2, with CUDA and NCCL started | 1200 |" in rows
