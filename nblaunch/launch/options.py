"""The table of a launch's options: each with its default, check, help text, flag of the magic, and where it is taken.

`Options` holds them, checked, from the call to the ranks' environment. The signature and docstring of
`notebook_launcher` repeat names and defaults, for editors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from nblaunch.engines import current
from nblaunch.errors import ArgumentError
from nblaunch.launch.output.reports import compile_patterns
from nblaunch.machine.arguments import file_name, one_of, seconds, whole_number
from nblaunch.machine.packages import package_of, why_not_ahead

BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")
TORCHRUN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
)
"""Variables that each rank has a value of its own for."""

MAX_PROFILE_S = 10.0
Check = Callable[[str, Any], Any]
"""Takes the option's name and value; returns the value as its type, or raises an ArgumentError that names both."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """What the table says of one option.

    Attributes:
        default: If it is None, None needs no check.
        check: See `Check`.
        takers: Besides launches: any of ``session``, ``cell`` (of a session) and ``script``.
        help: The magic's help text; empty if the magic does not have the option.
        flags: The magic's flags. Default: from the name.
        choices: Its values, for the help text, completion and the check.
        parsing: Further arguments of ``add_argument``.
    """

    default: Any = None
    check: Check = lambda name, value: value
    takers: str = ""
    help: str = ""
    flags: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    parsing: Mapping[str, Any] = field(default_factory=dict)


def _at_least(least: int) -> Check:
    return lambda name, value: whole_number(name, value, least=least)


def _true_or_false(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ArgumentError(f"{name}={value!r:.80}: must be True or False")
    return value


def _modules(name: str, value: Any) -> tuple[str, ...]:
    modules = (value,) if isinstance(value, str) else tuple(value)
    for module in modules:
        if not isinstance(module, str) or not all(part.isidentifier() for part in module.split(".")):
            raise ArgumentError(f"{name}={module!r}: must be the name of a module, such as 'torchvision.transforms'")
        if reason := why_not_ahead(package_of(module)):
            raise ArgumentError(f"{name}={module!r}: {reason}")
    return modules


def _run_name(name: str, value: Any) -> str | bool | None:
    return value or None if isinstance(value, bool) else file_name(name, value)


def profile_seconds(name: str, value: Any) -> float:
    checked = seconds(name, value)
    if checked > MAX_PROFILE_S:
        raise ArgumentError(f"{name}={value!r}: at most {MAX_PROFILE_S:g} s: each second may take megabytes in a rank")
    return checked


def _environment(option: str, extra: Any) -> dict[str, str]:
    if not isinstance(extra, Mapping):
        raise ArgumentError(f"{option}={extra!r}: must be a dict of strings")
    for name, value in extra.items():
        given = f"{option}={{{name!r}: {value!r}}}"
        if not isinstance(name, str) or not isinstance(value, str):
            raise ArgumentError(f"{given}: names and values must be strings")
        if not name or "=" in name or "\0" in name + value:
            raise ArgumentError(f"{given}: empty, or contains '=' in the name or NUL")
        if name in TORCHRUN or name.startswith("TORCHELASTIC_"):
            raise ArgumentError(f"{given}: nblaunch sets this variable for each rank")
    return dict(extra)


def _option(**facts: Any) -> Any:
    option = Option(**facts)
    return field(default=option.default, metadata={"option": option})


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one launch or session, checked.

    Raises:
        ArgumentError: An option is invalid; the message starts with its name and value.
    """

    num_processes: int | None = _option(
        check=_at_least(1),
        takers="session script",
        flags=("-n", "--num-processes"),
        parsing={"type": int},
        help="ranks per node; default: one per visible GPU; without GPUs, 2, or 1 per node on several nodes",
    )
    num_nodes: int | None = _option(
        check=_at_least(1),
        takers="session script",
        flags=("--nodes",),
        parsing={"type": int},
        help="number of nodes; default: the ssh hosts, or the nodes of the notebook's Slurm allocation, else 1",
    )
    engine: str = _option(
        default="auto",
        takers="session script",
        choices=current.KINDS,
        help="where the ranks run: local (this machine), slurm, ray or ssh, followed by options, as in --engine "
        "'slurm --partition=gpu --time=60' or --engine 'ssh gpu1 gpu2'; nodes stay reserved until "
        "%%distributed release; default auto: slurm in an allocation of several nodes, else local",
    )
    device: str = _option(
        default="auto",
        takers="session script",
        choices=("auto", "cpu", "cuda"),
        help="one of auto, cpu, cuda; default auto: cuda if a GPU is visible",
    )
    backend: str | None = _option(
        takers="session script",
        choices=BACKENDS,
        help=f"process group backend, one of {', '.join(BACKENDS)}; default: gloo; on GPUs, nccl for GPU tensors and "
        "gloo for CPU tensors",
    )
    start_method: str = _option(
        default="auto",
        takers="session",
        choices=current.engine.start_methods,
        help=f"one of {', '.join(current.engine.start_methods)}; default auto: forkserver on Linux, spawn elsewhere; "
        "fork copies the kernel and can hang",
    )
    threads_per_rank: int | None = _option(
        check=_at_least(1),
        takers="session script",
        parsing={"type": int},
        help="CPU threads per rank; default: OMP_NUM_THREADS, else usable CPUs divided by ranks",
    )
    mixed_precision: str = _option(default="no", takers="session", choices=("no", "fp16", "bf16", "fp8"))
    env: Mapping[str, str] | None = _option(check=_environment, takers="session script")
    max_restarts: int = _option(
        default=0,
        check=_at_least(0),
        takers="script",
        parsing={"type": int},
        help="how many times to restart all ranks after a failure; default 0",
    )
    timeout: float | None = _option(
        check=seconds,
        takers="cell script",
        parsing={"type": float},
        help="maximum duration in seconds; default: no limit",
    )
    stop_grace: float = _option(
        default=30.0,
        check=seconds,
        takers="session cell",
        parsing={"type": float},
        help="seconds for interrupted ranks to save checkpoints before they are killed; default 30",
    )
    metric_patterns: tuple[re.Pattern[str], ...] | None = _option(
        check=lambda name, value: compile_patterns(value),
        takers="session cell",
        flags=("--metric",),
        parsing={"action": "append", "metavar": "PATTERN"},
        help=r"regular expression that extracts metrics from printed lines, as in 'Accuracy: (?P<accuracy>[\d.]+)': "
        "each named group is a metric, a group named step is the step; a slow pattern slows down the notebook; "
        "repeatable",
    )
    preload: Sequence[str] | None = _option(
        check=_modules,
        parsing={"action": "append", "metavar": "NAME"},
        help="module of an installed package to import before later launches, where the ranks run; repeatable",
    )
    on_error: str = _option(
        default="raise",
        choices=("raise", "debug"),
        flags=("--pdb",),
        parsing={"action": "store_const", "const": "debug"},
        help="debug the rank that fails first",
    )
    on_breakpoint: str = _option(
        default="continue",
        choices=("continue", "fail", "wait"),
        help="what breakpoint() does where input is not possible: continue (default), fail, or, with --detach, wait "
        "until someone attaches",
    )
    checks: bool = _option(
        default=False,
        check=_true_or_false,
        takers="script",
        parsing={"action": "store_true"},
        help="check that collectives match across ranks (TORCH_DISTRIBUTED_DEBUG=DETAIL); adds 8 ms to each",
    )
    block: bool = _option(
        default=True,
        check=_true_or_false,
        takers="cell",
        flags=("--background",),
        parsing={"action": "store_false"},
        help="return at once; NAME is then a Launch (.done, .wait(), .result(), .stop())",
    )
    detach: str | bool | None = _option(
        check=_run_name,
        parsing={"nargs": "?", "const": True, "metavar": "NAME"},
        help="run in a process that outlives the kernel, and return at once; nblaunch.attach('NAME') shows the run in "
        "any notebook; default NAME: the cell and the time",
    )
    profile: float | None = _option(
        check=profile_seconds,
        takers="cell",
        parsing={"type": float},
        help="profile the ranks for this long, from the first step of an optimizer on",
    )
    view: str = _option(
        default="auto",
        takers="cell",
        choices=("auto", "text", "none"),
        help="auto (the panel, or text if the front end cannot show it), text or none; default: NBLAUNCH_VIEW or auto",
    )

    def __post_init__(self) -> None:
        for name, option in TABLE.items():
            value = getattr(self, name)
            if value is None and option.default is None:
                continue
            if option.choices and name not in ("engine", "start_method"):  # which the engines check
                one_of(name, value, option.choices)
            object.__setattr__(self, name, option.check(name, value))
        if self.detach and self.start_method == "fork":
            raise ArgumentError("start_method='fork': a detached run does not share the memory of the kernel")
        if self.on_breakpoint == "wait" and not self.detach:
            raise ArgumentError(
                "on_breakpoint='wait': only the ranks of a detached run can wait; give it a name with detach='NAME'"
            )

    @property
    def variables(self) -> dict[str, str]:
        """What the options add to the environment of ranks; `env` has the last word."""
        variables = {}
        if self.mixed_precision != "no":
            variables["ACCELERATE_MIXED_PRECISION"] = self.mixed_precision
        if self.checks:
            variables["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"  # names the rank, the sizes and the types of a mismatch
        return {**variables, **(self.env or {})}


TABLE: dict[str, Option] = {each.name: each.metadata["option"] for each in fields(Options)}


def taken_by(taker: str) -> list[str]:
    """Return the names of the options that a session, a cell of one, or a script takes."""
    return [name for name, option in TABLE.items() if taker in option.takers.split()]


def flag_of(name: str) -> str:
    """Return the magic's flag for an option or another argument, as in ``--num-processes``."""
    flags = TABLE[name].flags if name in TABLE else ()
    return flags[-1] if flags else f"--{name.replace('_', '-')}"
