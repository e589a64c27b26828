"""The benchmark's code runs. Its figures are nobody's assertion."""

import pytest

from tests.benchmarks import streaming
from tests.benchmarks.__main__ import import_time, machine, measure, table
from tests.benchmarks.contenders import CONTENDERS


@pytest.mark.timeout(400)  # eight fresh interpreters import torch on two cores, twice
def test_the_launch_benchmark_measures_every_contender() -> None:
    times = measure(rounds=1)
    assert all(seconds > 0 for by_contender in times.values() for values in by_contender.values() for seconds in values)
    text = table(times, import_time())
    assert all(contender.name in text for contender in CONTENDERS)
    assert machine() in text


@pytest.mark.timeout(240)
def test_the_streaming_benchmark_receives_every_way() -> None:
    streamed = streaming.measure(lines=300)
    printed = {way.name: way.lines for way in streamed}
    assert printed.pop("nblaunch, to /dev/null") == 0
    assert all(lines >= 600 for lines in printed.values())
    assert all(way.name in streaming.table(streamed, 300) for way in streamed)
