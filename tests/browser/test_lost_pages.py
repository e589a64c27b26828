"""What a notebook keeps of a launch whose page went away: a lost connection, a reload."""

from __future__ import annotations

import nbformat
from nbconvert import HTMLExporter

from tests.browser.conftest import SHARED, Lab, keep_picture
from tests.browser.lab import close_documents, open_notebook
from tests.conftest import eventually
from tests.kernel.page import WIDGET

WAITS = """
from pathlib import Path
def train(rank):
    import time
    for step in progress(range(60), desc="steps"):
        print("step", step, flush=True)
        report(step=step, loss=1 / (step + 1))
        time.sleep(0.01)
        while step == 30 and not go.exists():
            time.sleep(0.01)
    print("the last line", flush=True)
launch = notebook_launcher(train, num_processes=2, block=False)
launch.wait()
done.touch()
"""


def _cell(lab: Lab, name: str) -> str:
    files = [f"{each} = Path({str(lab.folder / f'{name}.{each}')!r})" for each in ("go", "done")]
    return "\n".join(["from pathlib import Path", *files, WAITS])


def _outputs(lab: Lab) -> list[nbformat.NotebookNode]:
    lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.save()")
    notebook = nbformat.read(lab.folder / SHARED, as_version=4)
    return [output for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]


def _is_whole(lab: Lab) -> None:
    lab.wait_for_state("finished")
    lab.log_says("the last line")
    lab.panel.get_by_text("60/60").nth(1).wait_for()
    assert lab.panel.locator(".nbl-line", has_text="not shown").count() == 0


def test_a_lost_connection_leaves_a_whole_panel_and_record(lab: Lab) -> None:
    lab.run(_cell(lab, "lost"))
    lab.log_says("step 30")
    lab.page.evaluate(_DEAF)
    (lab.folder / "lost.go").touch()
    eventually((lab.folder / "lost.done").exists)
    lab.panel.get_by_text("No message from the kernel for").wait_for()
    keep_picture(lab.page, "panel-no-news.png")
    assert lab.state() == "no response"
    lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.reconnect()")
    _is_whole(lab)
    eventually(lambda: any("Finished in" in output.data["text/plain"] for output in _outputs(lab)))


_DEAF = """() => { // as with a dead connection, which the browser has not noticed yet
    window.jupyterapp.shell.currentWidget.sessionContext.session.kernel._ws.onmessage = () => {}
}"""


def test_a_page_reloaded_meanwhile_saves_the_whole_record(fresh_lab: Lab) -> None:
    lab = fresh_lab
    lab.run(_cell(lab, "reloaded"), "launch.result()")
    lab.log_says("step 30")
    lab.page.reload()  # the notebook is as it was written, without any output
    lab.log_says("step 30")
    (output,) = _outputs(lab)
    assert WIDGET not in output.data
    assert output.data["text/plain"].startswith("train … Running for")
    lab.page.reload()
    lab.log_says("step 30")
    (lab.folder / "reloaded.go").touch()
    _is_whole(lab)
    eventually(lambda: "train ✓ Finished in" in _outputs(lab)[0].data["text/plain"])
    assert "loss 0.01667" in _outputs(lab)[0].data["text/plain"]
    html, _ = HTMLExporter().from_filename(str(lab.folder / SHARED))
    assert "the last line" in html
    assert "… Running" not in html
    lab.server.end_kernels()
    close_documents(lab.page)
    open_notebook(lab.page, SHARED)
    lab.page.locator(".jp-RenderedHTMLCommon", has_text="Finished in").wait_for()
    assert lab.page.get_by_text("Error displaying widget").count() == 0
    assert lab.page.locator(".nbl-root").count() == 0
