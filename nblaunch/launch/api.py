"""`notebook_launcher`: a function over N ranks, from a cell."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nblaunch.engines.generations import servers
from nblaunch.engines.import_environment import Where
from nblaunch.engines.local import engine
from nblaunch.errors import ArgumentError, NblaunchError, NestedLaunchError, warn
from nblaunch.launch import payload as payloads
from nblaunch.launch.frontend import host
from nblaunch.launch.handle import Launch
from nblaunch.launch.plan import STOP_GRACE, make_plan, this_machine
from nblaunch.launch.result import LaunchResult
from nblaunch.machine.process_state import this_process
from nblaunch.machine.slurm_variables import refusal, slurm_task
from nblaunch.wire.messages import Payload

_NOT_NEEDED: dict[str, tuple[Any, str]] = {
    "use_port": ("29500", "each launch meets on a free loopback port of its own"),
    "master_addr": ("127.0.0.1", "ranks of one machine meet on loopback"),
    "rdzv_backend": ("static", "the kernel serves the rendezvous itself"),
    "rdzv_endpoint": ("", "the kernel serves the rendezvous itself"),
    "rdzv_conf": (None, "the kernel serves the rendezvous itself"),
    "rdzv_id": ("none", "each launch has an id of its own"),
    "monitor_interval": (0.1, "the end of a rank is an event, and nothing is polled"),
    "log_line_prefix_template": (None, "each line shows its rank as [rank 1]"),
}
"""accelerate's keywords that nothing here depends on: their defaults, and why."""


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    device: str = "auto",
    backend: str | None = None,
    start_method: str = "auto",
    threads_per_rank: int | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    stop_grace: float = STOP_GRACE,
    metric_patterns: str | re.Pattern[str] | Sequence[str | re.Pattern[str]] | None = None,
    preload: str | Sequence[str] | None = None,
    block: bool = True,
    view: str = "auto",
) -> LaunchResult | Launch:
    r"""Run a function on every GPU, or on CPU processes, and bring back what each rank returns.

    The function may be defined in a cell and use anything that the notebook holds. In each rank the default
    process group is ready, and parameters named ``rank``, ``world_size``, ``local_rank`` and ``device`` that the
    call leaves out are filled in. What the ranks print appears live under the cell. Ranks work on copies: what they
    change and do not return stays as it is in the notebook.

    Args:
        function: What to run.
        args: Its positional arguments, a tuple.
        num_processes: The number of ranks. Default: one per visible GPU, without GPUs 2.
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``: what an Accelerator made in the function uses.
        max_restarts: How many times to start all ranks again after a failure. Default 0.
        kwargs: Its keyword arguments, a dict.
        device: ``"cuda"``, ``"cpu"``, or ``"auto"`` (default): CUDA where a GPU is visible.
        backend: Of the process group. Default: gloo on the CPU, nccl (and gloo for CPU tensors) on GPUs.
        start_method: ``"forkserver"`` (Linux), ``"spawn"``, ``"fork"`` (of the kernel itself), or ``"auto"`` (default).
        threads_per_rank: CPU threads of each rank. Default: your OMP_NUM_THREADS, else usable CPUs divided by ranks.
        env: Environment variables for the ranks, besides the notebook's own.
        timeout: Seconds that the launch may take. Default: no limit.
        stop_grace: Seconds that a rank which is interrupted has for ``finally`` and checkpoints. Default 30.
        metric_patterns: Regular expressions that read metrics out of what the ranks print, for code that only prints:
            one, or a list. Each named group that holds a number is a metric, as in
            ``r"Accuracy: (?P<accuracy>[\d.]+)"``, and a group named ``step`` is the step. Every line of a rank's
            stdout and stderr is searched (of a long one the first 8 KB), in the notebook's process: a pattern that
            is slow makes the notebook slow. Each stream's metrics stay in its order. Default: none.
        preload: Modules of installed packages that later launches find imported, as with ``%distributed preload``.
            Default: what the notebook imports of well-known packages.
        block: True (default): wait, and return the result. False: return a `Launch` at once.
        view: What to show: ``"auto"`` (default), ``"text"``, ``"none"``.
        use_port, master_addr, node_rank, num_nodes, rdzv_backend, rdzv_endpoint, rdzv_conf, rdzv_id, monitor_interval,
            log_line_prefix_template: Accepted so that code written for accelerate runs unchanged; not needed, and
            a warning says so where one is given.

    Returns:
        A `LaunchResult` (``result[rank]``), or a `Launch` with ``block=False``.

    Raises:
        ArgumentError: An argument is wrong (nothing was started).
        PayloadError: Something that the function uses cannot be sent (nothing was started).
        NestedLaunchError: This process is a rank, or one of several Slurm tasks (nothing was started).
        Exception: What the rank that failed first raised, as itself, with the attribute ``rank``.
        RankError: A rank failed in another way: see `nblaunch.errors`.
        KeyboardInterrupt: The cell was interrupted; every rank has ended.

    Example:
        >>> def train(rank, world_size):
        ...     return rank * 10
        >>> notebook_launcher(train, num_processes=2)[1]  # doctest: +SKIP
        10
    """
    __tracebackhide__ = True  # IPython leaves this frame out
    refuse_nested()
    _warn_of_unneeded(
        use_port=use_port,
        master_addr=master_addr,
        rdzv_backend=rdzv_backend,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_conf=rdzv_conf,
        rdzv_id=rdzv_id,
        monitor_interval=monitor_interval,
        log_line_prefix_template=log_line_prefix_template,
    )
    _refuse_nodes(num_nodes, node_rank)
    launch = prepare(
        lambda _: payloads.for_function(function, args, kwargs),
        view,
        num_processes=num_processes,
        mixed_precision=mixed_precision,
        max_restarts=max_restarts,
        device=device,
        backend=backend,
        start_method=start_method,
        threads_per_rank=threads_per_rank,
        env=env,
        timeout=timeout,
        stop_grace=stop_grace,
        metric_patterns=metric_patterns,
        preload=preload,
    )
    if block:
        return launch.join()
    launch.begin()
    return launch


def preload(modules: Sequence[str]) -> None:
    """Have modules of installed packages imported ahead of later launches, in the background.

    Those of `nblaunch.machine.packages.KNOWN_SAFE` that the notebook has imported are anyway.

    Args:
        modules: Their names, as in ``("torchvision.transforms",)``.

    Raises:
        ArgumentError: One is no module of an installed package.
    """
    plan = make_plan(this_machine(), preload=modules)
    servers.preload(plan.preload, Where(plan.env, this_process().cwd, plan.named), again=True)


def prepare(gather: Callable[[int], Payload], view: str, **arguments: Any) -> Launch:
    """Plan a launch of what `gather` brings together. The caller starts it.

    Args:
        gather: Gives the payload; called with the number of ranks.
        view: What shows the launch.
        arguments: Those of `make_plan`.

    Raises:
        ArgumentError: One of them is wrong.
        PayloadError: A part of the payload cannot be sent.
    """
    __tracebackhide__ = True  # IPython leaves this frame out
    try:
        return _prepare(gather, view, arguments)
    except NblaunchError as error:
        raise error.with_traceback(None) from None  # its message says it all; the frames below are ours


def _prepare(gather: Callable[[int], Payload], view: str, arguments: Mapping[str, Any]) -> Launch:
    plan = make_plan(this_machine(), **arguments)
    payload = gather(plan.world_size)
    shown = host().view(view)
    plan = replace(plan, method=engine.usable(plan.method, plan.env, plan.named, host().cuda_cell))
    if plan.preload:
        servers.preload(plan.preload)
    shipment = payloads.share(payload) if engine.shares_memory(plan.method) else payloads.ship(payload)
    return Launch(plan, payload, shipment, shown)


def refuse_nested() -> None:
    """Raise NestedLaunchError inside a rank, a process that a rank started, or one of several Slurm tasks."""
    rank = os.environ.get("NBLAUNCH_RANK")
    if rank is not None:
        raise NestedLaunchError(
            f"this is rank {rank} of a launch, and a rank cannot launch: call notebook_launcher in the notebook"
        )
    task = slurm_task(os.environ)
    if task is not None:
        raise NestedLaunchError(refusal(task))


def _warn_of_unneeded(**given: Any) -> None:
    for name, value in given.items():
        default, why = _NOT_NEEDED[name]
        if str(value) != str(default):
            warn(f"{name}={value!r} is not needed, and not used: {why}")


def _refuse_nodes(num_nodes: Any, node_rank: Any) -> None:
    for name, value, only in (("num_nodes", num_nodes, 1), ("node_rank", node_rank, 0)):
        if value != only:
            raise ArgumentError(
                f"{name}={value!r}: nblaunch runs on one machine, so this must be {only}; use torchrun for several"
            )
