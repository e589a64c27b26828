"""The benchmark's code runs. Its figures are nobody's assertion."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nblaunch.launch.rendezvous import Rendezvous
from tests.benchmarks import scale, streaming, training
from tests.benchmarks.__main__ import _parts, import_time, machine, measure, table
from tests.benchmarks.contenders import CONTENDERS


@pytest.fixture(scope="module", autouse=True)
def _libuv_met() -> None:
    """From its first loop on libuv keeps a pipe in this process, which is no leak of the test that comes first."""
    with Rendezvous(1):
        pass


@pytest.mark.timeout(400)  # eight fresh interpreters import torch on two cores, twice
def test_the_launch_benchmark_measures_every_contender() -> None:
    times = measure(rounds=1)
    assert all(seconds > 0 for by_contender in times.values() for values in by_contender.values() for seconds in values)
    text = table(times, import_time())
    assert all(contender.name in text for contender in CONTENDERS)
    assert machine() in text


@pytest.mark.timeout(240)
def test_the_streaming_benchmark_receives_every_way() -> None:
    lines = 200  # of more, text leaves some out where all come at once
    streamed = streaming.measure(lines)
    received = {way.name: way.lines for way in streamed}
    assert received.pop("nblaunch, to /dev/null") == 0
    assert all(count >= 2 * lines for count in received.values()), received
    assert all(way.name in streaming.table(streamed, lines) for way in streamed)


@pytest.mark.timeout(240)
def test_the_training_benchmark_trains_alike_and_counts_right() -> None:
    figures = training.measure(quick=True)
    trained = [runs[0] for runs in figures.loops.values()]
    assert {each.threads for each in trained} == {training.THREADS}
    assert all(each.loss == pytest.approx(trained[0].loss, rel=1e-4) for each in trained)  # the same program
    exact, padded = figures.evaluations
    assert (exact.samples, padded.samples) == (10_000, 10_002)  # three ranks of 3,334 each
    text = training.table(figures)
    assert all(name in text for name in figures.loops)
    assert "all_reduce_dict | 1 |" in text
    assert f"all_reduce of each key | {training.KEYS} |" in text
    assert json.loads(json.dumps(figures.as_json()))["evaluations"][0]["samples"] == 10_000


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", ["data", "scale", "day"])
def test_the_other_parts_measure_and_draw(part: str, tmp_path: Path) -> None:
    file, folder = tmp_path / "figures.json", tmp_path / "plots"
    command = [sys.executable, "-m", "tests.benchmarks", "--only", part, "--quick"]
    done = subprocess.run(
        [*command, "--json", str(file), "--plots", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert "nblaunch" in done.stdout
    assert not re.search(r"^\| nblaunch.*endless", done.stdout, re.MULTILINE)  # others may hang, as forks of kernels do
    assert not re.search(r"\b(inf|nan)\b", done.stdout)
    assert json.loads(file.read_text())[part]
    assert [path.name for path in folder.iterdir()] == ([] if part == "day" else [f"{part}.png"])


def test_growth_is_the_line_of_least_squares() -> None:
    assert scale.slope({2: 5.0, 4: 9.0, 8: 17.0}) == pytest.approx(2.0)


def test_a_part_is_asked_for_by_its_name() -> None:
    assert _parts("training,launch") == ["training", "launch"]
    with pytest.raises(argparse.ArgumentTypeError, match="speed: there are launch, data, scale, day, lines, training"):
        _parts("launch,speed")
