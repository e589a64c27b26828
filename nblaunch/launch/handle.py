"""A launch as its user holds it: running in the background of a kernel, or waited for."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from nblaunch.engines import kernel_fork
from nblaunch.engines.generations import servers
from nblaunch.engines.import_environment import Where
from nblaunch.engines.server_client import Reaper, remedy
from nblaunch.errors import (
    LaunchStoppedError,
    LaunchTimeoutError,
    NblaunchError,
    ResultError,
    StartError,
    text_of,
    warn,
)
from nblaunch.launch import failures
from nblaunch.launch.commands import Commands
from nblaunch.launch.frontend import host
from nblaunch.launch.output.log_directory import LaunchFiles, RankLogs
from nblaunch.launch.output.pruning import prune
from nblaunch.launch.payload import Shipment, name_of
from nblaunch.launch.plan import Plan
from nblaunch.launch.result import LaunchResult, Metrics, named
from nblaunch.launch.stacks import WITHIN
from nblaunch.launch.supervisor import Attempt
from nblaunch.launch.verdict import Verdict
from nblaunch.launch.views.view import LaunchInfo, Outcome, Shielded, State, View
from nblaunch.machine.process_state import this_process
from nblaunch.machine.segments import in_words
from nblaunch.transfer.parcel import unpack
from nblaunch.wire.messages import Payload

_log = logging.getLogger(__name__)
_live: dict[str, Launch] = {}
_told_of: set[str] = set()
"""What the user has been told once: names that stay unchanged in the notebook, and what is large."""
_numbers = itertools.count(1)
_LARGE = 10**9
"""Bytes from which on it is said what is sent."""
_MOST_PLACES = 8
"""Ranks of which is told where they were as their time was over."""
_END_WITHIN = 3.0
"""Seconds to wait for the end of a launch that was killed as it started."""
_LISTENS_WITHIN = 4.0
"""Seconds within which a supervisor begins to ask for stacks: it may be busy with asking for somebody else."""


class Launch:
    """One run of a function over its ranks, as `notebook_launcher` returns it with ``block=False``.

    Attributes:
        name: The function's name.
        world_size: The number of ranks.
        id: Names the launch in ``%distributed status`` and in its ranks' ``TORCHELASTIC_RUN_ID``.
    """

    def __init__(self, plan: Plan, payload: Payload, shipment: Shipment, view: View) -> None:
        self.name = name_of(payload.function)
        self.world_size = plan.world_size
        self.id = f"{os.getpid()}-{next(_numbers)}-{secrets.token_hex(3)}"
        self._plan, self._payload, self._shipment, self._view = plan, payload, shipment, Shielded(view)
        self._commands = Commands()
        self._finished = threading.Event()
        self._begin = time.monotonic()
        self._deadline = float("inf") if plan.timeout is None else self._begin + plan.timeout
        self._process = this_process()
        self._result: LaunchResult | None = None
        self._error: BaseException | None = None
        self._returned: dict[int, Any] = {}
        """What each rank that has returned gave back."""
        self._crash = ""
        """What happened after every rank had returned, if that is still to be warned of."""
        self._account: failures.Account | None = None
        """What is known of the attempt that failed."""
        self._thread = threading.Thread(target=self._supervise, name=f"nblaunch-{self.id}", daemon=True)

    def begin(self, *, blocking: bool = False) -> None:
        """Start it.

        Args:
            blocking: Whether the caller waits for its end. Default: False.

        Raises:
            StartError: This process cannot have another thread.
        """
        self._view.begun(self, blocking)
        _live[self.id] = self
        try:
            self._thread.start()
        except RuntimeError as error:
            _live.pop(self.id)
            self._commands.close()
            self._let_go()
            raise StartError(f"{self.name} could not be started: {error} (ulimit -u)") from error
        except BaseException:  # the user's interrupt: nobody will hold the launch
            self._abandon()
            raise

    @property
    def done(self) -> bool:
        """Whether it has ended: finished, failed or stopped."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end, for `timeout` seconds at most (default: without limit); whether it has ended."""
        return host().wait(self._finished, timeout)

    def result(self) -> LaunchResult:
        """Wait for its end, and give what it brought. A crash after every rank had returned is warned of, once.

        Raises:
            Exception: What the rank that failed first raised, or one of nblaunch's own (see `nblaunch.errors`). Its
                ``results`` are what the ranks that had returned gave back, by rank.
        """
        __tracebackhide__ = True  # IPython leaves this frame out
        self.wait()
        crash, self._crash = self._crash, ""
        if crash:
            try:
                warn(crash)
            except Warning as raised:  # the user's filters make warnings errors
                _attach(self._returned, raised)
                raise
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def stop(self) -> None:
        """Interrupt the ranks: each sees KeyboardInterrupt once, and has its time for ``finally``. Returns at once.

        A rank that does not answer within 3 s is killed.
        """
        self._commands.ask()

    def kill(self) -> None:
        """End the ranks now, whatever they do. Returns at once."""
        self._commands.ask(kill=True)

    def ask_stacks(self) -> None:
        """Have the launch's view show what each rank is doing. Returns at once."""
        self._commands.ask_stacks()

    def stacks(self, timeout: float = WITHIN) -> dict[int, str]:
        """What each rank is doing now: its Python stacks, by rank. Nothing is stopped; code stuck in C answers too.

        Args:
            timeout: Seconds that a rank has to answer; of one that does not, that is said. Default 2.

        Returns:
            For each rank that runs, its threads, the main one first; empty where the launch has ended.
        """
        asked = self._commands.want_stacks(timeout)
        with contextlib.suppress(concurrent.futures.TimeoutError):  # it starts or ends, and listens to nobody
            return asked.result(timeout + _LISTENS_WITHIN)
        return {}

    def __repr__(self) -> str:
        seconds = time.monotonic() - self._begin
        state = (
            f"running for {seconds:.0f} s" if not self.done else ("failed" if self._error is not None else "finished")
        )
        return f"<Launch {self.id} of {self.name}: {self.world_size} ranks, {state}>"

    def join(self) -> LaunchResult:
        """Start it and wait in the notebook's cell: an interrupt stops the ranks, a second one kills them.

        Raises:
            KeyboardInterrupt: It was interrupted, and nothing is left of it.
        """
        __tracebackhide__ = True  # IPython leaves this frame out
        try:
            self.begin(blocking=True)
            interrupted = self._wait_out()
        except BaseException as error:  # an interrupt between two lines of ours
            self._abandon()
            _attach(self._returned, error)
            raise
        if interrupted and isinstance(self._error, LaunchStoppedError):
            interrupt = _interrupted(str(self._error), self._returned)
            _keep_logs(interrupt, getattr(self._error, "_nblaunch_files", None))
            raise interrupt from None
        if interrupted and self._error is None:  # a loop of launches must end too; the result goes with the exception
            said = f"{self.name} was interrupted, and every rank returned: the result is sys.last_value.results"
            raise _interrupted(said, self._returned)
        return self.result()

    def _abandon(self) -> None:
        if self.id in _live:
            self._commands.ask(kill=True)
            self._finished.wait(_END_WITHIN)

    def _wait_out(self) -> bool:
        """Wait for its end; whether the user interrupted it meanwhile."""
        interrupts = 0
        while not self._finished.is_set():
            try:
                if interrupts:
                    self._commands.ask(kill=interrupts > 1)
                self.wait()
            except KeyboardInterrupt:
                interrupts += 1
        return interrupts > 0

    # -------------------------------------------------------------- in the supervisor thread
    def _supervise(self) -> None:
        try:
            self._run()
        except StartError as error:
            self._error = error
            self._view.finished(self._outcome("failed", error))
        except BaseException as error:  # noqa: BLE001  # whoever waits must hear of it
            _log.exception("the supervisor of launch %s failed", self.id)
            self._error = error
            self._view.finished(self._outcome("failed", error))
        finally:
            _live.pop(self.id, None)
            self._commands.close()
            del self._payload  # the notebook may hold this handle for long
            self._let_go()
            self._finished.set()
            servers.build_soon()
            prune()  # last, as no caller waits for it

    def _run(self) -> None:
        for number in range(self._plan.max_restarts + 1):
            again = self._attempt(number)
            if not again:
                return

    def _tell_of_payload(self) -> None:
        """Say once what is large, and where what was on a GPU goes."""
        sent = self._shipment.sent
        if sent.from_gpu:
            self._view.note(
                f"{in_words(sent.from_gpu)} of tensors were on a GPU: each rank has them on its own, by way of the host"
            )
        largest = next((name for name, _ in sent.parts), "")
        if sent.size > _LARGE and (told := f"{largest} is large") not in _told_of:
            _told_of.add(told)
            parts = named(dict(sent.parts))
            self._view.note(f"the ranks are sent {in_words(sent.size)}, of which all map one copy: {parts}")

    def _let_go(self) -> None:
        """Close what was to be sent."""
        if self._shipment.parcel is not None:
            self._shipment.parcel.close()

    def _attempt(self, number: int) -> bool:
        """One attempt; whether another is to follow."""
        try:
            files = LaunchFiles.create(self.id)
        except OSError as refusal:
            raise StartError(f"{self.name} has no place for its logs: {refusal}{remedy(refusal)}") from refusal
        try:
            self._view.started(self._info(files, number))
            if number == 0:
                self._tell_of_payload()
            attempt, verdict = self._see_through(number, files)
            error = self._conclude(verdict, attempt, files)
            again = number < self._plan.max_restarts and not self._commands.stop
            if error is not None and verdict.state == "failed" and again:
                self._view.note(f"{_summary(error)}: restarting all ranks ({number + 1} of {self._plan.max_restarts})")
                return True
            self._error = error
            _keep_logs(error, files)
            state: State = "failed" if error is not None and verdict.state == "finished" else verdict.state
            self._view.finished(self._outcome(state, error))
            return False
        finally:
            files.close()

    def _see_through(self, number: int, files: LaunchFiles) -> tuple[Attempt, Verdict]:
        """Run the ranks to their end; again where the fork server died before it had forked their reaper."""
        for _ in range(2):
            reaper = self._reaper()
            attempt = Attempt(
                self._plan,
                self.id,
                number,
                self._process,
                () if self._shipment.parcel is None else self._shipment.parcel.fds,
                files,
                self._view,
                self._commands,
                self._deadline,
                self._shipment.sources,
            )
            verdict = attempt.run(reaper)
            if attempt.met_reaper or self._commands.stop or reaper.server is None:
                break
            servers.give_up(reaper.server)
        return attempt, verdict

    def _reaper(self) -> Reaper:
        if self._plan.method == "fork":
            return kernel_fork.fork_kernel(self._payload)
        where = Where(self._plan.env, self._process.cwd, self._plan.named)
        return servers.reaper(self._plan.method, self.id, self.world_size, where)

    def _info(self, files: LaunchFiles, number: int) -> LaunchInfo:
        plan = self._plan
        where = files.directory
        return LaunchInfo(self.id, self.name, plan.world_size, plan.device, plan.method, where, number, plan.env, files)

    def _outcome(self, state: State, error: BaseException | None) -> Outcome:
        seconds = time.monotonic() - self._begin
        if error is None:
            return Outcome(state, seconds, "")
        failure = failures.describe(error, self._account) if state == "failed" else None
        return Outcome(state, seconds, _summary(error), failure)

    # -------------------------------------------------------------- what it brought
    def _conclude(self, verdict: Verdict, attempt: Attempt, files: LaunchFiles) -> BaseException | None:
        """Keep the result, or give the error that tells why there is none."""
        self._returned, error = _load_all(attempt.results, files)
        ends = [rank.end() for rank in attempt.ranks]
        account = failures.Account(self.name, ends, files, self._shipment.sources)
        if verdict.crashed:
            self._crash = failures.crash_warning(verdict.crashed, account)
            self._view.note(self._crash)
        if verdict.state == "finished" and error is None:
            dropped = sum(rank.dropped.reports for rank in attempt.ranks)
            metrics = Metrics(attempt.reading.reports, dropped)
            logs = [RankLogs(files.out(r.rank), files.err(r.rank), files, r.dropped.output) for r in attempt.ranks]
            seconds = time.monotonic() - self._begin
            values = list(self._returned.values())
            self._result = LaunchResult(self.name, values, metrics, logs, seconds, self._shipment.sent)
            self._tell_of_changes(attempt)
        elif verdict.cause is not None:
            self._account = account
            error = failures.exception_for(verdict.cause, account)
        elif verdict.state == "stopped":
            error = self._stopped(attempt, files)
        if error is not None:
            _attach(self._returned, error)
        return error

    def _stopped(self, attempt: Attempt, files: LaunchFiles) -> BaseException:
        if attempt.ladder is not None and attempt.ladder.reason == "timeout":
            return LaunchTimeoutError(
                f"{self.name} took longer than timeout={self._plan.timeout:g} s and was stopped."
                f"{_where(attempt)}Logs: {files.directory}"
            )
        seconds = time.monotonic() - self._begin
        return LaunchStoppedError(
            f"{self.name} was stopped after {seconds:.1f} s{_trouble(attempt)}. Logs: {files.directory}"
        )

    def _tell_of_changes(self, attempt: Attempt) -> None:
        changed = {name for rank in attempt.ranks if rank.done is not None for name in rank.done.changed}
        for name in sorted(changed - _told_of):
            _told_of.add(name)
            self._view.note(
                f"the ranks changed `{name}`, which is a copy there: the notebook's own is as it was. To have it, "
                "return it (of a module, its state_dict()) and take it from the result"
            )


def _trouble(attempt: Attempt) -> str:
    """What went wrong while ranks were stopping: a checkpoint may not have been written."""
    ends = [rank.end() for rank in attempt.ranks]
    raised = [end.failed for end in ends if end.failed is not None and end.failed.kind not in ("interrupt", "exit")]
    said = [f"rank {f.rank} raised {f.type_name}: {failures.first_line(f.text)}" for f in raised if not f.collective]
    killed = attempt.ladder.killed if attempt.ladder is not None else set()
    answered = attempt.ladder.answered if attempt.ladder is not None else set()
    said += [
        f"rank {end.rank} was killed before its `finally` had ended"
        for end in ends
        if end.rank in killed and end.rank in answered and end.done is None and end.failed is None
    ]
    return "; meanwhile " + ", ".join(said) if said else ""


def _where(attempt: Attempt) -> str:
    """Where the ranks were when their time was over."""
    places = attempt.stacks.places or {}
    said = [f"rank {rank} {place}" for rank, place in list(places.items())[:_MOST_PLACES]]
    said += ["…"] if len(places) > _MOST_PLACES else []
    return "\n" + "\n".join(f"    {line}" for line in said) + "\n" if said else " "


def live_launches() -> list[Launch]:
    """The launches of this kernel that have not ended, oldest first."""
    return list(_live.values())


def _keep_logs(error: Any, files: object) -> None:
    """Keep the logs, which the error names, for as long as it is there."""
    with contextlib.suppress(Exception):  # a user's __setattr__; and there may be no error
        error._nblaunch_files = files


def _load_all(parcels: Mapping[int, Sequence[int]], files: LaunchFiles) -> tuple[dict[int, Any], BaseException | None]:
    """What each rank returned, and the error of the first that cannot be rebuilt here."""
    values: dict[int, Any] = {}
    error: BaseException | None = None
    for rank, fds in sorted(parcels.items()):
        try:
            values[rank] = unpack(fds)
        except BaseException as trouble:  # noqa: BLE001  # user code, which may call sys.exit
            error = error or ResultError(
                f"what rank {rank} returned cannot be rebuilt in the notebook: {type(trouble).__name__}: {trouble}",
                rank,
                files.err(rank),
            )
            error.__cause__ = trouble
    return values, error


def _summary(error: BaseException) -> str:
    text = text_of(error).strip().splitlines()
    rank = getattr(error, "rank", -1)
    return f"{f'rank {rank}: ' if rank >= 0 else ''}{type(error).__name__}{': ' + text[0][:300] if text else ''}"


def _attach(results: Mapping[int, Any], error: Any) -> None:
    """Give an error what the ranks returned, unless it is a user's and has ``results`` of its own."""
    with contextlib.suppress(Exception):  # a user's __getattr__ or __setattr__
        if isinstance(error, NblaunchError) or not hasattr(error, "results"):
            error.results = dict(results)


def _interrupted(said: str, results: Mapping[int, Any]) -> KeyboardInterrupt:
    interrupt: Any = KeyboardInterrupt(said)
    _attach(results, interrupt)
    interrupt._render_traceback_ = lambda: [f"KeyboardInterrupt: {said}"]
    return interrupt  # type: ignore[no-any-return]  # Any, to give it attributes
