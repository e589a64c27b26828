"""What ranks display, in a real kernel: in the panel, in the record, after a reload, and in a flood."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kernel.page import Page

SERIES = "from nblaunch import report\nreport(step=0, x=1)\nreport(step=1, x=2)\n"
"""Makes any launch worth a panel."""


def contents(page: Page, rank: int) -> list[dict[str, Any]]:
    """The outputs of a rank that the page shows and that have arrived whole."""
    found: dict[int, bytes] = {}
    totals: dict[int, int] = {}
    for _, message, data in page.messages:
        at = 0
        for number, offset, size, totals[number] in message.get("outputs", []):
            found[number] = (found.get(number, b"") if offset else b"") + data[at : at + size]
            at += size
    numbers: list[int] = next(
        (
            entry[1]
            for _, message, _ in reversed(page.messages)
            for entry in message.get("changes", {}).get("outputs", [])
            if entry[0] == rank
        ),
        [],
    )
    return [json.loads(found[number]) for number in numbers if len(found.get(number, b"")) == totals.get(number)]


def shown(page: Page) -> dict[str, Any]:
    """What a launch shows; not the display of the session, which follows it."""
    return next(data for data in reversed(page.displays) if not data.get("text/plain", "").startswith("session "))


# ------------------------------------------------------------------ what is displayed
def test_a_short_launch_shows_its_outputs_in_the_record_alone(page: Page) -> None:
    body = (
        "import pandas as pd\nfrom IPython.display import HTML, Latex, Markdown\n"
        "import matplotlib.pyplot as plt\n"
        "display(pd.DataFrame({'loss': [rank + 0.5]}))\nplt.plot([1, 2])\nplt.show()\n"
        "display(HTML('<b onclick=x>bold</b><script>alert(1)</script>'), Markdown('# head'), Latex('$x$'))\n"
        "class Own:\n"
        "    def _repr_mimebundle_(self, **kwargs): return {'text/html': '<i>own</i>', 'text/plain': 'own'}\n"
        "Own()"
    )
    page.run(f"%%distributed -n 2\n{body}")

    html, text = shown(page)["text/html"], shown(page)["text/plain"]
    assert re.findall(r"<details( open)?[^>]*><summary[^>]*><b>rank (\d)</b>", html)[:2] == [(" open", "0"), ("", "1")]
    assert html.count('class="dataframe"') == 2
    assert html.count('src="data:image/png;base64,') == 2
    assert html.count("<b>bold</b>") == 2
    assert "script" not in html
    assert html.count("# head") == 2
    assert html.count("<i>own</i>") == 1  # rank 0's value is the cell's
    assert "\nown\n" in text
    assert text.count("loss") == 2


def test_updates_and_clears_leave_the_last_state(page: Page) -> None:
    body = (
        "from IPython.display import clear_output, display, update_display\n"
        "display('gone')\nclear_output()\nhandle = display('first', display_id=True)\ndisplay('second')\n"
        "for n in range(100): handle.update(f'update {n}')\nclear_output(wait=True)\ndisplay('last', display_id='x')\n"
        "update_display('very last', display_id='x')"
    )
    page.run(
        f"def show():\n    {body.replace(chr(10), chr(10) + '    ')}\n    {SERIES.replace(chr(10), chr(10) + '    ')}"
    )
    page.run("notebook_launcher(show, num_processes=2)")
    page.take_until(lambda: page.status == "finished" and all(len(contents(page, rank)) == 1 for rank in range(2)))
    assert [content["body"] for content in contents(page, 0)] == ["'very last'"]
    assert "'very last'" in shown(page)["text/html"]
    assert "first" not in shown(page)["text/html"]


# ------------------------------------------------------------------ the panel
@pytest.fixture
def session(page: Page) -> Iterator[None]:
    """Two ranks that stay, in the page's kernel."""
    page.run("%distributed session -n 2\nimport nblaunch.launch.session as _all")
    yield
    page.run("_all.find().stop()")


FLOOD = """
import base64, os, time, torch, torch.distributed as dist
import matplotlib.pyplot as plt
from IPython.display import Image, display
%matplotlib inline
pid = os.getpid()
noise = Image(data=b'\\x89PNG' + os.urandom(2_000), format='png')
for n in range(1000): display(noise)
"""


@pytest.mark.usefixtures("session")
def test_a_flood_of_images_stalls_nothing_and_spares_the_next_cell(page: Page) -> None:
    page.run(f"%%distributed\n{SERIES}{FLOOD}")
    page.take_until(lambda: page.status == "finished")
    page.take_until(lambda: page.left_out(0) == page.left_out(1) == 900)
    html, text = shown(page)["text/html"], shown(page)["text/plain"]
    assert html.count("950 outputs left out") == 2  # the record holds 50 of a rank's 100
    assert html.count('src="data:image/png;base64,') == 100
    for rank in range(2):
        assert (
            f"rank {rank} exceeded the limit of displayed outputs (100, or 17 MB): further outputs are dropped" in text
        )
    sent = [(when, len(json.dumps(content)) + len(data)) for when, content, data in page.messages]
    assert max(size for _, size in sent) < 64 << 10
    first = sent[0][0]
    assert sum(size for when, size in sent if when < first + 2) < 2.5 * (256 << 10)

    page.run(
        "%%distributed -o after\nt = torch.ones(1)\ndist.all_reduce(t)\nplt.plot([1])\nt.item(), pid == os.getpid()"
    )
    assert shown(page)["text/html"].count('src="data:image/png;base64,') == 2
    assert page.kernel.ask("list(after)") == [(2.0, True)] * 2
