"""What loops written for accelerate ask of several ranks: who runs what, parts, triggers, trackers, batch sizes."""

from __future__ import annotations

import random
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from nblaunch import errors
from nblaunch.errors import ArgumentError
from nblaunch.machine import timeouts
from nblaunch.training import Accelerator, Parallelism, find_executable_batch_size, get_logger
from tests.processes.conftest import Launcher

pytestmark = pytest.mark.usefixtures("imported_ahead")

WORLD = 3


def test_roles_and_parts(launch: Launcher) -> None:
    def check() -> None:
        accelerator = Accelerator(cpu=True)
        rank = accelerator.rank
        assert accelerator.distributed_type == accelerator.state.distributed_type == "MULTI_CPU"
        assert (accelerator.state.num_processes, accelerator.state.is_last_process) == (WORLD, rank == 2)
        assert not accelerator.multi_device

        # --- decorators
        ran = [
            accelerator.on_main_process(lambda: "main")(),
            accelerator.on_local_main_process(lambda: "local main")(),
            accelerator.on_last_process(lambda: "last")(),
            accelerator.on_process(lambda: "one", process_index=1)(),
            accelerator.on_local_process(local_process_index=2)(lambda: "local two")(),
        ]
        expected = [["main", "local main"], ["one"], ["last", "local two"]]
        assert [text for text in ran if text] == expected[rank]

        # --- parts
        parts = [[0, 1, 2], [3, 4], [5, 6]]
        for given in (list(range(7)), tuple(range(7)), torch.arange(7)):
            with accelerator.split_between_processes(given) as part:
                assert type(part) is type(given)
                assert list(part) == parts[rank]
        both: dict[str, Any] = {"a": list("xyzw"), "b": torch.arange(8).view(4, 2)}
        with accelerator.split_between_processes(both, apply_padding=True) as part:
            assert part["a"] == [["x", "y"], ["z", "w"], ["w", "w"]][rank]
            assert len(part["a"]) == len(part["b"]) == 2
        assert len(both["a"]) == 4  # the original stays
        with accelerator.split_between_processes((1, 2), apply_padding=True) as part:
            assert part == [(1,), (2,), (2,)][rank]
        with accelerator.split_between_processes([]) as part:
            assert part == []
        divided = Accelerator(cpu=True, parallelism=Parallelism(shard=False, tensor=WORLD, plan={"up": "colwise"}))
        with divided.split_between_processes([1, 2, 3]) as part:
            assert part == [1, 2, 3]  # the ranks compute on the same samples
        with accelerator.split_between_processes({"outer": {"a": [1, 2, 3]}}) as part:
            assert part == {"outer": {"a": [rank + 1]}}
        with pytest.raises(ArgumentError, match="a dict's values must be equally long"):
            accelerator.split_between_processes({"a": [1], "b": []}).__enter__()
        wrong: list[Any] = ["text", 3, torch.tensor(3)]
        for given in wrong:
            with pytest.raises(ArgumentError, match=r"inputs=.* cannot be divided: give a list"):
                accelerator.split_between_processes(given).__enter__()

        # --- padding
        own = {"x": torch.ones(rank + 1, 2), "none": None, "flat": torch.tensor(rank)}
        padded = accelerator.pad_across_processes(own, pad_index=-1)
        assert padded["x"].shape == (3, 2)
        assert padded["x"].sum().item() == 2 * (rank + 1) - 2 * (2 - rank)
        assert padded["flat"].item() == rank
        first = accelerator.pad_across_processes(torch.ones(2, rank + 1), dim=-1, pad_first=True)
        assert first[0].tolist() == [0.0] * (2 - rank) + [1.0] * (rank + 1)
        with pytest.raises(ArgumentError, match=r"shape \[\*\] on rank 0"):
            accelerator.pad_across_processes(torch.ones([1] * (rank + 1)))

        # --- triggers
        assert not accelerator.check_trigger()
        if rank == 1:
            accelerator.set_trigger()
        assert accelerator.check_trigger()
        assert not accelerator.check_trigger()

    launch(check, num_processes=WORLD, device="cpu")


# ------------------------------------------------------------------ loaders
class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(10))


def test_split_batches_share_one_batch_among_the_ranks(launch: Launcher) -> None:
    def check() -> list[Any]:
        accelerator = Accelerator(cpu=True, split_batches=True, semantics="exact")
        data, sampler = TensorDataset(torch.arange(10)), SequentialSampler(range(10))

        class Batches(BatchSampler):
            """A batch sampler of the user's own."""

        loaders = [
            DataLoader(data, batch_size=4),
            DataLoader(data, batch_size=4, drop_last=True),
            DataLoader(data, batch_sampler=Batches(sampler, 4, False)),
            DataLoader(Stream(), batch_size=4),
        ]
        seen = []
        for loader in loaders:
            prepared: Any = accelerator.prepare(loader)
            assert getattr(prepared, "total_batch_size", 0) in (4, 0)
            seen.append(
                [torch.as_tensor(batch[0] if isinstance(batch, list) else batch).tolist() for batch in prepared]
            )
        with pytest.raises(ArgumentError, match="split_batches=True: the batch size, 3, must be a multiple of the 2"):
            accelerator.prepare(DataLoader(data, batch_size=3))
        return seen

    one, two = launch(check, device="cpu")
    whole = [[0, 1], [4, 5]], [[2, 3], [6, 7]]
    assert one == [[*whole[0], [8]], whole[0], [*whole[0], [8]], [*whole[0], [8]]]
    assert two == [[*whole[1], [9]], whole[1], [*whole[1], [9]], [*whole[1], [9]]]


def test_accelerates_semantics_repeat_samples_and_cut_them(launch: Launcher) -> None:
    def check(rank: int) -> list[list[int]]:
        accelerator = Accelerator(cpu=True, semantics="accelerate")
        data = TensorDataset(torch.arange(11))
        plain, shuffled = accelerator.prepare(DataLoader(data, 4), DataLoader(data, 4, shuffle=True))
        assert (plain.total_batch_size, plain.remainder, plain.total_dataset_length) == (8, 3, 11)
        seen, gathered, names = [], [], []
        for (batch,) in plain:
            seen.append(batch.tolist())
            gathered += accelerator.gather_for_metrics(batch).tolist()
            names += accelerator.gather_for_metrics([f"{n}" for n in batch.tolist()])
            assert accelerator.gradient_state.end_of_dataloader == plain.is_last
        assert gathered == list(range(11))
        assert names == [f"{n}" for n in range(11)]
        orders = []
        for _ in range(2):
            orders.append(accelerator.gather(torch.cat([batch for (batch,) in shuffled])).tolist())
            assert len(orders[-1]) == 16
            assert set(orders[-1]) == set(range(11))
        assert orders[0] != orders[1]
        return seen

    one, two = launch(check, device="cpu")
    assert (one, two) == ([[0, 1, 2, 3], [8, 9, 10, 0]], [[4, 5, 6, 7], [1, 2, 3, 4]])


class Noisy(Dataset[torch.Tensor]):
    """Adds noise from torch's and Python's global generators to each sample."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(1) / 4 + random.random() / 4


@pytest.mark.parametrize("is_seedable", [False, True])
def test_accelerates_order_resumes_within_an_epoch(launch: Launcher, tmp_path: Path, is_seedable: bool) -> None:
    def train(place: tuple[int, int] | None, folder: Path, workers: int) -> list[list[float]]:
        accelerator = Accelerator(
            cpu=True,
            semantics="accelerate",
            dataloader_config={"use_seedable_sampler": is_seedable, "use_stateful_dataloader": True},
        )
        torch.manual_seed(4 if place else 5)
        loader = accelerator.prepare(DataLoader(Noisy(), 3, shuffle=True, num_workers=workers))
        if place is None:
            accelerator.load_state(folder)
        seen = []
        for epoch in range(loader.epoch, 3):
            for number, batch in enumerate(loader):
                seen.append([*batch.flatten().tolist(), torch.rand(1).item()])
                if (epoch, number) == place:
                    accelerator.save_state(folder)
                    seen.clear()
        return seen

    def check() -> list[list[list[float]]]:
        cases = [((1, 1), 0), ((0, 0), 0), ((1, 3), 0), ((1, 1), 1)]
        folders = [tmp_path / f"{number}" for number in range(len(cases))]
        pairs = [
            (train(place, folder, workers), train(None, folder, workers))
            for folder, (place, workers) in zip(folders, cases, strict=True)
        ]
        assert [whole == resumed for whole, resumed in pairs] == [True] * 4
        return [whole for whole, _ in pairs]

    for one, two in zip(*launch(check, device="cpu"), strict=True):
        assert len(one) > 3
        assert one != two


def test_a_state_of_other_semantics_is_refused(tmp_path: Path) -> None:
    def prepared(**options: Any) -> tuple[Accelerator, Any]:
        accelerator = Accelerator(seed=1, **options)
        return accelerator, accelerator.prepare(DataLoader(TensorDataset(torch.arange(8.0)), 2, shuffle=True))

    for wrote, reads in (("accelerate", "exact"), ("exact", "accelerate")):
        accelerator, loader = prepared(semantics=wrote)
        for _ in loader:
            accelerator.save_state(tmp_path / wrote)
        accelerator, loader = prepared(semantics=reads)
        with pytest.raises(
            ArgumentError,
            match=rf'saved with semantics="{wrote}", and this Accelerator has semantics="{reads}".*'
            rf'Use Accelerator\(semantics="{wrote}"\), or load only the weights, by torch.load from model.pt',
        ):
            accelerator.load_state(tmp_path / wrote)
        assert len(list(loader)) == 4
    accelerator, loader = prepared()  # the default is exact
    accelerator.load_state(tmp_path / "exact")
    assert loader.epoch == 1


def test_continued_passes_warn_once_in_a_loop_of_accelerate(tmp_path: Path) -> None:
    def said(loads: int = 2, **options: Any) -> list[str]:
        accelerator = Accelerator(**options)
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(8.0)), 2))
        accelerator.save_state(tmp_path / "state")
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(loads):
                accelerator.load_state(tmp_path / "state")
        assert len(loader) == 4
        return [str(each.message) for each in found]

    errors._said.clear()
    stateful = {"use_stateful_dataloader": True}
    for options in ({}, {"semantics": "exact"}, {"semantics": "accelerate"}, {"dataloader_config": stateful}):
        errors._said.add("order of samples")  # another difference
        assert said(**options) == []
    (text,) = said(cpu=True)
    assert text.startswith("load_state: prepared loaders continue after the last batch of the saved state")


def test_accelerates_semantics_begin_passes_again(tmp_path: Path) -> None:
    """accelerate's states hold nothing of loaders, except stateful ones."""
    for is_stateful, left in ((False, 4), (True, 3)):
        options = {"semantics": "accelerate", "dataloader_config": {"use_stateful_dataloader": is_stateful}}
        for loads in (False, True):
            accelerator = Accelerator(cpu=True, **options)  # type: ignore[arg-type]  # both kinds of values
            loader: Any = accelerator.prepare(DataLoader(TensorDataset(torch.arange(8.0)), 2, shuffle=True))
            if loads:
                accelerator.load_state(tmp_path / "state")
                assert len(list(loader)) == left
            else:
                for (batch,) in loader:
                    accelerator.backward(batch.requires_grad_().sum())
                    break
                accelerator.save_state(tmp_path / "state")


def test_generators_begin_passes_alike_on_request(launch: Launcher) -> None:
    def check(rank: int) -> list[float]:
        drawn = []
        for semantics in ("exact", "accelerate"):
            accelerator = Accelerator(cpu=True, rng_types=["torch", "generator"], semantics=semantics)
            loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(8)), 2))
            torch.manual_seed(rank)
            for number, _ in enumerate(loader):
                if number == 0:
                    drawn.append(torch.rand(1).item())
        return drawn

    one, two = launch(check, device="cpu")
    assert one == two


def test_loaders_side_by_side_share_generators_once_a_pass(launch: Launcher) -> None:
    def check(rank: int) -> list[float]:
        accelerator = Accelerator(cpu=True, rng_types=["torch"], semantics="exact")
        data = TensorDataset(torch.arange(8))
        first, second = accelerator.prepare(DataLoader(data, 2), DataLoader(data, 2))
        drawn = []
        for _ in zip(first, second, strict=True):
            drawn.append(torch.rand(1).item())
            torch.manual_seed(rank)
        return drawn

    one, two = launch(check, device="cpu")
    assert one[0] == two[0]
    assert one[1] != two[1]


# ------------------------------------------------------------------ gradients
def test_gradients_are_exchanged_where_a_loop_asks(launch: Launcher) -> None:
    def check(rank: int) -> None:
        accelerator = Accelerator(
            cpu=True, gradient_accumulation_plugin={"num_steps": 2, "sync_each_batch": True}, semantics="exact"
        )
        model = accelerator.prepare(nn.Linear(1, 1, bias=False))
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), float(rank))).sum())
        assert model.module.weight.grad.item() == 0.25  # the mean of 0 and 1, half a step: exchanged though unfinished

        model.zero_grad()
        with accelerator.no_sync(model):
            loss = model(torch.full((1, 1), float(rank))).sum()
        with accelerator.trigger_sync_in_backward(model):
            loss.backward()
        assert model.module.weight.grad.item() == 0.5

        model.zero_grad()
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for _ in range(1 + rank):
                model(torch.ones(1, 1)).sum().backward()
        evaluated = accelerator.prepare_model(nn.Linear(1, 1), evaluation_mode=True)
        assert not isinstance(evaluated, DistributedDataParallel)

        hooked = Accelerator(cpu=True, ddp_kwargs={"comm_hook": "bf16"}, semantics="exact").prepare(
            nn.Linear(1, 1, bias=False)
        )
        hooked(torch.full((1, 1), 1.0 + 2**-12)).sum().backward()
        assert hooked.module.weight.grad.item() == 1.0  # rounded to bfloat16 on the way
        with pytest.raises(ArgumentError, match="comm_hook='fp8': must be one of 'no', 'fp16'"):
            Accelerator(cpu=True, ddp_kwargs={"comm_hook": "fp8"}).prepare(nn.Linear(1, 1))

    launch(check, device="cpu")


# ------------------------------------------------------------------ trackers and logs
class Lines:
    name, main_process_only = "lines", False

    def __init__(self, path: Path) -> None:
        self.path = path

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        with open(self.path, "a") as file:
            file.write(f"{values['loss']}\n")

    def finish(self) -> None:
        pass


def test_trackers_run_on_the_main_process_unless_they_say(launch: Launcher, tmp_path: Path) -> None:
    def check(rank: int) -> list[str]:
        accelerator = Accelerator(
            cpu=True, log_with=["tensorboard", Lines(tmp_path / f"{rank}")], project_dir=tmp_path / "logs"
        )
        accelerator.init_trackers("run")
        accelerator.log({"loss": rank + 0.5, "text": "x"}, step=1)
        if rank == 1:
            ignored = accelerator.get_tracker("tensorboard").tracker
            ignored.add_anything("has no effect on ranks without one").then_more()
            ignored.summary["best"] = 1
        names = [tracker.name for tracker in accelerator.trackers]
        accelerator.end_training()
        get_logger("tests.moved").warning("once")
        get_logger("tests.moved").warning("twice", in_order=True)
        assert accelerator.gather(torch.tensor([rank])).tolist() == [0, 1]  # the launch's group stays
        return names

    result = launch(check, device="cpu")
    assert list(result) == [["tensorboard", "lines"], ["lines"]]
    assert [(tmp_path / f"{rank}").read_text() for rank in range(2)] == ["0.5\n", "1.5\n"]
    assert len(list((tmp_path / "logs" / "run").glob("events.*"))) == 1
    reports = sorted(result.metrics, key=lambda report: report.rank)
    assert [(report.step, dict(report.values)) for report in reports] == [(1, {"loss": 0.5}), (1, {"loss": 1.5})]


def test_a_group_that_was_made_here_ends_with_training(launch: Launcher) -> None:
    def check(rank: int) -> tuple[float, bool]:
        torch.distributed.destroy_process_group()
        handler = SimpleNamespace(backend="nccl", init_method=None, timeout=timedelta(seconds=77))
        accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
        accelerator.wait_for_everyone()
        group: Any = torch.distributed.group.WORLD
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        accelerator.end_training()
        return timeout.total_seconds(), torch.distributed.is_initialized()

    assert list(launch(check, device="cpu")) == [(77.0, False)] * 2


# ------------------------------------------------------------------ batch sizes
def test_ranks_agree_on_a_batch_size(launch: Launcher) -> None:
    def check(rank: int) -> list[Any]:
        tried: list[int] = []

        @find_executable_batch_size(starting_batch_size=16, reduce_batch_size_fn=lambda: tried[-1] // 2)
        def train(batch_size: int) -> int:
            tried.append(batch_size)
            if batch_size > (8 if rank == 0 else 4):  # memory differs
                raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB.")
            return batch_size

        return [train(), train(), tried]

    assert list(launch(check, device="cpu")) == [[4, 4, [16, 8, 4, 4]]] * 2


def test_a_new_group_counts_its_own_tries(launch: Launcher, tmp_path: Path) -> None:
    def check(rank: int) -> int:
        timeouts.BATCH_SIZE_TRAINING_S = 20.0
        train = find_executable_batch_size(lambda size: size, 16)
        torch.distributed.destroy_process_group()
        if rank < 2:  # as in a session: these two have tried before, and their new peer has not
            torch.distributed.init_process_group("gloo", f"file://{tmp_path}/two", rank=rank, world_size=2)
            train()
            torch.distributed.destroy_process_group()
        torch.distributed.init_process_group("gloo", f"file://{tmp_path}/three", rank=rank, world_size=WORLD)
        return train()

    assert list(launch(check, num_processes=WORLD, device="cpu")) == [16] * WORLD


def test_a_rank_in_the_way_of_the_others_raises(launch: Launcher) -> None:
    def check(rank: int) -> int:
        timeouts.BATCH_SIZE_PEERS_S = 0.2

        @find_executable_batch_size(starting_batch_size=16)
        def train(batch_size: int) -> int:
            if rank == 0:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB.")
            torch.distributed.all_reduce(torch.ones(1))  # waits for rank 0, as DDP would
            return batch_size

        return train()

    with pytest.raises(RuntimeError, match="memory ran out on rank 0 and not on every other one within 0 s"):
        launch(check, device="cpu")
