"""The panel's messages over the comms of a real kernel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.conftest import LONG, eventually
from tests.kernel.harness import Kernel, running_kernel
from tests.kernel.page import WIDGET, Page

WAITS = """
def waits():
    import time
    print("begun", flush=True)
    while True:
        time.sleep(0.01)
"""
PRINTS = """
def prints(lines):
    for number in range(lines):
        print(f"line {number:07d} " + "." * 40)
"""


@pytest.fixture(scope="module")
def fresh_kernel(_marked: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel that has imported the launcher alone, whose anywidget is broken."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "anywidget.py").write_text("raise RuntimeError('broken')")
    with running_kernel(NBLAUNCH_VIEW="auto", PYTHONPATH=str(folder), NBLAUNCH_STATE_DIR=str(folder)) as kernel:
        kernel.run("from nblaunch import notebook_launcher").check()
        yield kernel


def test_a_launch_is_one_display_that_ends_as_its_record(page: Page) -> None:
    with page.kernel.changed("nblaunch.launch.views", "PREPARING_NOTE_DELAY_S", 600):
        page.run(PRINTS + "notebook_launcher(prints, args=(50,), num_processes=2)")
    assert len(page.displays) <= 2
    assert "Finished in" in page.displays[-1]["text/plain"]
    assert "line 0000049" in page.displays[-1]["text/html"]
    assert WIDGET not in page.displays[-1]  # no page has said that it shows one


def test_what_the_cell_has_printed_before_stays_above(page: Page) -> None:
    request = page.start("print('before'); notebook_launcher(lambda: None, num_processes=1); print('after')")
    shown = ""
    while request not in page.idle:
        message = page.kernel.client.get_iopub_msg(timeout=LONG)
        shown += message["content"].get("text", f"<{message['msg_type']}>")  # a line may come in two messages
        if message["content"].get("execution_state") == "idle":
            page.idle.add(message["parent_header"].get("msg_id", ""))
    assert shown.index("before\n") < shown.index("<display_data>") < shown.index("after\n")


def test_a_short_launch_that_prints_little_makes_no_widget(page: Page) -> None:
    preparing = page.kernel.changed("nblaunch.launch.views", "PREPARING_NOTE_DELAY_S", 600)
    with preparing, page.kernel.changed("nblaunch.notebook.panel", "SHOW_DELAY_S", 600):
        page.run("notebook_launcher(lambda: print('hello'), num_processes=2)")
        page.run("1 + 1")
    assert page.panel == ""
    assert len(page.displays) == 1
    assert "hello" in page.displays[0]["text/plain"]


def test_slow_packing_is_shown_until_the_launch_is(page: Page) -> None:
    slow = "class Slow:\n    def __reduce__(self): return time.sleep(1) or (int, ())"
    page.run(f"import time\n{slow}\nnotebook_launcher(abs, args=(Slow(),), num_processes=2)")
    first, *_, last = [each["text/plain"] for each in page.displays]
    assert first.startswith("preparing abs: comparing its data with the cached data, and copying changes")
    assert "preparing" not in last
    assert "Finished in" in last


def test_the_first_launch_says_that_torch_is_imported(page: Page) -> None:
    stop = "from nblaunch.engines.fork_servers import servers; servers.stop()"
    cells = {
        "notebook_launcher(abs, args=(1,), num_processes=2)": "Finished in",
        "%distributed session -n 1 --name waits": "session waits",
    }
    for cell, end in cells.items():
        page.run(f"{stop}\n{cell}")
        shown = [each["text/plain"] for each in page.displays]
        assert shown[0].startswith("importing torch (first launch"), cell
        assert end in shown[-1]
    page.run("%distributed session stop --name waits")


def test_late_clicks_without_subshells_affect_no_later_launch(page: Page) -> None:
    first = page.start("import time\n" + WAITS + "first = notebook_launcher(waits, num_processes=1, block=False)")
    page.take_until(lambda: page.log(0) and first in page.idle)
    launch, panel = page.state["info"]["launch"], page.panel
    page.run("first.kill(); first.wait()")
    page.take_until(lambda: page.status == "stopped")
    second = page.start(WAITS + "second = notebook_launcher(waits, num_processes=1, block=False)")
    page.take_until(lambda: second in page.idle)
    page.panel = panel  # and not that of the second, which may be open
    page.send(kind="stop", launch=launch)
    page.send(kind="stop", launch=page.kernel.ask("second.id"))  # a panel speaks for its own launch alone
    assert page.kernel.ask("second.done") is False
    page.kernel.run("second.kill(); second.wait()").check()


def test_of_an_ended_launch_the_record_stays_and_its_panel_answers(page: Page) -> None:
    page.run(PRINTS + "notebook_launcher(prints, args=(2000,), num_processes=1)")
    page.take_until(lambda: page.panel)
    assert WIDGET not in page.displays[-1]  # a notebook that is opened with another kernel would find no widget
    assert f'class="nblaunch-{page.state["info"]["launch"]} ' in page.displays[-1]["text/html"]
    page.send(kind="stop", launch=page.state["info"]["launch"])
    page.take_until(lambda: page.of("acknowledged"))
    assert page.of("acknowledged")[0]["action"] == "done"


def test_a_page_gets_the_record_and_a_later_cell_displays_it(page: Page) -> None:
    shows = "own = launch._repr_html_()"
    page.run(WAITS + f"launch = notebook_launcher(waits, num_processes=2, block=False)\n{shows}")
    page.take_until(lambda: page.log(0) and page.log(1))
    launch = page.state["info"]["launch"]
    for _ in range(3):  # they are answered together
        page.send(kind="record", launch=launch)
    page.take_until(lambda: page.of("record"))
    assert page.of("record")[0]["html"].startswith(f'<div class="nblaunch-{launch} nblaunch-running ')
    assert page.of("record")[0]["text"].startswith("waits … Running for")
    assert page.kernel.ask("own is None and 'Running</b>' in launch._repr_html_()")  # its own cell has the panel
    page.run(PRINTS + "result = notebook_launcher(prints, args=(2000,), num_processes=1)")
    page.take_until(lambda: page.of("delta")[-1].get("last"))
    html = page.kernel.ask("result._repr_html_()")
    assert html.startswith(f'<div class="nblaunch-{page.state["info"]["launch"]} tex2jax_ignore')
    assert "line 0001999" in html
    assert page.kernel.ask("__import__('pickle').loads(__import__('pickle').dumps(result))._repr_html_()") is None
    page.kernel.run("launch.kill(); launch.wait()").check()


def test_the_kernel_survives_an_interrupt_during_torchs_import(fresh_kernel: Kernel) -> None:
    assert not fresh_kernel.ask("'torch' in __import__('sys').modules")
    soon = "import _thread, threading; threading.Timer(0.3, _thread.interrupt_main).start()\n"
    cell = fresh_kernel.run(soon + "notebook_launcher(lambda: 1, num_processes=2)")
    assert cell.error.startswith("KeyboardInterrupt")
    assert fresh_kernel.ask("notebook_launcher(lambda: 1, num_processes=2)[1]") == 1


def test_a_flood_takes_few_messages_and_shows_the_last_lines(page: Page) -> None:
    request = page.start(PRINTS + "result = notebook_launcher(prints, args=(200_000,), num_processes=2)")
    page.take_until(lambda: request in page.idle and page.status == "finished")
    page.take_until(lambda: all(page.log(rank) and _ends(page, rank) for rank in (0, 1)))
    for rank in (0, 1):
        last = list(page.log(rank).values())[-1999:]
        assert last == [f"line {number:07d} {'.' * 40}" for number in range(198_001, 200_000)]
    times = [at for at, _, _ in page.messages]
    sizes = [len(str(content)) + len(data) for _, content, data in page.messages]
    for begin in times:
        within = [size for at, size in zip(times, sizes, strict=True) if begin <= at < begin + 1]
        assert len(within) <= 10
        assert sum(within) <= 256 << 10
    assert page.kernel.ask("[log.out.stat().st_size for log in result.logs]") == [200_000 * 54] * 2


def _ends(page: Page, rank: int) -> bool:
    return list(page.log(rank).values())[-1].startswith("line 0199999")


def test_the_root_cause_comes_in_parts(page: Page) -> None:
    code = """
def fails(rank):
    import time
    time.sleep(0.2)
    if rank == 1:
        raise ValueError("no such class: 11")
    time.sleep(600)
notebook_launcher(fails, num_processes=2)
"""
    page.run(code)
    page.take_until(lambda: page.part("failure"))
    failure = page.part("failure")
    assert (failure["rank"], failure["headline"]) == (1, "Rank 1 failed: ValueError: no such class: 11")
    assert failure["source"] == 'raise ValueError("no such class: 11")'
    assert failure["where"].endswith(", line 5")
    assert dict(page.part("ranks"))[1] == "failed"
    assert "no such class: 11" in page.displays[-1]["text/html"]
    page.take_until(lambda: page.tracebacks)
    first, place, source, last = page.tracebacks[0].splitlines()  # the panel has the rest
    assert first == "ValueError: no such class: 11"
    assert (place, source) == (f"On rank 1 of fails, {failure['where']}:", f"    {failure['source']}")
    assert last.startswith("The panel has the traceback. Logs: /")
    page.kernel.client.allow_stdin = False  # as papermill does: its logs have the error alone
    try:
        page.run("notebook_launcher(fails, num_processes=2)")
    finally:
        page.kernel.client.allow_stdin = True
    page.take_until(lambda: len(page.tracebacks) > 1)
    assert "Traceback (most recent call last):" in page.tracebacks[1]


def test_many_launches_leave_few_widgets_threads_and_descriptors(page: Page) -> None:
    kernel = page.kernel
    most = kernel.ask("__import__('nblaunch.notebook.panel', fromlist=['_ended'])._MAX_ENDED_PANELS")
    kernel.run("from nblaunch.notebook import panel\npanel._MAX_ENDED_PANELS = 6").check()
    code = PRINTS + "\nfor _ in range(12): notebook_launcher(prints, args=(200,), num_processes=1)"
    page.run(code)
    count = "len(__import__('ipywidgets').Widget.widgets)"
    # each has a layout, and one has the script of all
    eventually(lambda: kernel.ask(count) <= 2 * 6 + 1, otherwise=lambda: kernel.ask(count))
    threads = "[t.name for t in __import__('threading').enumerate() if t.name.startswith('nblaunch')]"
    eventually(lambda: kernel.ask(threads) == [], otherwise=lambda: kernel.ask(threads))
    before = 10 + kernel.ask("len(__import__('os').listdir('/proc/self/fd'))")
    kernel.run(code).check()
    eventually(lambda: kernel.ask(threads) == [], otherwise=lambda: kernel.ask(threads))
    # ipykernel gives each thread that sends a socket of its own, and collects those of ended threads by the clock
    descriptors = "len(__import__('os').listdir('/proc/self/fd'))"
    eventually(lambda: kernel.ask(descriptors) <= before, otherwise=lambda: kernel.ask(descriptors))
    kernel.run(f"panel._MAX_ENDED_PANELS = {most}").check()


def test_after_all_widgets_are_closed_a_panel_has_a_script(page: Page) -> None:
    scripts = "[m for m, w in __import__('ipywidgets').Widget.widgets.items() if type(w).__name__ == 'PanelScript']"
    seen = {None}
    for _ in range(2):
        page.run("import time\nnotebook_launcher(lambda: time.sleep(1), num_processes=1)")
        page.take_until(lambda: page.state.get("script") not in seen)
        assert [page.state["script"]] == [f"IPY_MODEL_{model}" for model in page.kernel.ask(scripts)]
        seen.add(page.state["script"])
        page.kernel.run("__import__('ipywidgets').Widget.close_all()").check()
    assert len(seen) == 3


def test_a_short_launch_shows_the_memory_of_every_rank(page: Page) -> None:
    page.run("def naps():\n    import time; time.sleep(3)\nnotebook_launcher(naps, num_processes=3)")
    changes = [content.get("changes", {}) for _, content, _ in page.messages]
    assert {rank for found in changes for rank, values in found.get("resources", []) if values[1][1]} == {0, 1, 2}


def test_a_launch_with_silent_ranks_sends_heartbeats(page: Page) -> None:
    code = """
def stops_itself():
    import os, signal
    os.kill(os.getpid(), signal.SIGSTOP)
launch = notebook_launcher(stops_itself, num_processes=2, block=False)
"""
    page.run(code)
    page.take_until(lambda: page.messages)
    count = len(page.messages)
    page.take_until(lambda: len(page.messages) >= count + 4)
    gaps = [after[0] - before[0] for before, after in itertools.pairwise(page.messages)]
    assert sorted(gaps[-4:])[1] < 5  # after a longer silence the page does not interrupt the kernel
    page.kernel.run("launch.kill(); launch.wait()").check()


def test_a_panel_keeps_no_result_alive(page: Page) -> None:
    code = """
import gc, weakref
class Big: pass
result = notebook_launcher(lambda: (Big(), print("x" * 5000)), num_processes=1)
alive = weakref.ref(result[0][0])
del result, _
"""
    page.run(code.replace("del result, _", "del result"))
    eventually(lambda: page.kernel.ask("(gc.collect(), alive() is None)[1]"))  # the launch's thread ends first


def test_an_anywidget_that_is_broken_leaves_the_text_view(fresh_kernel: Kernel) -> None:
    problem = "__import__('nblaunch.notebook.notebook_frontend').notebook.notebook_frontend._widget_problem"
    eventually(lambda: fresh_kernel.ask(problem) == "RuntimeError: broken", otherwise=lambda: fresh_kernel.ask(problem))
    said = fresh_kernel.run("notebook_launcher(lambda: print('hello'), num_processes=1)").check().text
    assert "[rank 0] hello" in said


def test_what_no_page_can_show_is_text(page: Page) -> None:
    says = "notebook_launcher(lambda: print('hello'), num_processes=1"
    page.kernel.run(f"%%capture said\n{says})").check()
    assert "[rank 0] hello" in page.kernel.ask("said.stdout")
    for view in ("text", "none"):
        page.run(f"{says}, view={view!r})")
    page.kernel.run("import sys; known, sys.modules['anywidget'] = sys.modules['anywidget'], None").check()
    assert "[rank 0] hello" in page.kernel.run(f"{says})").check().text  # without anywidget
    page.kernel.run("sys.modules['anywidget'] = known").check()
    assert page.panel == ""
    assert page.displays == []
