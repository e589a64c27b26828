"""The record of a launch without a page: nbclient, papermill, nbconvert."""

from __future__ import annotations

import json
from pathlib import Path

import headless
import papermill
import pytest
from nbconvert import HTMLExporter
from nbformat import NotebookNode

from tests.browser.lab import write_notebook
from tests.kernel.page import WIDGET

TRAINS = """
%load_ext nblaunch
from nblaunch import notebook_launcher, report
def train(rank):
    import time
    for step in range(30):
        report(step=step, accuracy=step / 30)
        print("<b>step</b>", step)
        time.sleep(0.02)
notebook_launcher(train, num_processes=2);
"""


def _bundle(notebook: NotebookNode) -> dict[str, str]:
    (output,) = [o for o in notebook.cells[0].outputs if o.output_type == "display_data"]
    data: dict[str, str] = output.data
    return data


@pytest.fixture(scope="module")
def executed(_marked: None, tmp_path_factory: pytest.TempPathFactory) -> NotebookNode:
    """The notebook without a page, by nbclient."""
    folder = tmp_path_factory.mktemp("executed")
    write_notebook(folder / "trains.ipynb", TRAINS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBLAUNCH_VIEW", "auto")
        patch.setenv("NBLAUNCH_STATE_DIR", str(folder / "state"))
        return headless.execute(folder / "trains.ipynb")


def test_without_a_page_the_notebook_gets_the_record_that_nbconvert_shows(executed: NotebookNode) -> None:
    bundle = _bundle(executed)
    assert WIDGET not in bundle
    assert bundle["text/plain"].startswith("train ✓ Finished in")
    assert "accuracy 0.9667" in bundle["text/plain"]
    html, _ = HTMLExporter().from_notebook_node(executed)
    assert "0.9667" in html
    for shown in (bundle["text/html"], html):
        assert "&lt;b&gt;step&lt;/b&gt; 29" in shown
        assert "data:image/svg+xml" in shown


def test_a_saved_notebook_has_the_panels_script_once(executed: NotebookNode) -> None:
    models = executed.metadata.widgets["application/vnd.jupyter.widget-state+json"].state
    sizes = {model: len(json.dumps(kept)) for model, kept in models.items()}
    panels = [model for model, kept in models.items() if kept.model_name == "AnyModel"]
    scripts = [model for model, kept in models.items() if "script" in kept.state and model not in panels]
    assert [models[panel].state.script for panel in panels] == [f"IPY_MODEL_{script}" for script in scripts]
    assert len(panels) == 1
    assert max(size for model, size in sizes.items() if model not in scripts) < 4000
    assert max(sizes.values()) > 50_000


def test_papermill_keeps_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBLAUNCH_VIEW", "auto")
    path = tmp_path / "trains.ipynb"
    write_notebook(path, TRAINS)
    notebook = papermill.execute_notebook(str(path), str(path.with_name("out.ipynb")), progress_bar=False)
    assert _bundle(notebook)["text/plain"].startswith("train ✓ Finished in")
