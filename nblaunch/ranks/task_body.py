"""The body of a task: a call of the function with its arguments, or the run of a cell. Runs in ranks."""

from __future__ import annotations

import ast
import linecache
import logging
from typing import Any

from nblaunch.ranks import changed_values
from nblaunch.ranks.report import Context, current
from nblaunch.transfer import parameters
from nblaunch.wire.messages import Cell, Payload

_log = logging.getLogger(__name__)


def call(payload: Payload) -> tuple[Any, tuple[str, ...]]:
    """Run the payload in this rank.

    Returns:
        Its return value, and the names of arguments and globals that it modified but did not return.
    """
    context = current()
    assert context is not None
    before: dict[str, Any] = {}
    try:
        before = changed_values.fingerprints(payload.watched)
    except Exception:  # noqa: BLE001  # a user's named_parameters; best effort: must never fail the task
        _log.info("cannot watch the payload's values for modifications", exc_info=True)
    if isinstance(payload.function, Cell):
        result = _run_cell(payload.function, payload.anchor.__globals__, context)
    else:
        own = _own_values(context)
        filled = {name: own[name] for name in parameters.left_out(payload.function, payload.args, payload.kwargs)}
        result = payload.function(*payload.args, **payload.kwargs, **filled)
    try:
        return result, changed_values.unreturned(payload.watched, before, result)
    except Exception:  # noqa: BLE001  # a user's module or container
        _log.info("cannot check the payload's values for modifications", exc_info=True)
        return result, ()


def _own_values(context: Context) -> dict[str, Any]:
    """Return this rank's values of `parameters.FILLED_IN`."""
    import torch

    return {
        "rank": context.rank,
        "world_size": context.world_size,
        "local_rank": context.local_rank,
        "device": torch.device(context.device),
    }


def _run_cell(cell: Cell, namespace: dict[str, Any], context: Context) -> Any:
    """Run the cell's source; return the value of its last expression, or None."""
    namespace.update(_own_values(context))
    if cell.ranks is not None and context.rank not in cell.ranks:
        return None
    linecache.cache[cell.filename] = (len(cell.source), None, cell.source.splitlines(keepends=True), cell.filename)
    tree = ast.parse(cell.source, cell.filename)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, cell.filename, "exec"), namespace)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), cell.filename, "eval"), namespace)
    return None
