"""Ranks of a real kernel import nothing of the notebook."""

from __future__ import annotations

from tests.kernel.harness import running_kernel


def test_a_rank_imports_nothing_of_the_notebook() -> None:
    """Its warning filters, for one, name categories of IPython's: importing that costs every rank 50 ms."""
    with running_kernel() as kernel:
        kernel.run("%load_ext nblaunch\nfrom nblaunch import notebook_launcher").check()
        kernel.run("def loaded():\n    import sys\n    return sorted(sys.modules)\n").check()
        modules = kernel.ask("notebook_launcher(loaded, num_processes=1, view='none')[0]")
    roots = {module.partition(".")[0] for module in modules}
    assert "torch" in roots
    assert not roots & {"IPython", "ipykernel", "traitlets", "zmq", "ipywidgets", "jupyter_client"}
    assert not [module for module in modules if module.startswith(("nblaunch.launch", "nblaunch.notebook"))]
