"""Shell messages that a kernel answers while a cell waits for a launch, and those that it defers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import eventually
from tests.kernel.harness import Kernel
from tests.kernel.page import Page

ANSWER_LIMIT = 60.0
"""Seconds; the cells here wait until they are stopped."""
WAITS = """
from nblaunch.errors import LaunchStoppedError
def waits():
    import time
    print("begun", flush=True)
    while True:
        time.sleep(0.01)
try:
    {wait}
except LaunchStoppedError:
    print("stopped")
"""
BLOCKS = "notebook_launcher(waits, num_processes=2)"


@pytest.fixture(autouse=True)
def _empty_order(page: Page) -> None:
    page.kernel.run("order = []").check()


@pytest.fixture
def newcomer(page: Page) -> Iterator[Page]:
    """A page that connects later; to be given the panel that it knows from its saved notebook."""
    with page.kernel.another_client() as kernel:
        yield Page(kernel)


def _start(page: Page, newcomer: Page, wait: str = BLOCKS) -> str:
    """Begin a cell that waits for a launch; it is known by its request, and its ranks have begun."""
    request = page.kernel.start_cell(WAITS.format(wait=wait))
    page.take_until(lambda: page.log(0) and page.log(1))
    newcomer.panel = page.panel
    return request


def _stop(page: Page, newcomer: Page) -> None:
    newcomer.send(kind="stop", launch=page.state["info"]["launch"])
    newcomer.take_until(lambda: newcomer.of("acknowledged"), ANSWER_LIMIT)


def _states(kernel: Kernel) -> dict[str, Any]:
    """The state of every widget, as ipywidgets' page asks for it when it loads."""
    session = kernel.client.session
    control = {"comm_id": "control"}
    opening = {**control, "target_name": "jupyter.widget.control", "data": {}}
    kernel.client.shell_channel.send(session.msg("comm_open", opening, metadata={"version": "1.0.0"}))
    kernel.client.shell_channel.send(session.msg("comm_msg", {**control, "data": {"method": "request_states"}}))
    while True:
        message = kernel.client.get_iopub_msg(timeout=ANSWER_LIMIT)
        if message["msg_type"] == "comm_msg" and message["content"]["comm_id"] == "control":
            kernel.client.shell_channel.send(session.msg("comm_close", control))
            return dict(message["content"]["data"]["states"])


@pytest.mark.parametrize(
    "wait",
    [
        BLOCKS,
        BLOCKS.replace(")", ", block=False).wait(300)"),
    ],
    ids=["blocks", "wait"],
)
def test_a_new_page_gets_the_panel_and_can_stop_the_launch(page: Page, newcomer: Page, wait: str) -> None:
    request = _start(page, newcomer, wait)
    client = newcomer.kernel.client
    info = client.kernel_info(reply=True, timeout=ANSWER_LIMIT)["content"]
    assert (info["status"], info["implementation"]) == ("ok", "ipython")
    comms = client.comm_info("jupyter.widget", reply=True, timeout=ANSWER_LIMIT)["content"]["comms"]
    assert comms[page.panel] == {"target_name": "jupyter.widget"}
    assert _states(newcomer.kernel)[page.panel]["state"]["info"] == page.state["info"]
    newcomer.send(kind="resync", request=1, logs=[])
    newcomer.take_until(lambda: newcomer.of("snapshot") and newcomer.log(0) and newcomer.log(1), ANSWER_LIMIT)
    assert request not in newcomer.idle
    _stop(page, newcomer)
    page.kernel.finish_cell(request, ANSWER_LIMIT).check()


def test_queued_cells_run_once_in_order_with_their_own_output(page: Page, newcomer: Page) -> None:
    request = _start(page, newcomer)
    queued = [page.kernel.start_cell(f"order.append({number}); print('cell', {number})") for number in range(3)]
    newcomer.kernel.client.kernel_info(reply=True, timeout=ANSWER_LIMIT)
    _states(newcomer.kernel)
    queued += [page.kernel.start_cell(f"order.append({number}); print('cell', {number})") for number in range(3, 5)]
    _stop(page, newcomer)
    assert page.kernel.finish_cell(request).check().stdout.endswith("stopped\n")
    assert [page.kernel.finish_cell(cell).check().stdout for cell in queued] == [f"cell {n}\n" for n in range(5)]
    assert page.kernel.ask("order") == [0, 1, 2, 3, 4]
    eventually(lambda: page.kernel.ask("get_ipython().kernel.shell_stream._recv_callback == own_callback"))


def test_an_error_still_aborts_the_cells_that_are_queued(page: Page, newcomer: Page) -> None:
    request = _start(page, newcomer, "print(" + BLOCKS + ")\nexcept ZeroDivisionError:\n    pass\ntry:\n    pass")
    queued = [page.kernel.start_cell(f"order.append({number})") for number in range(2)]
    newcomer.kernel.client.kernel_info(reply=True, timeout=ANSWER_LIMIT)
    _stop(page, newcomer)
    assert page.kernel.finish_cell(request).error.startswith("LaunchStoppedError")
    assert [page.kernel.finish_cell(cell).reply["status"] for cell in queued] == ["aborted", "aborted"]
    assert page.kernel.ask("order") == []


def test_a_new_page_is_sent_the_busy_status(page: Page, newcomer: Page) -> None:
    request = _start(page, newcomer)
    client = newcomer.kernel.client
    asked = client.kernel_info()
    states: list[tuple[str, str]] = []
    while states[-3:] != [(asked, "idle"), (request, "busy"), (request, "busy")]:  # the last later, and unasked
        message = client.get_iopub_msg(timeout=ANSWER_LIMIT)
        if message["msg_type"] == "status":
            states.append((message["parent_header"]["msg_id"], message["content"]["execution_state"]))
    _stop(page, newcomer)
    page.kernel.finish_cell(request)


def test_the_users_own_widgets_wait_for_the_cell(page: Page, newcomer: Page, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    page.kernel.run(
        "import ipywidgets, pathlib\n"
        "slider = ipywidgets.IntSlider()\n"
        f"slider.observe(lambda change: (order.append('slider'), pathlib.Path({str(moved)!r}).touch()), 'value')"
    ).check()
    slider = page.kernel.ask("slider.model_id")
    request = _start(page, newcomer)
    client = newcomer.kernel.client
    data = {"method": "update", "state": {"value": 5}, "buffer_paths": []}
    client.shell_channel.send(client.session.msg("comm_msg", {"comm_id": slider, "data": data}))
    client.execute("order.append('cell')")
    client.kernel_info(reply=True, timeout=ANSWER_LIMIT)  # that came after the slider's message
    assert not moved.exists()
    _stop(page, newcomer)
    page.kernel.finish_cell(request)
    eventually(lambda: page.kernel.ask("order") == ["slider", "cell"], ANSWER_LIMIT)


def test_a_new_page_does_not_flush_the_cells_unfinished_figures(page: Page, newcomer: Page) -> None:
    events = "get_ipython().events"
    page.kernel.run(f"show = lambda: order.append('shown'); {events}.register('post_execute', show)").check()
    request = _start(page, newcomer, "order.clear(); " + BLOCKS)
    _states(newcomer.kernel)
    newcomer.send(kind="resync", request=1, logs=[])
    newcomer.take_until(lambda: newcomer.of("snapshot"), ANSWER_LIMIT)
    _stop(page, newcomer)
    page.kernel.finish_cell(request)
    assert page.kernel.ask("order") == ["shown"]  # by the cell itself, at its end
    page.kernel.run(f"{events}.unregister('post_execute', show)").check()
