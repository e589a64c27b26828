"""The exception that the notebook raises for a failed task: the user's own if possible. Headlines of errors."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import re
import signal
import sys
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nblaunch.engines.protocol import Log
from nblaunch.errors import (
    CollectiveError,
    NblaunchError,
    NodeLostError,
    RankDiedError,
    RankError,
    RankLostError,
    RankRaisedError,
    ResultError,
    add_note,
    text_of,
)
from nblaunch.launch.frontend import host
from nblaunch.launch.group import RankEnd
from nblaunch.launch.output.log_directory import LaunchFiles
from nblaunch.launch.output.terminal_lines import last_lines
from nblaunch.launch.session_state import command, restart_command
from nblaunch.launch.stopping import Account
from nblaunch.launch.verdict import Cause
from nblaunch.launch.views import Failure
from nblaunch.machine.limits import advice_on_threads
from nblaunch.machine.own_code import is_rank_runtime, is_users, users_part
from nblaunch.transfer import pickling
from nblaunch.wire.messages import Failed, Source

_LAST_LINES = 10
MAX_CRASH_LINES = 300
"""Lines to search for the stack of a crash: one for each frame of each thread, and the modules."""
_FRAME = re.compile(r"""  (?:(?P<label>Cell In\[\d+\])|File "(?P<file>[^"]*)"), line (?P<line>\d+)""")
"""The first line of a frame in a traceback whose cells are named."""
_UNDEFINED = re.compile(r"^(?:name|.*variable) '(\w+)' is not defined")
"""In the errors of Python, and of pandas for ``df.query``."""
_LOOKED_UP = re.compile(r"globals\(\)|__main__")
"""In the line of a KeyError: the key is a name."""
_OTHER_SIZE = ("collective mismatch", "preamble.length")
"""Words of gloo's error if a rank has received data of another size than its tensor's."""
MAX_HEADLINE = 160
"""Characters: two lines of a panel."""
_MAX_DETAILS = 4000
_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"^(?:[\w<>]+\.)*(?P<type>\w+)(?:: (?P<text>.*))?$")
"""The line of a traceback that names the exception."""
_CAUGHT = re.compile(r"\s*Caught \w+ (?P<where>in .+)\.$", re.MULTILINE)
"""How torch begins an exception that another process or thread has raised."""
_SENTENCE_END = re.compile(r"(?<=[\w)\]}'\"`]{2}[.!?])\s+(?=[A-Z`'\"(])")
_LIKELY = {
    "SIGKILL": "the system probably ran out of memory (see `dmesg`): use smaller batches or fewer ranks",
    "SIGSEGV": "a native library crashed; see the stack below",
    "SIGABRT": "a native library aborted; see its message below",
    "SIGBUS": "mapped memory lost its backing: /dev/shm or a disk is probably full, or a mapped file was overwritten "
    "or truncated",
    "SIGFPE": "a native library divided by zero",
    "SIGTERM": "another process terminated it",
    "SIGINT": "another process interrupted it",
    "SIGXCPU": "it exceeded its CPU time limit (`ulimit -t`)",
}


class RankTraceback(Exception):  # noqa: N818  # not raised: it is the cause that carries a rank's traceback
    """The traceback of a rank, as the ``__cause__`` of the exception raised in the notebook."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def exception_for(cause: Cause, account: Account) -> Any:
    if cause.end is None:
        again = f"{restart_command(account.session)} restarts them" if account.session else "launch again"
        return RankLostError(
            f"the parent process of the ranks of {account.name} was killed, and all ranks with it: {again}. "
            f"{account.where}"
        )
    failed = cause.end.failed
    if cause.kind == "died" or failed is None:
        return _died(cause.end, account)
    error = _raised(cause, failed, account)
    try:
        return _explained(error, cause, failed, account)
    except Exception:  # noqa: BLE001  # a user's __setattr__, such as that of a frozen dataclass
        return _explained(_substitute(cause, failed, account), cause, failed, account)


def answer_of(end: RankEnd, asked: str, session: str, files: LaunchFiles) -> Any:
    """Return the exception of a rank of a session that could not answer a question."""
    assert end.failed is not None
    cause = Cause(end.failed.kind, end.rank, end.failed.time_ns, end)
    error = exception_for(cause, Account(f"`{asked}`", [end], files, {}, {}, session=session, asked=asked))
    if cause.kind == "result":  # the message says it all
        show_as(error, [f"ResultError: {error}"])
    return error


def _explained(error: Any, cause: Cause, failed: Failed, account: Account) -> Any:
    error.rank = cause.rank
    _add_memory_note(error)
    if failed.advice:
        add_note(error, failed.advice)
    if account.hint and "process group" in failed.text and account.hint not in failed.text:
        add_note(error, account.hint)
    unsent = unsent_name(failed, account.sources)
    if unsent and not account.asked:
        add_note(error, unsent)
    text = _labelled(failed.traceback, account.sources)
    error.__cause__ = RankTraceback(f"on rank {cause.rank}:\n{text}")
    _render_in_notebook(error, text, cause.rank, account)
    return error


def unsent_name(failed: Failed, sources: Mapping[str, Source]) -> str:
    """Return a note if a rank lacked a name that the notebook has: the code made the name from a string."""
    found = _UNDEFINED.search(failed.text)
    name = found[1] if found else ""
    frames = [each["file"] for each in _FRAME.finditer(failed.traceback) if each["file"]]
    if frames and frames[-1].endswith(".py") and frames[-1] not in sources and is_users(frames[-1]):
        return ""  # a module of the user lacks it
    if failed.type_name == "KeyError" and _LOOKED_UP.search("".join(failed.traceback.splitlines()[-4:])):
        name = failed.text.strip("'")
    names = host().notebook_names() or {}
    if name not in names or name.startswith("__"):
        return ""
    reason = pickling.explain(names[name], f"`{name}`")
    if reason is not None:
        return f"`{name}` exists in the notebook but was not sent: {reason}. Create it in the ranks."
    return (
        f"`{name}` exists in the notebook but was not sent: only names that appear in the code are sent. Use `{name}` "
        "in the function or cell, or pass it as an argument."
    )


def _substitute(cause: Cause, failed: Failed, account: Account) -> RankRaisedError:
    message = f"rank {cause.rank} raised {failed.type_name}: {failed.text}"
    return RankRaisedError(message, cause.rank, account.files.err(cause.rank))


def _raised(cause: Cause, failed: Failed, account: Account) -> Any:
    log = account.files.err(cause.rank)
    if cause.kind == "collective":
        message = account.difference or (
            f"rank {cause.finished_rank} finished while rank {cause.rank} waited in {failed.collective}: "
            "every rank must make the same collective calls (do the ranks have different numbers of batches?)"
        )
        return CollectiveError(message, cause.rank, log)
    if failed.kind == "exit":
        return _left(failed, account)
    if failed.kind == "interrupt":
        message = f"rank {cause.rank} was interrupted (SIGINT) from outside this notebook. Log: {log}"
        return RankDiedError(message, cause.rank, log)
    if failed.kind == "result":
        what, verb = (f"`{account.asked}`", "Pull") if account.asked else ("return value", "Return")
        why = re.sub("^result", account.asked, failed.text) if account.asked.isidentifier() else failed.text
        said = f"rank {cause.rank}'s {what} could not be sent: {why}. {_result_advice(failed.type_name, verb)}"
        return ResultError(said, cause.rank, log)
    try:
        return pickle.loads(failed.pickled)
    except Exception:  # noqa: BLE001  # none was sent, the notebook cannot import its class, or it fails to load
        return _substitute(cause, failed, account)


def not_rebuilt(
    rank: int, trouble: BaseException, log: Any, what: str = "return value", verb: str = "Return"
) -> ResultError:
    """Return the error for what a rank has sent and `trouble` keeps the notebook from loading."""
    why = f"{type(trouble).__name__}: {text_of(trouble)}".rstrip(".")
    advice = _result_advice(type(trouble).__name__, verb)
    error = ResultError(f"rank {rank}'s {what} cannot be rebuilt in the notebook: {why}. {advice}", rank, log)
    error.__cause__ = trouble
    return error


def _result_advice(type_name: str, verb: str) -> str:
    if type_name.rpartition(".")[2] in ("OSError", "NoRoomError", "MemoryError"):
        return f"{verb} fewer or smaller tensors"
    return f"{verb} tensors or plain data"


def _left(failed: Failed, account: Account) -> RankError:
    said = f" ({failed.text})" if failed.text not in ("", "None", str(failed.status)) else ""
    if account.session:
        return RankRaisedError(
            f"rank {failed.rank} called exit with status {failed.status}{said}, which stops {account.name} on every "
            f"rank. The ranks keep their variables; {command(account.session, 'stop')} ends the ranks",
            failed.rank,
            account.files.err(failed.rank),
        )
    error = RankDiedError(
        f"rank {failed.rank} called sys.exit with status {failed.status}{said} before {account.name} returned: "
        f"return from the function instead. Log: {account.files.err(failed.rank)}",
        failed.rank,
        account.files.err(failed.rank),
    )
    error.returncode = failed.status
    return error


def _died(end: RankEnd, account: Account) -> RankDiedError:
    if end.exited is not None and end.exited.lost:
        text = f"{end.exited.lost}. Log so far: {account.files.err(end.rank)}"
        return NodeLostError(text, end.rank, account.files.err(end.rank))
    error = RankDiedError(_how_it_ended(end, account), end.rank, account.files.err(end.rank))
    error.returncode = end.exited.returncode if end.exited is not None else 0
    return error


def crash_warning(crashed: Sequence[RankEnd], account: Account) -> str:
    first, *others = crashed
    said = f"every rank returned and the result is complete, but {_how_it_ended(first, account)}"
    if others:
        said += f". The same happened to rank {', '.join(str(end.rank) for end in others)}"
    return said


def fate(end: RankEnd, sources: Mapping[str, Source]) -> str:
    """Return how a rank failed, as in ``was killed by SIGKILL``; empty if it has not."""
    if end.failed is None:
        code = end.exited.returncode if end.exited is not None else 0
        if end.done is not None:
            return ""
        if end.exited is not None and end.exited.lost:
            return "was lost with its node"
        return f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with status {code}"
    where, _ = _users_line(_labelled(end.failed.traceback, sources))
    said = f"raised {headline_of(end.failed.type_name, end.failed.text)}"
    return f"{said} ({where})" if where else said


def _how_it_ended(end: RankEnd, account: Account) -> str:
    log = account.files.err(end.rank)
    when = f"{'after' if end.done is not None else 'before'} {account.name} returned"
    who = f"rank {end.rank}" + (f" on {account.hosts[end.rank]}" if account.hosts else "")
    if end.exited is None:
        return f"{who} was killed {when}, together with its parent process. Log: {log}"
    if end.exited.lost:
        return f"{end.exited.lost} {when}. Log so far: {log}"
    code = end.exited.returncode
    if code < 0:
        name = _signal_name(-code)
        likely = _LIKELY.get(name, "another process sent the signal")
        if name == "SIGABRT" and any(
            words in last_lines(account.logs[end.rank]["err"], MAX_CRASH_LINES) for words in _OTHER_SIZE
        ):
            likely = (
                "tensor sizes differ between ranks in gloo: checks=True (%%distributed --checks) finds the mismatch"
            )
        what = f"was killed by {name} {when}; {likely}"
    else:
        what = f"exited with status {code} {when} (os._exit, or C code that calls exit)"
    logs = account.logs[end.rank]
    if advice := advice_on_threads(last_lines(logs["err"], MAX_CRASH_LINES)):
        there = "its machine reached its process limit (ulimit -u, or the container's pids.max)"
        what += f"; probably {there if account.hosts else advice}"
    said = _last_said(logs["err"]) or _last_said(logs["out"])
    said = textwrap.indent(said.rstrip(), "    ")
    last = f". Its last lines:\n{said}\n" if said else ". It printed nothing. "
    return f"{who} {what}{last}Log: {log}"


def _last_said(log: Log) -> str:
    lines = last_lines(log, MAX_CRASH_LINES).splitlines()
    crash = max((i for i, line in enumerate(lines) if line.startswith("Fatal Python error: ")), default=len(lines))
    current = (i for i in range(crash, len(lines)) if lines[i].startswith("Current thread"))
    frames = lines[next(current, crash + 1) :]
    ours = (i for i, line in enumerate(frames) if (at := _FRAME.match(line)) and is_rank_runtime(at["file"] or ""))
    users = itertools.takewhile(str.strip, frames[: next(ours, 2 * _LAST_LINES)])
    return "\n".join([*lines[max(0, crash - _LAST_LINES) : crash + 1], *itertools.islice(users, 2 * _LAST_LINES)])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _labelled(traceback: str, sources: Mapping[str, Source]) -> str:
    for filename, source in sources.items():
        if source.label:
            traceback = traceback.replace(f'File "{filename}", line', f"{source.label}, line")
    return traceback


def _render_in_notebook(error: Any, text: str, rank: int, account: Account) -> None:
    """Make IPython show the rank's traceback instead of the launcher's frames."""
    first = headline_of(type(error).__name__, text_of(error))
    said = f"{first.type_name}: {first.details}" if first.details else str(first)
    notes = getattr(error, "__notes__", [])
    lines = [said, "", f"On rank {rank} of {account.name}:", *text.rstrip().splitlines(), *notes]
    others = _others(rank, account)
    if others:
        lines += ["", "Then, on other ranks:", *others[:8]]
    where, source = _users_line(text)
    at = where if where.startswith(account.name) else ", ".join(filter(None, (account.name, where)))
    line = [f"On rank {rank} of {at}:", f"    {source}"] if source else [f"On rank {rank} of {at}."]
    short = [str(first), *line, *notes]
    last = account.where

    def rendered() -> list[str]:
        """Without the traceback if the panel above has it; nbconvert and papermill, where no one types, need it."""
        is_told = account.is_shown and host().can_type()
        return [*(short if is_told else lines), *_callers(error), "The panel has the traceback. " * is_told + last]

    error._render_traceback_ = rendered


def show_as(error: Any, lines: Sequence[str], last: Sequence[str] = ()) -> None:
    """Make IPython show these lines of an error, and where the user's code called, instead of nblaunch's frames."""
    error._render_traceback_ = lambda: [*lines, *_callers(error), *last]


def _callers(error: BaseException) -> list[str]:
    """Return the user's frames in the notebook; none if the cell itself has called."""
    frames = traceback.extract_tb(users_part(error.__traceback__))
    if len(frames) < 2:
        return []
    lines = ["", "Called from:"]
    for frame in frames:
        place = host().cell_label(frame.filename) or f'File "{frame.filename}"'
        lines += [f"  {place}, line {frame.lineno}, in {frame.name}", *([f"    {frame.line}"] if frame.line else [])]
    return lines


def _others(rank: int, account: Account) -> list[str]:
    return [
        f"rank {e.rank}: {headline_of(e.failed.type_name, e.failed.text)}"
        for e in account.ends
        if e.failed and e.rank != rank and e.failed.kind != "interrupt"  # stopped, not failed
    ]


def describe(error: BaseException, account: Account | None) -> Failure:
    rank = getattr(error, "rank", -1)
    traceback = error.__cause__.args[0].partition("\n")[2] if isinstance(error.__cause__, RankTraceback) else ""
    where, source = _users_line(traceback)
    others = tuple(_others(rank, account)) if account is not None else ()
    said = _headline(error, None if account is None else account.files.directory)
    is_whole = isinstance(error, RankError) and error.rank >= 0  # it names the rank and what happened
    return Failure(
        rank,
        "" if is_whole else said.type_name,
        said.text[:1].upper() + said.text[1:] if is_whole else said.text,
        where,
        source,
        traceback.rstrip(),
        others,
        "" if said.details in traceback else said.details.removeprefix(said.text).lstrip(". "),
    )


def _users_line(traceback: str) -> tuple[str, str]:
    lines = traceback.splitlines()
    frames = [(found, i) for i, line in enumerate(lines) if (found := _FRAME.match(line))]
    in_cells = [frame for frame in frames if frame[0]["label"]]
    own = [frame for frame in frames if is_users(frame[0]["file"] or "")]
    for found, i in (in_cells or own)[-1:]:
        place = found["label"] or found["file"]
        source = lines[i + 1].strip() if i + 1 < len(lines) and not _FRAME.match(lines[i + 1]) else ""
        return f"{place}, line {found['line']}", source
    return "", ""


def _add_memory_note(error: BaseException) -> None:
    """Add to a CUDA out-of-memory error what the notebook itself holds on the GPUs; torch says what the rank held."""
    torch = sys.modules.get("torch")
    if type(error).__name__ != "OutOfMemoryError" or torch is None:
        return
    held: list[str] = []
    with contextlib.suppress(Exception):  # CUDA's errors; best effort: must never replace the rank's exception
        if torch.cuda.is_initialized():
            sizes = [(torch.cuda.memory_reserved(index), index) for index in range(torch.cuda.device_count())]
            held = [f"{size / 1e9:.1f} GB on cuda:{index}" for size, index in sizes if size]
    if held:
        add_note(
            error,
            f"The notebook itself holds {' and '.join(held)}: delete tensors there, then call torch.cuda.empty_cache()",
        )


# ------------------------------------------------------------------ what an exception carries
def interruption(message: str, results: Mapping[int, Any], files: object = None) -> KeyboardInterrupt:
    """Return a KeyboardInterrupt that IPython shows as one line, with what the ranks had returned."""
    interrupt: Any = KeyboardInterrupt(message)
    attach(results, interrupt, files)
    interrupt.__notes__ = []
    show_as(interrupt, [f"KeyboardInterrupt: {message}"], interrupt.__notes__)
    return interrupt  # type: ignore[no-any-return]  # Any, to give it attributes


def attach(results: Mapping[int, Any], error: Any, files: object = None) -> None:
    """Give an error what the ranks returned, unless it is a user's error with ``results`` of its own.

    `files` are the logs, which are kept for the lifetime of the error.
    """
    with contextlib.suppress(Exception):  # a user's __getattr__ or __setattr__
        if files is not None:
            error._nblaunch_files = files
        if isinstance(error, NblaunchError) or not hasattr(error, "results"):
            error.results = dict(results)


def summary(error: BaseException, logs: Path | None = None) -> str:
    """Return an error as one sentence, without the path in the directory `logs` at its end."""
    rank = getattr(error, "rank", -1)
    return f"{f'rank {rank}: ' if rank >= 0 else ''}{_headline(error, logs)}"


def _headline(error: BaseException, logs: Path | None) -> Headline:
    text = text_of(error)
    if logs is not None and isinstance(error, NblaunchError):
        text = re.sub(rf"\s*Logs?(?: so far)?: {re.escape(str(logs))}\S*\s*$", "", text)
    return headline_of(type(error).__name__, text)


# ------------------------------------------------------------------ headlines
class Headline(NamedTuple):
    type_name: str
    text: str
    """At most `MAX_HEADLINE` characters, without line breaks."""
    details: str
    """The message, if the headline leaves something out that no traceback has."""

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.type_name, self.text)))


def headline_of(type_name: str, message: str) -> Headline:
    message = message.strip()
    inner = _innermost(message)
    if inner is None:
        text = _first_sentence(message)
        return Headline(type_name, text, "" if text == message else message[:_MAX_DETAILS])
    caught = _CAUGHT.match(message)
    where = f" ({caught['where'].replace('worker process', 'worker')})" if caught else ""
    inner_type, inner_message = inner
    text = _first_sentence(inner_message, MAX_HEADLINE - len(where))
    return Headline(inner_type, f"{text}{where}".strip(), "")


def _innermost(message: str) -> tuple[str, str] | None:
    _, mark, trace = message.rpartition(_TRACEBACK)
    lines = trace.strip('\n"').splitlines()
    for number, line in enumerate(lines if mark else []):
        found = _RAISED.match(line)
        if found is not None:
            return found["type"], "\n".join([found["text"] or "", *lines[number + 1 :]])
    return None


def _first_sentence(message: str, most: int = MAX_HEADLINE) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    text = lines.pop(0) if lines else ""
    if text.endswith(":") and lines and len(text) < most:
        text = f"{text} {lines[0]}"  # such as "backend='inductor' raised:"
    text = " ".join(_SENTENCE_END.split(text, 1)[0].split())
    if len(text) <= most:
        return text
    words = text[: most - 2].rpartition(" ")[0]
    return f"{words.rstrip(' ,;:')} …" if words else f"{text[: most - 1]}…"
