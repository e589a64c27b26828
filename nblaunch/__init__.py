"""Run distributed PyTorch from a Jupyter notebook: on every GPU, on CPU processes, or on a cluster.

    %load_ext nblaunch
    from nblaunch import notebook_launcher, report

    def train(rank, world_size, device, lr):
        report(step=0, loss=lr)  # a chart under the cell
        return rank

    result = notebook_launcher(train, kwargs={"lr": 0.1}, num_processes=2)
    result[1]  # the return value of rank 1

Most launches need only `num_processes`, `kwargs`, `device`, `timeout` and `block`; ``help(nblaunch.notebook_launcher)``
has all options. A cell that begins with ``%%distributed -n 2`` runs on two ranks. ``nblaunch.session(2)`` starts ranks
that keep running between cells. With ``detach="nightly"``, a launch goes on after the kernel has ended, and
``nblaunch.attach("nightly")`` shows it in any notebook; ``nblaunch.runs()`` lists all launches.

Importing this package does not import torch. In a Jupyter kernel, importing ``notebook_launcher`` or ``session`` from
it prepares the first launch in the background.
"""

import sys as _sys
import typing as _typing

if _typing.TYPE_CHECKING:
    from nblaunch.launch.api import notebook_launcher
    from nblaunch.launch.attached import attach
    from nblaunch.launch.export import export
    from nblaunch.launch.handle import Launch
    from nblaunch.launch.result import LaunchResult
    from nblaunch.launch.session import Session, session
    from nblaunch.notebook.comparison import compare
    from nblaunch.notebook.run_table import runs, show
    from nblaunch.ranks.report import progress, report
    from nblaunch.training.accelerator import Accelerator

__version__ = "0.1.0"
__all__ = [
    "Accelerator",
    "Launch",
    "LaunchResult",
    "Session",
    "__version__",
    "attach",
    "compare",
    "export",
    "notebook_launcher",
    "progress",
    "report",
    "runs",
    "session",
    "show",
]

_ROOMS = {
    "Accelerator": "nblaunch.training.accelerator",
    "Launch": "nblaunch.launch.handle",
    "LaunchResult": "nblaunch.launch.result",
    "Session": "nblaunch.launch.session",
    "attach": "nblaunch.launch.attached",
    "compare": "nblaunch.notebook.comparison",
    "export": "nblaunch.launch.export",
    "notebook_launcher": "nblaunch.launch.api",
    "progress": "nblaunch.ranks.report",
    "report": "nblaunch.ranks.report",
    "runs": "nblaunch.notebook.run_table",
    "session": "nblaunch.launch.session",
    "show": "nblaunch.notebook.run_table",
}


def __getattr__(name: str) -> _typing.Any:
    """Import a public name on first access; for the launcher in a notebook, also the notebook's views."""
    if name not in _ROOMS:
        raise AttributeError(f"module 'nblaunch' has no attribute {name!r}")
    from importlib import import_module

    if name in ("attach", "export", "notebook_launcher", "session", "show"):
        _set_up_notebook(starts_ranks=name in ("notebook_launcher", "session"))
    return globals().setdefault(name, getattr(import_module(_ROOMS[name]), name))


def __dir__() -> list[str]:
    return sorted(__all__)


def _set_up_notebook(starts_ranks: bool) -> None:
    """Inside IPython, show launches in the notebook, even without ``%load_ext nblaunch``."""
    from nblaunch.ranks import report

    if report.current() is not None:
        return  # a rank's shell is no notebook
    ipython = _sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None:
        from nblaunch.notebook import extension

        extension.register_frontend(shell)
        if starts_ranks and hasattr(shell, "kernel"):
            extension.warm_up()


def load_ipython_extension(shell: _typing.Any) -> None:
    """Register the ``%%distributed`` magic, and start the fork server in the background; for ``%load_ext nblaunch``."""
    from nblaunch.notebook import extension

    extension.load(shell)


def unload_ipython_extension(shell: _typing.Any) -> None:
    """Remove what `load_ipython_extension` has registered; for ``%unload_ext nblaunch``."""
    from nblaunch.notebook import extension

    extension.unload(shell)
