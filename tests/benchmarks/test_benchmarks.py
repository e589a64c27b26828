"""Smoke tests of the benchmarks, of our own contender alone. Figures are never asserted."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator

import pytest

from tests.benchmarks import __main__, cells, data, gpu, nodes, profiles, scale, sessions, toolkit
from tests.benchmarks.__main__ import MEASURES, PARTS, README, _parts, chosen, measure, replaced, table
from tests.benchmarks.contenders import CONTENDERS
from tests.gpu import gpus
from tests.kernel.harness import running_kernel
from tests.processes.conftest import _libuv_met, _warm  # noqa: F401  # fixtures that pytest finds by name

OURS = CONTENDERS[0]


@pytest.fixture(scope="module")
def _one_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One kernel for all of them: importing torch in each takes longer than they do."""
    folder = str(tmp_path_factory.mktemp("benchmarks"))
    own = {"BENCHMARK_FOLDER": folder, "TMPDIR": folder, "NBLAUNCH_STATE_DIR": f"{folder}/state"}
    with running_kernel(**own) as kernel, pytest.MonkeyPatch.context() as patch:
        for module in (__main__, data, sessions):
            patch.setattr(module, "running_kernel", lambda **env: contextlib.nullcontext(kernel))
        yield


@pytest.mark.usefixtures("_one_kernel")
def test_launches_data_and_cells_are_measured() -> None:
    times = measure(1, (OURS,), limit=100.0)
    assert all(0 < seconds < math.inf for by_name in times.values() for seconds in by_name[OURS.name])
    for name in ("nblaunch", data.MAPPED):
        found = data.captured_by(name, 1 << 20, 2, 1)
        assert min(found.first + found.again + found.changed + found.empty + found.copy) > 0
        assert captured_row(found).count(" | ") == 6
    figures = sessions.measure(1, 1 << 20, 2, (sessions.OURS,))
    assert all(0 < seconds < math.inf for by_way in figures.seconds.values() for (seconds,) in by_way.values())
    rows = sessions.table(figures).splitlines()
    assert rows[0] == "| median of 1, milliseconds | nblaunch, session |"
    assert "| held after | 2 cells |" in rows
    assert {len(held) for held in figures.held.values()} == {7}


def test_the_cost_of_a_profile_is_measured() -> None:
    figures = profiles.measure(0.5, 1, 2.0, (8,))
    (found,) = figures.by_width[8]
    assert min(found.before, found.recorded, found.read, found.after) > 0
    assert profiles.table(figures).count("\n") == 4


def test_a_contender_that_hangs_is_said_to() -> None:
    times = {name: {OURS.name: [0.1], "hangs": [math.inf]} for name in MEASURES}
    rows = table(times, 0.01).splitlines()
    assert rows[0] == "| median of 1, seconds | nblaunch | hangs |"
    assert all(row.endswith("| hangs |") for row in rows[2:5])


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
    rows = nodes.table(nodes.measure((1, 2), 0.1)).splitlines()
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
