"""The reports of a launch, read from its log directory: of an earlier kernel, or of a launch that failed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nblaunch.launch.output.report_columns import ReportColumns

_SPOOL = re.compile(r"rank(\d+)\.spool")


def saved_reports(log_dir: Path) -> ReportColumns:
    """Return all reports in a log directory. Lines that a killed rank has left unfinished are skipped.

    Raises:
        FileNotFoundError: It is not the log directory of a launch.
    """
    spools = [(int(match[1]), path) for path in log_dir.glob("rank*.spool") if (match := _SPOOL.fullmatch(path.name))]
    if not spools:
        raise FileNotFoundError(f"{str(log_dir)!r} is not the log directory of a launch: it has no rank0.spool")
    reports = ReportColumns()
    for rank, path in sorted(spools):
        for record in _records(path):
            if "metrics" in record:
                reports.add(rank, record["time"], record["step"], record["metrics"])
            elif "best" in record:
                reports.mark(rank, record["best"], record["step"], record["value"])
    return reports


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:  # torn by a full disk or a kill
                continue
            if isinstance(record, dict):
                yield record
