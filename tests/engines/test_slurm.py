"""Launches by a real Slurm with two nodes."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import nblaunch
from nblaunch.engines import current
from nblaunch.errors import ArgumentError, LaunchStoppedError, NodeLostError, StartError
from tests.conftest import eventually
from tests.engines.agents import have_begun
from tests.engines.slurm_cluster import SlurmCluster
from tests.kernel.harness import running_kernel
from tests.kernel.test_readme import REFERENCE, blocks


def launch(function: Callable[..., Any], **options: Any) -> Any:
    chosen: dict[str, Any] = {"engine": "slurm", "num_nodes": 2, "view": "none", **options}
    return nblaunch.notebook_launcher(function, **chosen)


def hosts() -> tuple[str, list[str]]:
    dist.barrier()
    return socket.gethostname(), [name for name in os.environ if name.startswith(("SLURM_NTASKS", "SLURM_PROCID"))]


def work() -> None:
    try:
        print("begun", flush=True)
        time.sleep(600)
    finally:
        time.sleep(0.5)
        print("saved")


def jobs(slurm: SlurmCluster) -> list[list[str]]:
    """The id, state and reason of each job."""
    return [line.split(maxsplit=2) for line in slurm.run("squeue", "-h", "-o", "%i %T %r").splitlines()]


def test_ranks_run_on_the_nodes_that_slurm_gives(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variables that srun refuses together; and a job that is cancelled lets them finish first."""
    for name in ("SLURM_MEM_PER_CPU", "SLURM_MEM_PER_NODE", "SLURM_NTASKS_PER_GPU"):
        monkeypatch.setenv(name, "1")
    assert list(launch(hosts, num_processes=2)) == [("n1", []), ("n1", []), ("n2", []), ("n2", [])]
    ((job, state, _),) = jobs(slurm)
    assert state == "RUNNING"
    assert current.status()[-1] == f"slurm job {job}: n1, n2"
    running = launch(work, block=False)
    eventually(have_begun)
    assert [each[0] for each in jobs(slurm)] == [job]  # the nodes are held
    slurm.run("scancel", job)
    with pytest.raises(
        LaunchStoppedError, match=r"^n\d: the node is being reclaimed \(SIGTERM\), so work was"
    ) as caught:
        running.result()
    files = caught.value._nblaunch_files  # type: ignore[attr-defined]
    assert [files.out(rank).read_text() for rank in (0, 1)] == ["begun\nsaved\n"] * 2


def test_the_notebooks_own_allocation_is_used(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.run("salloc", "-N2", "--no-shell", "-Jmine")
    (job,) = [each[0] for each in jobs(slurm)]
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    assert [host for host, _ in launch(hosts, engine="auto", num_nodes=None)] == ["n1", "n2"]
    assert [each[0] for each in jobs(slurm)] == [job]
    with pytest.raises(ArgumentError, match=f"^num_nodes=3, but the notebook's job {job} has 2"):
        launch(hosts, num_nodes=3)
    current.release()
    assert [each[1] for each in jobs(slurm)] == ["RUNNING"]  # it is the user's
    slurm.run("scancel", job)


def test_a_queued_job_says_why_and_an_interrupt_cancels_it(
    slurm: SlurmCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.run("salloc", "-N1", "--exclusive", "--no-shell", "-Jother")
    (other,) = [each[0] for each in jobs(slurm)]

    def interrupt() -> None:
        eventually(lambda: len(jobs(slurm)) == 2 and "is queued (" in "".join(said))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    said: list[str] = []
    thread = threading.Thread(target=interrupt)
    engine = current.chosen("slurm", 2)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        engine.machines(said.append)
    thread.join()
    assert "slurm job" in said[-1]
    assert "is queued (Resources)" in said[-1]
    eventually(lambda: [each[0] for each in jobs(slurm)] == [other])
    slurm.run("scancel", other)


def test_a_killed_srun_ends_the_ranks_and_frees_the_nodes(slurm: SlurmCluster) -> None:
    running = launch(work, block=False)
    eventually(have_begun)
    engine: Any = current.chosen("slurm", 2)
    ((_, process, _),) = engine._starter._running
    process.kill()
    with pytest.raises((NodeLostError, LaunchStoppedError)):
        running.result()
    eventually(slurm.is_idle, otherwise=slurm.log)


def test_the_readmes_cells_run_on_two_nodes(slurm: SlurmCluster) -> None:
    first, *others = blocks("python") + blocks("python", REFERENCE)
    (debugged,) = [each for each in others if "breakpoint()" in each]
    (cell,) = [each for each in others if "slurm" in each]
    with running_kernel(**slurm.env) as kernel:
        kernel.run(first).check()
        there = debugged.replace("-n 2 --fresh", "-n 1 --nodes 2 --engine 'slurm --time=60'")
        stopped = kernel.debug(there, "p loss", "all p __import__('os').uname().nodename", "q")
        done = kernel.run(cell).check()
        kernel.run("%distributed session -n 1 --nodes 2 --engine 'slurm --time=60'").check()
        freed = kernel.run("%distributed release").check()
    assert stopped.prompts == ["(rank 1 of 2) "] * 3
    assert {"tensor(nan)", "rank 0: 'n1'", "rank 1: 'n2'"} <= set(stopped.stdout.splitlines())
    assert {f"[rank {rank}] rank {rank} has 10.0" for rank in range(4)} <= set(done.stdout.splitlines())
    assert re.fullmatch(r"stopped session main\nreleased slurm job \d+: n1, n2\n", freed.text)
    eventually(slurm.is_idle, otherwise=slurm.log)


def test_what_slurm_refuses_is_the_error(slurm: SlurmCluster) -> None:
    with pytest.raises(StartError, match=r"srun: .*invalid partition"):
        launch(hosts, engine="slurm --partition=none")


def test_an_exported_job_runs_on_both_nodes(slurm: SlurmCluster) -> None:
    body = "import torch.distributed as dist\ntotal = torch.ones(1) * rank\ndist.all_reduce(total)\n"
    body += "if rank == 0:\n    open('total', 'w').write(str(total.item()))"
    address = slurm.cluster[0].address  # names do not resolve here
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    exports = f"ALL,MASTER_ADDR={address},GLOO_SOCKET_IFNAME=eth0,PATH={path}"
    with tempfile.TemporaryDirectory(dir="/var/tmp") as shared, running_kernel() as kernel:
        kernel.run("%load_ext nblaunch").check()
        script, total = f"{shared}/train.py", Path(shared, "total")
        engine = "--engine \"slurm -p test --time=5 -o mine.out '--comment=a b'\""
        kernel.run(f"%%distributed --export {script} --sbatch --nodes 2 -n 1 --device cpu {engine}\n{body}").check()
        slurm.run("sbatch", f"--chdir={shared}", f"--export={exports}", f"{shared}/train.sbatch")
        eventually(
            lambda: total.exists() and total.read_text(),
            otherwise=lambda: [log.read_text() for log in Path(shared).glob("*.out")],
        )
        assert total.read_text() == "1.0"
        assert [log.name for log in Path(shared).glob("*.out")] == ["mine.out"]  # the user's options replace the file's


def test_a_detached_run_holds_its_own_nodes_and_gives_them_back(slurm: SlurmCluster) -> None:
    folder = tempfile.TemporaryDirectory(dir="/var/tmp")  # nodes have a /tmp of their own
    go_on = Path(folder.name, "go on")

    def train() -> str:
        nblaunch.report(step=1, loss=0.5)
        print("begun", flush=True)
        while not go_on.exists():
            time.sleep(0.1)
        dist.barrier()
        return socket.gethostname()

    run = launch(train, detach="far")
    eventually(lambda: run.stacks().keys() == {0, 1})
    assert [state for _, state, _ in jobs(slurm)] == ["RUNNING"]
    assert current.status()[1:] == []  # of this process
    go_on.touch()
    result = run.result()
    assert list(result) == ["n1", "n2"]
    assert result.metrics.last == {"loss": 0.5}
    assert [logs.text() for logs in result.logs] == ["begun\n", "begun\n"]
    eventually(lambda: jobs(slurm) == [])
    folder.cleanup()


def test_a_detached_run_that_waits_for_nodes_can_be_stopped(slurm: SlurmCluster) -> None:
    run = launch(hosts, engine="slurm --begin=now+1hour", detach="later")
    eventually(lambda: len(jobs(slurm)) == 1)
    run.stop()
    with pytest.raises(LaunchStoppedError, match=r"^cancelled while waiting for nodes$"):
        run.result()
    assert nblaunch.runs()[0].state == "stopped"
    eventually(lambda: jobs(slurm) == [])
