"""The body of a task: a call of the function with its arguments, or the run of a cell. Runs in ranks."""

from __future__ import annotations

import ast
import asyncio
import inspect
import itertools
import linecache
import logging
import weakref
from types import CodeType
from typing import Any

from nblaunch.ranks import changed_values, notebook_names
from nblaunch.ranks.namespace import Namespace
from nblaunch.ranks.report import Context, current
from nblaunch.transfer import parameters
from nblaunch.wire.messages import Cell, Payload
from nblaunch.wire.session_messages import Question

_log = logging.getLogger(__name__)
_VALUE = "__nblaunch_value__"
"""The name that a cell binds to the value of its last expression."""
HIDES_OLDER_FRAMES = "__ipython_bottom__"
"""A value of ``__tracebackhide__`` by which IPython's debugger hides a frame and those that have called it."""


def call(payload: Payload, home: Namespace | None = None) -> tuple[Any, tuple[str, ...]]:
    """Run the payload in this rank.

    Args:
        payload: What to run.
        home: The names of a kept rank. Default: the rank runs one task.

    Returns:
        Its return value, and the names of arguments and globals that it modified but did not return.
    """
    __tracebackhide__ = HIDES_OLDER_FRAMES
    context = current()
    assert context is not None
    before: dict[str, Any] = {}
    try:
        before = changed_values.fingerprints(payload.watched)
    except Exception:  # noqa: BLE001  # a user's named_parameters; best effort: must never fail the task
        _log.info("cannot watch the payload's values for modifications", exc_info=True)
    if home is not None:
        home.names.update(_own_values(context))
    if isinstance(payload.function, Cell):
        result = _run_cell(payload.function, payload.anchor.__globals__ if home is None else home.names, context)
    elif isinstance(payload.function, Question):
        assert home is not None
        result = home.answer(payload.function)
    else:
        args, kwargs = parameters.complete(payload.function, payload.args, payload.kwargs, _own_values(context))
        result = payload.function(*args, **kwargs)
    notebook_names.after_task()
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
    __tracebackhide__ = HIDES_OLDER_FRAMES
    namespace.update(_own_values(context))
    if cell.ranks is not None and context.rank not in cell.ranks:
        return None
    linecache.cache[cell.filename] = (len(cell.source), None, cell.source.splitlines(keepends=True), cell.filename)
    notebook_names.before_cell(cell.source)
    tree = ast.parse(cell.source, cell.filename)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):  # in one code with the rest: a debugger steps from line to line
        target = ast.copy_location(ast.Name(_VALUE, ast.Store()), last)
        tree.body[-1] = ast.copy_location(ast.Assign([target], last.value), last)
    code = compile(tree, cell.filename, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    _drop_source_with(code, cell.filename)
    try:
        if code.co_flags & inspect.CO_COROUTINE:
            error = asyncio.run(_await(code, namespace))
            if error is not None:
                raise error  # here, so that the traceback has no frames of asyncio
        else:
            exec(code, namespace)
    finally:
        value = namespace.pop(_VALUE, None)
    if cell.shows_value and context.rank != cell.value_rank and value is not None:
        notebook_names.show_value(value)
    return None if cell.keeps_value else value


def _drop_source_with(code: CodeType, filename: str) -> None:
    """Remove a cell's source from `linecache` once none of its code is left: a session runs many cells."""
    parts = [code]
    for part in parts:  # it grows meanwhile
        parts += [constant for constant in part.co_consts if isinstance(constant, CodeType)]
    entry, left = linecache.cache[filename], itertools.count(len(parts) - 1, -1)

    def release() -> None:
        if next(left) == 0 and linecache.cache.get(filename) is entry:
            del linecache.cache[filename]

    for part in parts:
        weakref.finalize(part, release).atexit = False


async def _await(code: CodeType, namespace: dict[str, Any]) -> Exception | None:
    """Run code that awaits at the top level. Return its exception."""
    __tracebackhide__ = HIDES_OLDER_FRAMES
    try:
        await eval(code, namespace)
    except Exception as error:  # noqa: BLE001  # the notebook raises whatever user code raised
        return error
    return None
