"""`notebook_launcher`: run a function on N ranks from a cell."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from nblaunch.engines import current
from nblaunch.errors import ArgumentError, NblaunchError, NestedLaunchError, warn
from nblaunch.launch import payload as payloads
from nblaunch.launch.attached import AttachedLaunch, RunOrder, start_run
from nblaunch.launch.frontend import host
from nblaunch.launch.handle import Launch, OwnLaunch
from nblaunch.launch.machines import planned, with_usable_method
from nblaunch.launch.options import TABLE, Options
from nblaunch.launch.plan import ANY_MACHINE, make_plan
from nblaunch.launch.result import LaunchResult
from nblaunch.launch.run_folders import check_free, folder_of
from nblaunch.launch.views import preparing
from nblaunch.machine.arguments import named_arguments
from nblaunch.machine.inventory import this_process
from nblaunch.machine.slurm_variables import refusal, slurm_task
from nblaunch.wire import RANK
from nblaunch.wire.messages import Cell, Payload

_IGNORED: dict[str, tuple[Any, str]] = {
    "node_rank": (0, "the ranks of every node are started from this notebook"),
    "use_port": ("29500", "each launch takes a free port"),
    "master_addr": ("127.0.0.1", "nblaunch uses the address of the first node, or loopback on one machine"),
    "rdzv_backend": ("static", "nblaunch serves the rendezvous itself"),
    "rdzv_endpoint": ("", "nblaunch serves the rendezvous itself"),
    "rdzv_conf": (None, "nblaunch serves the rendezvous itself"),
    "rdzv_id": ("none", "each launch has its own id"),
    "monitor_interval": (0.1, "nblaunch does not poll for rank exits"),
    "log_line_prefix_template": (None, "each line starts with its rank, as in [rank 1]"),
}
"""accelerate's keywords without effect: their defaults, and the reason."""


@partial(named_arguments, more=_IGNORED)
def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    *,
    kwargs: Mapping[str, Any] | None = None,
    device: str = "auto",
    timeout: float | None = None,
    block: bool = True,
    engine: str = "auto",
    num_nodes: int | None = None,
    backend: str | None = None,
    start_method: str = "auto",
    threads_per_rank: int | None = None,
    env: Mapping[str, str] | None = None,
    preload: str | Sequence[str] | None = None,
    detach: str | bool | None = None,
    view: str = "auto",
    profile: float | None = None,
    metric_patterns: str | re.Pattern[str] | Sequence[str | re.Pattern[str]] | None = None,
    stop_grace: float = 30.0,
    max_restarts: int = 0,
    on_error: str = "raise",
    on_breakpoint: str = "continue",
    checks: bool = False,
    **accelerate_options: Any,
) -> LaunchResult | Launch:
    r"""Run a function on every GPU, or on several CPU processes, and return what each rank returns.

    Example:
        >>> def train(rank, world_size, device, lr):
        ...     return rank * lr
        >>> notebook_launcher(train, kwargs={"lr": 0.1}, num_processes=2)[1]  # doctest: +SKIP
        0.1

    The function may be defined in a cell and use anything in the notebook. In each rank the default process group is
    initialized, and parameters named ``rank``, ``world_size``, ``local_rank`` and ``device`` are filled in. The output
    of the ranks appears live under the cell. Ranks work on copies of the notebook's data: return what you need.

    Most launches need only `num_processes`, `kwargs`, `device`, `timeout` and `block`.

    Args:
        function: The function to run on every rank.
        args: Its positional arguments. Leave out the parameters that are filled in. Two of them may be given:
            `device`, and `world_size` if it is the number of ranks, as for ``mp.spawn(train, args=(world_size,))``.
        num_processes: The number of ranks on each node. Default: one per visible GPU; without GPUs, 2, or 1 per
            node on several nodes.
        mixed_precision: The default precision of an ``Accelerator`` that the function creates, accelerate's or
            nblaunch's: ``"no"`` (default), ``"fp16"``, ``"bf16"``, or for accelerate ``"fp8"``.
        kwargs: Keyword arguments of the function.
        device: ``"cuda"``, ``"cpu"``, or ``"auto"`` (default): ``"cuda"`` if a GPU is visible.
        timeout: The maximum duration of the launch in seconds. Default: None, no limit.
        block: True (default): wait for the ranks and return the result. False: return a `Launch` at once.
        engine: Where the ranks run: ``"local"`` (this machine), ``"slurm"``, ``"ray"`` or ``"ssh host1 host2"``.
            Options may follow the name: for Slurm those of srun, as in ``"slurm --partition=gpu --time=60"``; for ssh
            its own, or ``--hostfile FILE``; for Ray ``--address``, ``--num-gpus`` (per node; default: every GPU),
            ``--num-cpus`` and ``--resources``. Later launches with the same `engine` and `num_nodes` use the same
            nodes, until ``%distributed release`` or the end of the kernel. ``"auto"`` (default): Slurm in an
            allocation of several nodes, else this machine.
        num_nodes: The number of nodes. Default: all hosts of ``"ssh ..."``, all nodes of the Slurm allocation that the
            notebook runs in, else 1.
        backend: The backend of the process group: ``"gloo"``, ``"nccl"``, ``"mpi"``, ``"ucc"`` or ``"xccl"``. Default:
            gloo on CPUs; on GPUs nccl for GPU tensors and gloo for CPU tensors.
        start_method: How to start the ranks. ``"forkserver"`` (Linux only) forks a clean process with torch imported.
            ``"spawn"`` starts new interpreters. ``"fork"`` forks the kernel: it raises after CUDA has been initialized,
            and can hang after the kernel has used OpenMP; it works on this machine only. ``"auto"`` (default):
            forkserver on Linux, spawn elsewhere.
        threads_per_rank: The number of CPU threads of each rank. Default: ``OMP_NUM_THREADS``, or the usable CPUs
            divided by the number of ranks on the node.
        env: Additional environment variables for the ranks, on all nodes. If torch reads one of them at import
            (``TORCH_*``, ``OMP_*``, ...), the first launch with it starts another fork server, which takes 1 to 3 s.
        preload: Modules of installed packages to import before later launches, on the machines where the ranks run.
            Well-known packages that the notebook has imported are always preloaded.
        detach: The name of a run, which goes on without this kernel, in a process of its own. True: a name of the
            function and the time. The call returns a `Launch` at once. `nblaunch.attach` shows the run in any notebook
            of this machine, and returns a `Launch` with its result. ``python -m nblaunch rm NAME`` removes the run.
            Default: None, a launch that ends with the kernel.
        view: ``"auto"`` (default): the panel, or text if the front end cannot show it; ``"text"``; or ``"none"``. The
            environment variable ``NBLAUNCH_VIEW`` replaces ``"auto"``.
        profile: Seconds in which to profile the ranks, from the first step of an optimizer on, at most 10. The panel
            shows where the time goes; ``result.profiles`` has the profile. Default: None. A running launch is
            profiled by the panel's button, or `Launch.profile`.
        metric_patterns: Regular expressions that extract metrics from printed lines, for code that does not call
            `nblaunch.report`: a string, a compiled pattern, or a list of them. Each named group is a metric, as in
            ``r"Accuracy: (?P<accuracy>[\d.]+)"``; a group named ``step`` is the step. The kernel searches the lines,
            so a slow pattern slows down the notebook. In a burst of lines, and in a line of more than 4,000 characters,
            it searches only the beginning and the end.
        stop_grace: Seconds that interrupted ranks have for ``finally`` blocks and checkpoints before they are killed.
        max_restarts: How many times to restart all ranks after a failure.
        on_error: ``"debug"``: a rank that raises an exception opens the debugger in the cell. The others run on until
            they wait for it. Default: ``"raise"``; after ``%pdb on``, ``"debug"``.
        on_breakpoint: What ``breakpoint()`` does where no one can type, as in papermill or in a background launch with
            ``view="none"``: ``"continue"`` (default) prints its location and goes on, ``"fail"`` raises RuntimeError.
            ``"wait"``, for detached runs, waits until someone attaches and calls ``wait()``.
        checks: Have torch compare the collectives of the ranks (``TORCH_DISTRIBUTED_DEBUG=DETAIL``). Calls that do not
            match fail at once, and the error names both. Each collective takes some 8 ms more. torch 2.14 crashes with
            this option in DistributedDataParallel on gloo.
        accelerate_options: Other keywords of accelerate's ``notebook_launcher``, such as ``use_port``. They are
            ignored, with a warning if the value is not the default; ``node_rank`` must be 0.

    Returns:
        A `LaunchResult`, where ``result[rank]`` is the return value of a rank; with ``block=False`` or `detach` a
        `Launch`.

    Raises:
        ArgumentError: An argument is invalid. Nothing was started.
        PayloadError: The function, or an object that it uses, cannot be sent to the ranks. Nothing was started.
        NestedLaunchError: This process is a rank, or one of several Slurm tasks. Nothing was started.
        StartError: The ranks could not be started, or a node cannot be used.
        Exception: The exception of the rank that failed first, with its number as the attribute ``rank``.
        RankError: A rank failed without an exception that could be raised here; see the subclasses in
            `nblaunch.errors`.
        LaunchTimeoutError: The launch took longer than `timeout`. Every rank has exited.
        LaunchStoppedError: The launch was stopped from the panel or by `Launch.stop`. Every rank has exited.
        KeyboardInterrupt: The cell was interrupted. Every rank has exited.
    """
    given = {name: value for name, value in locals().items() if name in TABLE}
    __tracebackhide__ = True  # IPython omits this frame from tracebacks
    refuse_nested()
    options = Options(**given)
    for name, value in accelerate_options.items():
        default, why = _IGNORED[name]
        if name == "node_rank" and value != 0:
            raise ArgumentError(f"node_rank={value!r}: must be 0, because {why}")
        if str(value) != str(default):
            warn(f"{name}={value!r} is ignored: {why}")
    gather = partial(payloads.for_function, function, args, kwargs)
    if options.detach:
        return detached(gather, options)
    launch = prepare(gather, options)
    if options.block:
        return launch.join()
    launch.begin()
    return launch


def preload(modules: Sequence[str]) -> None:
    """Import modules in the background for the ranks of later launches, also on nodes that are still reserved.

    Args:
        modules: Their names, such as ``("torchvision.transforms",)``.

    Raises:
        ArgumentError: A name is not a module of an installed package.
    """
    local = current.engine
    options = Options(preload=modules)
    plan = make_plan(local.machines(lambda text: None), local, options)
    local.preload(options.preload or (), plan.env, plan.named)
    for engine in current.held():
        engine.preload(options.preload or ())


def prepare(gather: Callable[[int], Payload], options: Options) -> OwnLaunch:
    """Plan a launch and pack its payload, which `gather` returns for a world size. The caller starts it."""
    __tracebackhide__ = True  # IPython omits this frame from tracebacks
    try:
        shown = host().view(options.view)
        engine, plan = planned(options, shown)
        payload = gather(plan.world_size)
        plan = with_usable_method(plan, engine, shown)
        if options.preload:
            engine.preload(options.preload)
        with preparing(shown, payloads.name_of(payload.function)):
            is_fork = plan.method == "fork"  # which shares the notebook's memory
            shipment = payloads.share(payload) if is_fork else payloads.ship(payload, engine.is_local)
        return OwnLaunch(plan, shipment, shown, engine, None)
    except NblaunchError as error:
        raise error.with_traceback(None) from None  # the frames below are nblaunch's own


def detached(gather: Callable[[int | None], Payload], options: Options) -> Launch:
    """Start a run in a process of its own, and attach to it. `gather` gets None while the world size is not known."""
    __tracebackhide__ = True  # IPython omits this frame from tracebacks
    try:
        shown = host().view(options.view)
        engine = current.chosen(options.engine, options.num_nodes)
        # Nodes are the runner's to ask for.
        plan = make_plan(engine.machines(lambda text: None) if engine.is_local else [ANY_MACHINE], engine, options)
        payload = gather(plan.world_size if engine.is_local else None)
        function = payloads.name_of(payload.function)
        name = options.detach if isinstance(options.detach, str) else _run_name(function)
        check_free(name)
        with preparing(shown, function):
            shipment = payloads.ship(payload, engine.is_local)
        only = payload.function.ranks if isinstance(payload.function, Cell) else None
        order = RunOrder(function, only, options, this_process(), shipment.sources, shipment.sent)
        try:
            run = start_run(name, shipment, order)
        finally:
            if shipment.parcel is not None:
                shipment.parcel.close()
        return AttachedLaunch(run, shown)
    except NblaunchError as error:
        raise error.with_traceback(None) from None  # the frames below are nblaunch's own


def _run_name(function: str) -> str:
    """Return a name that is free, of the function and the time."""
    name = f"{re.sub(r'[^A-Za-z0-9]+', '-', function).strip('-')[:60] or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"
    others = (f"{name}-{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([name], others) if not folder_of(each).exists())


def refuse_nested() -> None:
    """Raise NestedLaunchError in a rank, in a child process of a rank, or in one of several Slurm tasks."""
    rank = os.environ.get(RANK)
    if rank is not None:
        raise NestedLaunchError(
            f"this is rank {rank} of a launch, and a rank cannot launch: call notebook_launcher in the notebook"
        )
    task = slurm_task(os.environ)
    if task is not None:
        raise NestedLaunchError(refusal(task))
