"""Running what was sent: a function with its arguments, or a cell in the notebook's names."""

from __future__ import annotations

import ast
import linecache
import logging
from collections.abc import Mapping
from typing import Any

from nblaunch.ranks import changed_values
from nblaunch.ranks.report import Context, current
from nblaunch.transfer import parameters
from nblaunch.wire.messages import Cell, Payload

_log = logging.getLogger(__name__)


def call(payload: Payload) -> tuple[Any, tuple[str, ...]]:
    """Run the payload in this rank.

    Returns:
        What it returned, and the names of what it changed but did not return.
    """
    context = current()
    assert context is not None
    before = _fingerprints(payload.watched)
    if isinstance(payload.function, Cell):
        result = _run_cell(payload.function, payload.anchor.__globals__, context)
    else:
        own = _own_values(context)
        filled = {name: own[name] for name in parameters.left_out(payload.function, payload.args, payload.kwargs)}
        result = payload.function(*payload.args, **payload.kwargs, **filled)
    return result, _unreturned(payload.watched, before, result)


def _fingerprints(watched: Mapping[str, Any]) -> dict[str, Any]:
    """As `changes` has them; none where that fails, as the notice is a courtesy, and the run is not its price."""
    try:
        return changed_values.fingerprints(watched)
    except Exception:  # noqa: BLE001  # a user's named_parameters
        _log.info("what the notebook sent is not watched", exc_info=True)
        return {}


def _unreturned(watched: Mapping[str, Any], before: Mapping[str, Any], result: Any) -> tuple[str, ...]:
    try:
        return changed_values.unreturned(watched, before, result)
    except Exception:  # noqa: BLE001  # a user's module or container
        _log.info("whether what the notebook sent has changed cannot be told", exc_info=True)
        return ()


def _own_values(context: Context) -> dict[str, Any]:
    """The values of `parameters.FILLED_IN`."""
    import torch

    return {
        "rank": context.rank,
        "world_size": context.world_size,
        "local_rank": context.local_rank,
        "device": torch.device(context.device),
    }


def _run_cell(cell: Cell, namespace: dict[str, Any], context: Context) -> Any:
    """Run the cell's source; the value of its last expression, or None."""
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
