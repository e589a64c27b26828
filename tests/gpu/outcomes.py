"""A pytest plugin that keeps what became of each check, and writes it as a Markdown table."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import pytest

_NO_TIME = "not run: the run ended before"


@dataclass
class Outcome:
    """What became of one check."""

    name: str
    said: str
    seconds: float = 0.0


class Outcomes:
    """See the module; one for a run.

    Args:
        present: What tests need and this machine has.
    """

    def __init__(self, present: Collection[str]) -> None:
        self._present = present
        self._by_id: dict[str, Outcome] = {}

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        for item in items:
            needed = [need for marker in item.iter_markers("needs") for need in marker.args]
            absent = [need for need in needed if need not in self._present]
            said = f"not run: needs {' and '.join(absent)}" if absent else "not run: not asked for"
            self._by_id[item.nodeid] = Outcome(in_words(item.nodeid), said)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self._by_id[item.nodeid] = Outcome(in_words(item.nodeid), _NO_TIME)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = self._by_id[report.nodeid]
        if outcome.said == _NO_TIME:
            outcome.said = "passed"
        outcome.seconds += report.duration
        if report.outcome != "passed" and outcome.said == "passed":
            outcome.said = "**failed**" if report.when == "call" else f"**failed** in its {report.when}"

    def table(self, machine: str) -> str:
        """The outcomes of all checks, under what they ran on."""
        rows = [f"| {each.name} | {each.said} | {each.seconds:.1f} |" for each in self._by_id.values()]
        counts = {
            kind: sum(kind in each.said for each in self._by_id.values()) for kind in ("passed", "failed", "not run")
        }
        total = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        return "\n".join([f"{machine}: {total}.", "", "| checked | | s |", "|---|---|---|", *rows])


def in_words(nodeid: str) -> str:
    """``tests/gpu/test_x.py::test_a_rank_waits[two]`` as ``a rank waits: two``."""
    name, _, parameters = nodeid.rpartition("::")[2].partition("[")
    words = name.removeprefix("test_").replace("_", " ")
    return f"{words}: {parameters.removesuffix(']')}" if parameters else words
