"""What ranks display, out of the records in their spools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nblaunch.launch.views.events import Displays, Output
from nblaunch.wire.display_records import SUFFIXES, Cleared, LeftOut, Shown, from_line
from nblaunch.wire.launch_files import output_file


def displays_in(rank: int, log_dir: Path, records: Sequence[Mapping[str, Any]]) -> Displays | None:
    """Return what a rank displays by the end of these records, or None if none of them is about that.

    Outputs that a later record removes or replaces are left out: a flood of them costs little.
    """
    outputs: dict[str, Output] = {}
    is_cleared, left_out, is_any = False, None, False
    for line in records:
        record = from_line(line)
        is_any = is_any or record is not None
        match record:
            case Shown():
                outputs[record.key] = _output(rank, log_dir, record)
            case Cleared():
                outputs.clear()
                is_cleared, left_out = True, 0
            case LeftOut(count):
                left_out = count
    return Displays(rank, list(outputs.values()), is_cleared, left_out) if is_any else None


def _output(rank: int, log_dir: Path, record: Shown) -> Output:
    path = None
    if record.body is None:
        path = output_file(log_dir, rank, record.key, SUFFIXES[record.mime])
    return Output(record.key, record.mime, record.text, record.size, record.body, path, record.width, record.height)
