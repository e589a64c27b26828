"""Ranks of a real kernel import nothing of the notebook."""

from __future__ import annotations

from tests.kernel.harness import Kernel


def test_a_rank_imports_nothing_of_the_notebook(kernel: Kernel) -> None:
    """The fork server imports IPython's core once, for the shell of ranks."""
    kernel.run("def loaded():\n    import sys\n    return sorted(sys.modules)\n").check()
    modules = kernel.ask("notebook_launcher(loaded, num_processes=1, view='none')[0]")
    roots = {module.partition(".")[0] for module in modules}
    assert "torch" in roots
    assert not roots & {"ipykernel", "zmq", "ipywidgets", "jupyter_client", "matplotlib", "sqlite3"}
    assert not [module for module in modules if module.startswith(("nblaunch.launch", "nblaunch.notebook"))]
