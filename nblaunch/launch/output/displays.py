"""What ranks display, out of the records in their spools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nblaunch.engines.protocol import Worker
from nblaunch.launch.views.events import Displays, Output
from nblaunch.wire.display_records import Cleared, LeftOut, Shown, from_line


def displays_in(worker: Worker, records: Sequence[Mapping[str, Any]]) -> Displays | None:
    """Return what a rank displays by the end of these records of its spool; None if they hold no display.

    Outputs that a later record removes or replaces are left out: a flood of them costs little.
    """
    outputs: dict[str, Output] = {}
    is_cleared, left_out, is_any = False, None, False
    for line in records:
        record = from_line(line)
        is_any = is_any or record is not None
        match record:
            case Shown():
                outputs[record.key] = _output(worker, record)
            case Cleared():
                outputs.clear()
                is_cleared, left_out = True, 0
            case LeftOut(count):
                left_out = count
    return Displays(worker.rank, list(outputs.values()), is_cleared, left_out) if is_any else None


def _output(worker: Worker, record: Shown) -> Output:
    body = worker.output(record.key, record.mime) if record.body is None else record.body
    return Output(record.key, record.mime, record.text, record.size, body, record.width, record.height)
