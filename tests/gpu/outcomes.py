"""A pytest plugin that keeps what became of each check, and writes it as a Markdown table."""

from __future__ import annotations

from dataclasses import dataclass

import pytest


@dataclass
class Outcome:
    """What became of one check."""

    name: str
    said: str = "passed"
    seconds: float = 0.0


class Outcomes:
    """See the module; one for a run."""

    def __init__(self) -> None:
        self._by_id: dict[str, Outcome] = {}

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        for item in items:
            absent = [need for marker in item.iter_markers("needs") for need in marker.args]
            said = f"not run: needs {' and '.join(absent)}" if absent else "not run: not asked for"
            self._by_id[item.nodeid] = Outcome(in_words(item.nodeid), said)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = self._by_id.setdefault(report.nodeid, Outcome(in_words(report.nodeid)))
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
