"""``%%distributed --metric``: a pattern on the magic's line reaches the launcher unchanged."""

from __future__ import annotations

import pytest

from tests.kernel.harness import Kernel

TRAINING = "print(f'epoch 12: loss {rank}.5')\nprint('Accuracy: 97.25')\nprint('it\\'s \"0.5\"')"


def test_a_metric_is_read_from_what_a_cell_prints_and_shown(kernel: Kernel) -> None:
    line = r"%%distributed -n 2 --view text -o seen --metric 'Accuracy: (?P<accuracy>[\d.]+)'"
    cell = kernel.run(f"{line}\n{TRAINING}").check()

    assert "[rank 0] Accuracy: 97.25\n" in cell.stdout
    assert "[rank 1] accuracy 97.25\n" in cell.stdout
    assert kernel.ask("seen.metrics.last") == {"accuracy": 97.25}


@pytest.mark.parametrize(
    ("option", "values"),
    [
        (
            r"--metric 'Accuracy: (?P<accuracy>[\d.]+)' --metric 'epoch (?P<step>\d+): loss (?P<loss>[\d.]+)'",
            [(12, {"loss": 1.5}), (None, {"accuracy": 97.25})],
        ),
        (r'--metric "Accuracy: (?P<accuracy>[\d.]+)"', [(None, {"accuracy": 97.25})]),
        (r"--metric Accuracy:\s(?P<accuracy>[\d.]+)", [(None, {"accuracy": 97.25})]),
        (r"--metric 'Accuracy: '(?P<accuracy>[\d.]+)", [(None, {"accuracy": 97.25})]),
        (r"--metric 'Accuracy: (?P<accuracy>\d{2}\.\d{1,3})$'", [(None, {"accuracy": 97.25})]),
        (r"--metric '^A(?P<a>\d)?.*: (?P<accuracy>.+)'", [(None, {"accuracy": 97.25})]),
        (r"""--metric 'it'\''s "(?P<x>[\d.]+)"'""", [(None, {"x": 0.5})]),
        (r"""--metric "it's \"(?P<x>[\d.]+)\"" """, [(None, {"x": 0.5})]),
    ],
)
def test_patterns_arrive_as_they_were_typed_however_they_are_quoted(
    kernel: Kernel, option: str, values: list[tuple[int | None, dict[str, float]]]
) -> None:
    kernel.run(f"%%distributed -n 2 --view none -o seen {option}\n{TRAINING}").check()
    assert kernel.ask("[(r.step, dict(r.values)) for r in seen.metrics if r.rank == 1]") == values


def test_names_are_expanded_around_a_pattern_but_not_inside_it(kernel: Kernel) -> None:
    kernel.run("count, method, d = 3, 'forkserver', ''").check()
    pattern = r"--metric 'x(?P<x>\d{1}){1}(?!$d)'"  # with 1 for {1} and nothing for $d it would never match
    cell = f"%%distributed -n $count {pattern} --start-method {{method}} --view none -o seen\nprint('x7')"
    kernel.run(cell).check()
    assert kernel.ask("len(seen), len(seen.metrics), seen.metrics.last") == (3, 3, {"x": 7.0})
