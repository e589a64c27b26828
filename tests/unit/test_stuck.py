"""The verdict on ranks that wait in a collective."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nblaunch.launch.stacks import Frame
from nblaunch.launch.stuck import RankView, StuckVerdict, Where, judge, waited_for
from nblaunch.wire.tables import Begun, fitting, in_ranges, members_of

SIZE = "8 float32"


def begun(call: str, count: int, detail: str = SIZE, line: int = 14, group: str = "0", members: str = "") -> Begun:
    return Begun(count, line, count * 1000, group, members, call, detail, "<cell>")


def view(rank: int, where: Where, *last: Begun, place: str = "") -> RankView:
    return RankView(rank, where, place, last)


def verdict(*views: RankView) -> StuckVerdict | None:
    return judge(views, 12.0, lambda each: f"Cell In[3], line {each.line}")


def text_of(*views: RankView) -> str:
    found = verdict(*views)
    assert found is not None
    return found.text


def test_different_operations_cannot_end() -> None:
    found = verdict(
        view(0, "waits", begun("allreduce", 57)),
        view(1, "waits", begun("broadcast", 57, line=19)),
        view(2, "waits", begun("allreduce", 57)),
    )
    assert found is not None
    assert (found.text, found.is_final) == (
        "Stuck for 12 s: ranks 0, 2 wait in all_reduce #57 (8 float32, Cell In[3], line 14); "
        "rank 1 waits in broadcast #57 (8 float32, Cell In[3], line 19). "
        "The collectives differ: this will never complete",
        True,
    )


@pytest.mark.parametrize("detail", ["9 float32", "8 float64"])
def test_different_sizes_and_dtypes_cannot_end(detail: str) -> None:
    text = text_of(view(0, "waits", begun("allreduce", 3)), view(1, "waits", begun("allreduce", 3, detail)))
    assert text.startswith("Stuck for 12 s: rank 0 waits in all_reduce #3 (8 float32")
    assert text.endswith("The sizes or dtypes differ: this will never complete")


def test_different_sizes_are_no_mismatch_where_ranks_may_differ() -> None:
    text = text_of(view(0, "waits", begun("alltoall", 3)), view(1, "waits", begun("alltoall", 3, "9 float32")))
    assert "differ" not in text


@pytest.mark.parametrize(
    ("where", "words"), [("returned", "returned"), ("raised", "raised an exception"), ("died", "is dead")]
)
def test_a_rank_that_has_ended_never_joins(where: Where, words: str) -> None:
    found = verdict(view(0, "waits", begun("allreduce", 57)), view(1, where, begun("allreduce", 56)))
    assert found is not None
    assert found.is_final
    assert found.text.endswith(f"; rank 1 {words} after 56 of 57 collectives: this will never complete")


@pytest.mark.parametrize("count", [56, 57, 58])
def test_a_rank_that_waits_for_one_that_has_returned_is_known(count: int) -> None:
    """A kept rank that has returned stays connected, so no error ends the wait."""
    found = verdict(view(0, "runs"), view(1, "waits", begun("allreduce", 57)), view(2, "returned", begun("x", count)))
    assert found is not None
    assert (found.pair, found.is_final) == ((1, 2), True)
    of_others = begun("allreduce", 57, group="g", members="0-1")
    alone = verdict(view(0, "runs"), view(1, "waits", of_others), view(2, "returned"))
    assert alone is not None
    assert alone.pair is None


def test_a_missing_rank_is_named_with_its_line() -> None:
    found = verdict(
        view(0, "waits", begun("allreduce", 57)),
        view(1, "runs", begun("allreduce", 56), place="Cell In[3], line 9: next(loader)"),
    )
    assert found is not None
    assert (found.text, found.is_final) == (
        "Waiting for 12 s: rank 0 waits in all_reduce #57 (8 float32, Cell In[3], line 14); "
        "rank 1 has started 56 of 57 collectives, and is at Cell In[3], line 9: next(loader)",
        False,
    )


def test_ranks_outside_the_group_are_not_missing() -> None:
    of_group = begun("allreduce", 2, group="g", members="0-1")
    text = text_of(view(0, "waits", of_group), view(1, "runs", place="a.py, line 2"), view(2, "returned"))
    assert "rank 1 has started 0 of 2" in text
    assert "rank 2" not in text


def test_a_rank_that_waits_in_another_group_is_named() -> None:
    text = text_of(
        view(0, "waits", begun("allreduce", 5)),
        view(1, "waits", begun("barrier", 6, "", 20, "g", "1-2"), begun("allreduce", 4)),
        view(2, "runs", begun("allreduce", 5), place="a.py, line 7"),
    )
    assert text.endswith(
        "rank 1 has started 4 of 5 collectives, and waits in barrier of another group (Cell In[3], line 20)"
    )


def test_a_mismatch_in_any_group_comes_first() -> None:
    text = text_of(
        view(0, "waits", begun("barrier", 1, group="g", members="0-1")),
        view(1, "runs"),
        view(2, "waits", begun("allreduce", 5)),
        view(3, "waits", begun("broadcast", 5)),
    )
    assert "rank 2 waits in all_reduce #5" in text
    assert "this will never complete" in text


def test_all_ranks_in_one_collective_point_to_the_network() -> None:
    text = text_of(*(view(rank, "waits", begun("allreduce", 57)) for rank in range(4)))
    assert text == (
        "Waiting for 12 s: ranks 0-3 wait in all_reduce #57 (8 float32, Cell In[3], line 14). Every rank of the "
        "process group waits in it: the network or a device is slow, or does not respond"
    )


def test_ranks_that_have_passed_are_not_blamed() -> None:
    text = text_of(view(0, "runs", begun("broadcast", 8)), view(1, "waits", begun("broadcast", 7)))
    assert text == "Waiting for 12 s: rank 1 waits in broadcast #7 (8 float32, Cell In[3], line 14)"


@pytest.mark.parametrize("views", [(), (view(0, "runs"),), (view(0, "waits"),)])
def test_nothing_is_said_where_no_logged_collective_waits(views: Sequence[RankView]) -> None:
    assert verdict(*views) is None


@pytest.mark.parametrize(("ranks", "text"), [([0, 1, 2, 5], "0-2,5"), ([3], "3"), ([], "")])
def test_ranks_are_written_as_ranges(ranks: list[int], text: str) -> None:
    assert in_ranges(ranks) == text
    if ranks:
        assert members_of(Begun(members=text), 64) == ranks


def test_an_empty_list_means_all_ranks() -> None:
    assert members_of(Begun(), 3) == [0, 1, 2]


def test_more_ranks_than_fit_into_a_row_are_not_known() -> None:
    many = in_ranges(range(0, 256, 4))
    assert fitting("0-3") == "0-3"
    assert members_of(Begun(members=fitting(many)), 256) is None
    unknown = begun("allreduce", 3, members=fitting(many))
    assert "rank 1 has started 0 of 3" in text_of(view(0, "waits", unknown), view(1, "runs"))


@pytest.mark.parametrize("call", ["send", "recv", "recvanysource"])
def test_point_to_point_calls_are_no_mismatch(call: str) -> None:
    found = verdict(view(0, "waits", begun("gather", 57)), view(1, "waits", begun(call, 57)), view(2, "runs"))
    assert found is not None
    assert not found.is_final
    assert "rank 1" not in found.text
    assert verdict(view(0, "waits", begun(call, 5)), RankView(1, "runs", is_busy=True)) is None


def test_transfers_are_said_to_wait_where_no_rank_works() -> None:
    receives = begun("recv", 5)
    text = text_of(view(0, "waits", receives), view(1, "runs", place="Cell In[3], line 9: sleep()"))
    assert text == (
        "Waiting for 12 s: rank 0 waits in recv (8 float32, Cell In[3], line 14); "
        "rank 1 is at Cell In[3], line 9: sleep()"
    )


def test_ranks_that_transfer_blame_no_network() -> None:
    views = [RankView(rank, "waits", "", [begun("allreduce", 7)], is_busy=True) for rank in range(2)]
    assert "network" not in text_of(*views)


def test_the_reason_does_not_depend_on_the_line_of_a_missing_rank() -> None:
    found = [verdict(view(0, "waits", begun("barrier", 2)), view(1, "runs", place=place)) for place in ("a", "b")]
    assert len({each.reason for each in found if each is not None}) == 1


def test_a_rank_that_makes_a_group_waits_in_no_logged_collective() -> None:
    last = begun("allreduce", 3)
    user = Frame("<cell>", 14, "train")
    assert waited_for([user, Frame("/torch/distributed/c10d.py", 9, "all_reduce")], [last]) is last
    assert waited_for([user, Frame("/torch/distributed/c10d.py", 7, "new_group")], [last]) is None
    assert waited_for([Frame("<cell>", 20, "train")], [last]) is None
    assert waited_for([Frame("<cell>", 20, "train")], []) is None


def test_a_semicolon_in_the_users_line_begins_no_other_line() -> None:
    found = verdict(
        view(0, "waits", begun("barrier", 2, "")), view(1, "runs", place="Cell In[3], line 9: a = 1; b = 2")
    )
    assert found is not None
    assert found.lines == (
        "Waiting for 12 s: rank 0 waits in barrier #2 (Cell In[3], line 14)",
        "rank 1 has started 0 of 2 collectives, and is at Cell In[3], line 9: a = 1; b = 2",
    )


@pytest.mark.parametrize(
    ("views", "ranks"),
    [
        ([view(0, "waits", begun("allreduce", 5)), view(1, "runs", begun("allreduce", 4))], (1,)),
        ([view(0, "waits", begun("allreduce", 5)), view(1, "died", begun("allreduce", 4)), view(2, "runs")], (2,)),
        ([view(rank, "waits", begun("allreduce", 5, line=rank)) for rank in range(2)], ()),
        ([view(rank, "waits", begun(call, 5)) for rank, call in enumerate(("barrier", "barrier", "reduce"))], (0, 2)),
        ([view(rank, "waits", begun("alltoall", 5, f"{rank} float32")) for rank in range(2)], ()),
    ],
    ids=["one is late", "one is dead", "all wait", "calls differ", "sizes may differ"],
)
def test_the_ranks_to_debug_are_alive_and_late_or_differ(views: list[RankView], ranks: tuple[int, ...]) -> None:
    found = verdict(*views)
    assert found is not None
    assert found.ranks == ranks
