"""The command line: ``python -m nblaunch runs | attach NAME | stop NAME | logs NAME | rm NAME``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from nblaunch.errors import ArgumentError, NblaunchError
from nblaunch.launch import run_folders
from nblaunch.launch.attached import AttachedLaunch
from nblaunch.launch.frontend import host
from nblaunch.launch.run_folders import RunFolder
from nblaunch.launch.views import NullView
from nblaunch.machine.arguments import ranks_in_words
from nblaunch.notebook.run_table import runs

_POLL_S = 0.2
_BLOCK_BYTES = 1 << 20


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m nblaunch", description="Show and control detached runs of nblaunch.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, about in (
        ("runs", "list all runs and launches"),
        ("attach", "show a run as text until it ends; after Ctrl-C, the run goes on"),
        ("stop", "interrupt the ranks of a run, and wait for its end"),
        ("logs", "print what the ranks of a run, or of a launch, have printed"),
        ("rm", "remove the folder of a run that has ended, with its logs and its result"),
    ):
        command = commands.add_parser(name, help=about, description=about)
        if name != "runs":
            other = ", the id of a launch, or the name of a function" * (name == "logs")
            command.add_argument("name", metavar="NAME", help=f"the name of the run{other}")
        if name == "logs":
            command.add_argument("--rank", type=int, metavar="N", help="only this rank; default: all")
            command.add_argument("--follow", action="store_true", help="go on printing until the run ends")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run a command. Return the exit status: 1 for an error, or a run that has not finished."""
    given = _parser().parse_args(words)
    try:
        match given.command:
            case "runs":
                print(runs())
            case "attach":
                return _attach(given.name)
            case "stop":
                return _stop(given.name)
            case "logs":
                _logs(given.name, given.rank, follow=given.follow)
            case "rm":
                run_folders.remove(given.name)
                print(f"{given.name}: removed")
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # of `head`
        sys.stderr.close()
        return 1
    except (NblaunchError, OSError) as error:
        print(f"nblaunch: {error}", file=sys.stderr)
        return 1
    return 0


def _attach(name: str) -> int:
    launch = AttachedLaunch(run_folders.find_run(name), host().view("auto"))
    try:
        launch.wait()
    except KeyboardInterrupt:
        print(f"\nthe run {name} goes on", flush=True)
        os._exit(0)  # the thread that shows the run may be writing, which would abort a regular exit
    if launch.outcome is not None and launch.outcome.failure is not None:
        print(launch.outcome.failure.traceback.rstrip())
    run = run_folders.find_run(name)
    print(f"{name}: {run.state}{f': {run.message}' * bool(run.message)}")
    return 0 if run.state == "finished" else 1


def _stop(name: str) -> int:
    run = run_folders.find_run(name)
    if not run.is_over:
        launch = AttachedLaunch(run, NullView())
        launch.stop()
        launch.wait()
        run = run_folders.find_run(name)
    print(f"{name}: {run.state}")
    return 0


def _logs(name: str, rank: int | None, *, follow: bool) -> None:
    """Print the logs of the last attempt as ``tail`` does, each with its name on top."""
    read: dict[Path, int] = {}
    last: Path | None = None
    is_over = False
    while not is_over:
        run = run_folders.find(name)
        is_over = run.is_over or not follow
        if rank is not None and run.ranks and rank not in range(run.ranks):
            raise ArgumentError(f"--rank {rank}: {ranks_in_words(run.ranks)}")
        for path in _files(run, rank):
            with open(path, "rb") as file:
                file.seek(read.get(path, 0))
                while data := file.read(_BLOCK_BYTES):
                    if path != last:
                        print(f"==> {path.name} <==", flush=True)
                    last = path
                    sys.stdout.buffer.write(data)
                    sys.stdout.buffer.flush()
                read[path] = file.tell()
        if not is_over:
            time.sleep(_POLL_S)


def _files(run: RunFolder, rank: int | None) -> list[Path]:
    ranks = range(run.ranks) if rank is None else [rank]
    return [path for each in ranks for kind in ("out", "err") if (path := run.log_dir / f"rank{each}.{kind}").exists()]


if __name__ == "__main__":
    sys.exit(main())
