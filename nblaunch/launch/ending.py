"""How a launch has ended: what its result or its error is made of, also in another process and days later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nblaunch.engines import current
from nblaunch.launch import failures
from nblaunch.launch.output.log_directory import LaunchFiles, RankLogs
from nblaunch.launch.output.reports import ReportList
from nblaunch.launch.result import LaunchResult, Metrics, Sent
from nblaunch.launch.stopping import Account, ByUser, Reason
from nblaunch.launch.task import Task
from nblaunch.launch.verdict import Verdict
from nblaunch.transfer.parcel import unpack
from nblaunch.wire.tables import Dropped

MAX_PLACES = 8
"""Ranks whose place a timeout's message names."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a launch's last attempt. Picklable."""

    verdict: Verdict
    account: Account
    reason: Reason
    """Why it was stopped, if it was."""
    world_size: int
    dropped: Mapping[int, Dropped]
    """What each rank could not write."""
    sent: Sent

    def moved_to(self, directory: Path) -> Ending:
        """Return the same with its files in this directory: a volume may be mounted elsewhere now."""
        logs = {rank: current.files_of(rank, directory) for rank in self.account.logs}
        found = {rank: {kind: logs[rank].log(kind) for kind in kinds} for rank, kinds in self.account.logs.items()}
        return replace(self, account=replace(self.account, files=LaunchFiles(directory, None), logs=found))

    def error(self) -> Any:
        """Return the exception to raise; None if every rank has returned."""
        if self.verdict.cause is not None:
            return failures.exception_for(self.verdict.cause, self.account)
        return self.reason.error(self.account) if self.verdict.state == "stopped" else None

    @property
    def crash(self) -> str:
        """What to say of ranks that crashed after every rank had returned; empty if none did."""
        return failures.crash_warning(self.verdict.crashed, self.account) if self.verdict.crashed else ""

    def result(
        self, returned: Mapping[int, Any], reports: ReportList, record_html: Callable[[], str | None]
    ) -> LaunchResult:
        files = self.account.files
        metrics = Metrics(reports, any(dropped.reports for dropped in self.dropped.values()))
        logs = [RankLogs(files.out(rank), files.err(rank), files, it.output) for rank, it in self.dropped.items()]
        values = [returned.get(rank) for rank in range(self.world_size)]  # a session may lack a rank
        return LaunchResult(self.account.name, values, metrics, logs, self.account.seconds, self.sent, record_html)

    def load(self, parcels: Mapping[int, Sequence[int]]) -> tuple[dict[int, Any], Exception | None]:
        """Rebuild what the ranks have returned. Return it, and the first error."""
        returned: dict[int, Any] = {}
        error: Exception | None = None
        for rank, fds in sorted(parcels.items()):
            try:
                returned[rank] = unpack(fds)
            except BaseException as trouble:  # noqa: BLE001  # user code, which may call sys.exit
                error = error or failures.not_rebuilt(rank, trouble, self.account.files.err(rank))
        return returned, error


def incomplete(task: Task) -> str:
    """Return what failed while a task was stopped, as a clause."""
    raised = [rank.failed for rank in task.ranks if rank.failed and rank.failed.kind not in ("interrupt", "exit")]
    parts = [f"rank {f.rank} raised {failures.headline_of(f.type_name, f.text)}" for f in raised if not f.collective]
    killed = task.ladder.killed & task.ladder.answered if task.ladder is not None else set()
    parts += [
        f"rank {rank.rank} was killed before its `finally` had ended"
        for rank in task.ranks
        if rank.rank in killed and rank.done is None and rank.failed is None
    ]
    return "; meanwhile " + ", ".join(parts) if parts else ""


def places(task: Task) -> str:
    """Return where the ranks of a task were when its time was over."""
    found = task.inspector.said or {}
    lines = [f"rank {rank} {place}" for rank, place in list(found.items())[:MAX_PLACES]]
    lines += ["…"] if len(found) > MAX_PLACES else []
    lines += [task.stuck.verdict.text] if task.stuck.verdict is not None else []
    return "\n" + "\n".join(f"    {line}" for line in lines) + "\n" if lines else " "


def reason_of(task: Task) -> Reason:
    return task.ladder.reason if task.ladder is not None else ByUser()
