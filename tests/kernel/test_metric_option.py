"""``%%distributed --metric``: a pattern on the magic's line reaches the launcher unchanged."""

from __future__ import annotations

import pytest

from tests.kernel.harness import Kernel

TRAINING = "print(f'epoch 12: loss {rank}.5')\nprint('Accuracy: 97.25')"


def metrics_of(kernel: Kernel, options: str, body: str = TRAINING) -> list[tuple[int | None, dict[str, float]]]:
    """What rank 1 is said to have reported, as (step, metrics)."""
    kernel.run(f"%%distributed -n 2 --view none -o seen {options}\n{body}").check()
    return list(kernel.ask("[(r.step, dict(r.values)) for r in seen.metrics if r.rank == 1]"))


def test_a_metric_is_read_from_what_a_cell_prints_and_shown(kernel: Kernel) -> None:
    line = r"%%distributed -n 2 --view text -o seen --metric 'Accuracy: (?P<accuracy>[\d.]+)'"
    cell = kernel.run(f"{line}\n{TRAINING}").check()

    assert "[rank 0] Accuracy: 97.25\n" in cell.stdout
    assert "[rank 1] accuracy 97.25\n" in cell.stdout
    assert kernel.ask("seen.metrics.last") == {"accuracy": 97.25}


def test_the_option_may_be_given_several_times(kernel: Kernel) -> None:
    both = r"--metric 'Accuracy: (?P<accuracy>[\d.]+)' --metric 'epoch (?P<step>\d+): loss (?P<loss>[\d.]+)'"
    assert metrics_of(kernel, both) == [(12, {"loss": 1.5}), (None, {"accuracy": 97.25})]


@pytest.mark.parametrize(
    "option",
    [
        r'--metric "Accuracy: (?P<accuracy>[\d.]+)"',
        r"--metric Accuracy:\s(?P<accuracy>[\d.]+)",
        r"--metric 'Accuracy: '(?P<accuracy>[\d.]+)",
        r"--metric 'Accuracy: (?P<accuracy>\d{2}\.\d{1,3})$'",
        r"--metric '^A(?P<accuracy>\d)?.*: (?P<accuracy_>.+)' --metric 'Accuracy: (?P<accuracy>[\d.]+)'",
    ],
)
def test_a_pattern_arrives_as_it_was_typed_however_it_is_quoted(kernel: Kernel, option: str) -> None:
    ((_, values),) = metrics_of(kernel, option)
    assert values["accuracy"] == 97.25


def test_quotes_in_a_pattern_are_written_as_for_a_shell(kernel: Kernel) -> None:
    body = "print('it\\'s \"0.5\"')"
    assert metrics_of(kernel, r"""--metric 'it'\''s "(?P<x>[\d.]+)"'""", body) == [(None, {"x": 0.5})]
    assert metrics_of(kernel, r"""--metric "it's \"(?P<x>[\d.]+)\"" """, body) == [(None, {"x": 0.5})]


def test_names_are_expanded_around_a_pattern_but_not_inside_it(kernel: Kernel) -> None:
    kernel.run("count, method, d = 3, 'forkserver', ''").check()
    pattern = r"--metric 'x(?P<x>\d{1}){1}(?!$d)'"  # with 1 for {1} and nothing for $d it would never match
    cell = f"%%distributed -n $count {pattern} --start-method {{method}} --view none -o seen\nprint('x7')"
    kernel.run(cell).check()
    assert kernel.ask("len(seen), len(seen.metrics), seen.metrics.last") == (3, 3, {"x": 7.0})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            r"--metric 'loss: ([\d.]+)'",
            r"--metric 'loss: ([\d.]+)': name the group that holds the number, as in (?P<loss>[\d.]+)",
        ),
        (
            r"--metric '(?P<x>\d+'",
            r"--metric '(?P<x>\d+': not a regular expression: missing ), unterminated subpattern",
        ),
        (
            r"--metric 'epoch (?P<step>\d+)'",
            r"--metric 'epoch (?P<step>\d+)': name the group that holds the number, as in (?P<loss>[\d.]+)",
        ),
        ("--metric ''", "--metric '': name the group that holds the number"),
        ("--metric -n 2", "argument --metric: expected one argument"),
        (r"--metric 'loss: (?P<loss>.)", r"%%distributed --metric 'loss: (?P<loss>.): unclosed quote"),
        ("-o 'x", "%%distributed -o 'x: unclosed quote"),
    ],
)
def test_a_wrong_pattern_is_a_usage_error_in_the_magics_terms(kernel: Kernel, options: str, says: str) -> None:
    cell = kernel.run(f"%%distributed {options}\nprint('ran')")

    assert cell.stderr.startswith("UsageError: ")
    assert says in cell.stderr
    assert "ran" not in cell.stdout
