"""What older versions of IPython lack, and what stands in for it. Kaggle and Colab have 7.34.

Their users cannot upgrade: a new IPython or ipykernel crashes these runtimes. Elsewhere, versions matter to
`nblaunch.ranks.debugger` only, before 8.15.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from IPython.core import completer, magic
from IPython.core.getipython import get_ipython

Matcher = Callable[[Any], Any]

output_can_be_silenced: Callable[[Any], Any] = getattr(magic, "output_can_be_silenced", lambda function: function)
"""Lets a semicolon at the end of the cell hide a magic's value. Before 8.10 it does not."""
Completion: Callable[..., Any] = getattr(completer, "SimpleCompletion", SimpleNamespace)


def as_matcher(completions: Callable[[Any], dict[str, Any]]) -> Matcher:
    """Return a function as a matcher of IPython's completer.

    Before 8.6, matchers know the cursor's line alone: a cell's options are completed, but in the cell below them not
    the names of its session's ranks.

    Args:
        completions: Returns completions for a ``CompletionContext``.
    """
    if hasattr(completer, "context_matcher"):
        return completer.context_matcher()(completions)  # type: ignore[no-any-return]

    def matcher(token: str) -> list[str]:
        source: Any = get_ipython().Completer  # type: ignore[union-attr]  # which has called this
        line, before = source.line_buffer, source.text_until_cursor
        context = SimpleNamespace(
            full_text=line, line_with_cursor=line, text_until_cursor=before, cursor_line=0, cursor_position=len(before)
        )
        return [each.text for each in completions(context)["completions"]]

    return matcher
