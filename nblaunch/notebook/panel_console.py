"""The debug console in the panel: what it has shown, the line that it waits for, and what the user types there."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from nblaunch.launch.debug_console import DebugConsole
from nblaunch.notebook.page_messages import (
    CompletionRequest,
    CompletionsEntry,
    DebugEntry,
    LookRequest,
    PromptEntry,
    TypedLine,
)

HERE = "panel"
_MAX_CHARS = 64 << 10
"""Of the transcript, for a page that is reloaded."""
_MAX_MESSAGE_CHARS = 16 << 10
_MAX_RECORD_LINES = 40
_MAX_NAME_LENGTH = 200


class PanelConsole:
    """See the module. The panel's lock guards all but `obey`."""

    def __init__(self) -> None:
        self._console: DebugConsole | None = None
        self._is_in_cell = False
        self._is_used = False
        """The user has typed in the panel."""
        self._read_parts = 0
        """Parts of the console that were read."""
        self._text = ""
        """The end of the transcript."""
        self._end = self._sent = 0
        """Characters of the whole transcript, and how many of them the page has."""
        self._prompt: PromptEntry | None = None
        self._stopped: list[int] = []
        self._sent_state: tuple[PromptEntry | None, list[int]] = None, []
        self._completions: deque[CompletionsEntry] = deque(maxlen=1)

    def open(self, console: DebugConsole, *, is_in_cell: bool) -> None:
        """Show a launch's console from now on.

        Args:
            console: The console.
            is_in_cell: Whether the output of the launch's cell shows all of it, too.
        """
        self._console, self._is_in_cell = console, is_in_cell

    def close(self) -> None:
        """Read what the console has shown, and release it."""
        self._read()
        self._console = None

    def _read(self) -> None:
        if self._console is None:
            return
        prompt = self._console.prompt  # first: the text before it is then among the parts
        self._read_parts, parts = self._console.shown(self._read_parts)
        new = "".join(part.text for part in parts)
        self._is_used = self._is_used or any(part.typed_in == HERE for part in parts)
        self._text = (self._text + new)[-_MAX_CHARS:]
        self._end += len(new)
        self._prompt = PromptEntry(prompt.number, prompt.rank, prompt.text, prompt.is_secret) if prompt else None
        self._stopped = self._console.stopped

    @property
    def for_record(self) -> Sequence[str]:
        """The last lines, if the panel alone has shown what the user typed."""
        return self._text.splitlines()[-_MAX_RECORD_LINES:] if self._is_used and not self._is_in_cell else ()

    # -------------------------------------------------------------- to the page
    @property
    def is_changed(self) -> bool:
        """True if something has changed since the last `delta` or `snapshot`."""
        self._read()
        return self._sent < self._end or self._sent_state != (self._prompt, self._stopped) or bool(self._completions)

    def delta(self) -> DebugEntry | None:
        """Return the next part of the transcript, and what else has changed since the last call; None if nothing."""
        if not self.is_changed:
            return None
        start = max(self._sent, self._end - len(self._text))
        new = self._text[len(self._text) - self._end + start :][:_MAX_MESSAGE_CHARS]
        skipped = "…\n" if start > self._sent else ""
        self._sent = start + len(new)
        return self._entry(skipped + new, self._completions.popleft() if self._completions else None)

    def snapshot(self) -> DebugEntry | None:
        """Return the end of the transcript; None if the console has shown nothing."""
        self._read()
        self._sent = self._end
        return self._entry("…\n" * (self._end > len(self._text)) + self._text) if self._end else None

    def _entry(self, text: str, completions: CompletionsEntry | None = None) -> DebugEntry:
        self._sent_state = self._prompt, self._stopped
        return DebugEntry(text, self._prompt, self._stopped, completions)

    # -------------------------------------------------------------- from the page
    def obey(self, request: TypedLine | CompletionRequest | LookRequest) -> None:
        """Do what the user wants, in any thread, without waiting. No effect once the launch has ended."""
        console = self._console
        if console is None:
            return
        match request:
            case TypedLine(number=number, line=line):
                console.type(number, line, HERE)
            case CompletionRequest(request=number, text=text):
                console.complete(text).add_done_callback(
                    lambda found: self._completions.append(
                        CompletionsEntry(number, [name[:_MAX_NAME_LENGTH] for name in found.result()])
                    )
                )
            case LookRequest(rank=rank):
                console.look(rank)
