"""Loops written for accelerate: with our Accelerator they have its names, and with its semantics its very numbers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, TensorDataset

from nblaunch import Accelerator
from nblaunch.errors import ArgumentError
from nblaunch.training import DistributedType
from nblaunch.training.accelerator.absent_names import ABSENT_ARGUMENTS, ABSENT_NAMES
from nblaunch.training.accelerator.plugin_settings import LoaderSettings
from nblaunch.training.data.repeating_loader import RepeatingLoader
from tests.processes.conftest import Launcher


# ------------------------------------------------------------------ names
def test_each_of_accelerates_names_exists_or_has_advice() -> None:
    import accelerate

    ours, theirs = Accelerator(), {name for name in dir(accelerate.Accelerator(cpu=True)) if not name.startswith("_")}
    assert len(theirs) > 100
    have = {name for name in theirs if hasattr(ours, name)}
    assert theirs - have - ABSENT_NAMES.keys() == set()
    assert have.isdisjoint(ABSENT_NAMES)
    assert ABSENT_NAMES.keys() <= theirs


def test_each_of_accelerates_arguments_exists_or_has_advice() -> None:
    import accelerate

    ours = inspect.signature(Accelerator).parameters.keys()
    theirs = inspect.signature(accelerate.Accelerator).parameters.keys()
    assert len(theirs) > 15
    assert theirs - ours == ABSENT_ARGUMENTS.keys()
    for kind, name in ((LoaderSettings, "DataLoaderConfiguration"),):
        assert (
            inspect.signature(getattr(accelerate, name)).parameters.keys() <= inspect.signature(kind).parameters.keys()
        )


def test_distributed_types_equal_accelerates() -> None:
    from accelerate import DistributedType as Theirs

    for member in Theirs:
        assert DistributedType[member.name] == member
        assert str(DistributedType[member.name]) == member.value


# ------------------------------------------------------------------ the division of data
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_repeated_samples_are_accelerates(monkeypatch: pytest.MonkeyPatch, split: bool, drop_last: bool) -> None:
    from accelerate.data_loader import prepare_data_loader
    from accelerate.state import AcceleratorState, PartialState

    from nblaunch.training.data.sharded_loader import divide_batches

    PartialState(cpu=True)
    for variable in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(variable, "0")
    compared = 0
    for ranks in (2, 3):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        for rank in range(ranks):
            monkeypatch.setenv("RANK", str(rank))
            for size in (ranks, 2 * ranks):
                for samples in range(1, 30):
                    data = TensorDataset(torch.arange(samples))
                    loader = DataLoader(data, size, drop_last=drop_last)
                    theirs = prepare_data_loader(
                        loader, num_processes=ranks, process_index=rank, split_batches=split, put_on_device=False
                    )
                    own = divide_batches(loader, ranks) if split else loader
                    ours: Any = RepeatingLoader(own, LoaderSettings(), ("generator",))
                    expected = [batch[0].tolist() for batch in theirs]
                    assert [batch[0].tolist() for batch in ours] == expected
                    assert len(ours) == len(expected)
                    assert ours.total_batch_size == theirs.total_batch_size
                    compared += bool(expected)
    assert compared > 100
    AcceleratorState._reset_state()
    PartialState._reset_state()


# ------------------------------------------------------------------ saved states
def test_a_state_that_accelerate_saved_is_recognised(tmp_path: Path) -> None:
    import accelerate
    from accelerate.state import AcceleratorState, GradientState, PartialState

    theirs = accelerate.Accelerator(cpu=True)
    model = nn.Linear(3, 2)
    theirs.prepare(model, torch.optim.Adam(model.parameters()), DataLoader(data_of(4)))
    for safe, file in ((True, "model.safetensors"), (False, "pytorch_model.bin")):
        folder = tmp_path / file
        theirs.save_state(str(folder), safe_serialization=safe)
        ours = Accelerator(compute_setup="cpu")
        own = ours.prepare(nn.Linear(3, 2))
        files = ", ".join(sorted([file, "optimizer.bin", "random_states_0.pkl"]))
        with pytest.raises(ArgumentError, match=rf"accelerate's save_state wrote it \({files}\)") as caught:
            ours.load_state(folder)
        advice = re.search(r"before prepare, by (.*), or continue with accelerate's own", str(caught.value))
        assert advice is not None
        exec(f"import safetensors.torch, torch; {advice[1]}", {"model": own})
        assert torch.equal(own.weight, model.weight)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


# ------------------------------------------------------------------ loops
class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
        self.unused = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Noisy(Dataset):
    """Adds noise from torch's global generator to each sample."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x + torch.rand(3) / 10, y


def data_of(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 3, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def trained(accelerator: Any, loader: DataLoader, schedule_of: Any = None, **options: Any) -> dict[str, Any]:
    """Three epochs; the losses, learning rates, results of evaluation, and weights of this rank."""
    torch.manual_seed(0)
    model = Net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = (schedule_of or (lambda own: LambdaLR(own, lambda step: 0.9**step)))(optimizer)
    model, optimizer, loader, valid, schedule = accelerator.prepare(
        model, optimizer, loader, DataLoader(data_of(13), 4), schedule
    )
    accelerator.gradient_accumulation_steps = options.get("steps", accelerator.gradient_accumulation_steps)
    found: dict[str, Any] = {"losses": [], "rates": [], "results": []}
    for _ in range(3):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            found["losses"].append(loss.item())
            found["rates"].append(schedule.get_last_lr()[0])
        model.eval()
        for x, y in valid:
            with torch.no_grad():
                output = model(x)
            predicted, target = accelerator.gather_for_metrics((output.argmax(1), y))
            repeated = accelerator.gather_for_metrics(functional.cross_entropy(output, y).repeat(4))
            found["results"].append((predicted.tolist(), target.tolist(), repeated.shape))
    own = accelerator.unwrap_model(model)
    found["weights"] = torch.cat([p.detach().flatten() for p in own.parameters()]).tolist()
    accelerator.end_training()
    return found


def handlers() -> list[Any]:
    from accelerate.utils import AutocastKwargs, DDPCommunicationHookType, DistributedDataParallelKwargs

    hook: Any = DDPCommunicationHookType.FP16
    return [DistributedDataParallelKwargs(find_unused_parameters=True, comm_hook=hook), AutocastKwargs()]


def unused() -> list[Any]:
    from accelerate.utils import DistributedDataParallelKwargs

    return [DistributedDataParallelKwargs(find_unused_parameters=True)]


def plain(kind: Callable[..., Any]) -> dict[str, Any]:
    return trained(kind(cpu=True, kwargs_handlers=unused()), DataLoader(data_of(37), 4, shuffle=True))


def accumulating(kind: Callable[..., Any]) -> dict[str, Any]:
    accelerator = kind(cpu=True, gradient_accumulation_steps=3, kwargs_handlers=unused())
    return trained(
        accelerator, DataLoader(data_of(50), 4, shuffle=True), lambda own: OneCycleLR(own, 0.1, total_steps=30)
    )


def late(kind: Callable[..., Any]) -> dict[str, Any]:
    """Accumulation that begins after prepare, and does not end with the loader."""
    from accelerate.utils import GradientAccumulationPlugin

    plugin = GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False, sync_each_batch=True)
    accelerator = kind(cpu=True, gradient_accumulation_plugin=plugin, kwargs_handlers=unused())
    return trained(accelerator, DataLoader(data_of(40), 4, shuffle=True), steps=2)


def split(kind: Callable[..., Any]) -> dict[str, Any]:
    from accelerate import DataLoaderConfiguration

    accelerator = kind(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=5),
        kwargs_handlers=unused(),
    )
    return trained(accelerator, DataLoader(data_of(37), 8, shuffle=True, drop_last=True))


def mixed(kind: Callable[..., Any]) -> dict[str, Any]:
    accelerator = kind(
        cpu=True, mixed_precision="bf16", kwargs_handlers=handlers(), step_scheduler_with_optimizer=False
    )
    sampler = BatchSampler(SequentialSampler(range(30)), 4, drop_last=False)
    return trained(accelerator, DataLoader(data_of(30), batch_sampler=sampler))


def augmented(kind: Callable[..., Any]) -> dict[str, Any]:
    accelerator = kind(cpu=True, rng_types=["torch", "generator"], kwargs_handlers=unused())
    return trained(accelerator, DataLoader(Noisy(data_of(30)), 4, shuffle=True))


def resumed(kind: Callable[..., Any], num_workers: int = 0, **config: Any) -> dict[str, Any]:
    """A script that saves within its second epoch, and its second start, which loads the state and skips batches."""
    import tempfile

    from accelerate import DataLoaderConfiguration

    def script(save: str = "", load: str = "") -> dict[str, Any]:
        torch.manual_seed(2)
        accelerator = kind(cpu=True, dataloader_config=DataLoaderConfiguration(**config), kwargs_handlers=unused())
        model = Net()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule: Any = LambdaLR(optimizer, lambda step: 0.9**step)
        model, optimizer, schedule, loader = accelerator.prepare(
            model, optimizer, schedule, DataLoader(Noisy(data_of(37)), 4, shuffle=True, num_workers=num_workers)
        )
        found: dict[str, Any] = {"losses": [], "rates": [], "results": []}
        if load:
            accelerator.load_state(load)
        for epoch in range(1 if load else 0, 3):
            if config:
                loader.set_epoch(epoch)
            skipped = 2 if load and epoch == 1 else 0
            for number, (x, y) in enumerate(accelerator.skip_first_batches(loader, skipped) if skipped else loader):
                loss = functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                found["losses"].append(loss.item())
                found["rates"].append(schedule.get_last_lr()[0])
                if save and (epoch, number) == (1, 1):
                    accelerator.save_state(save)
        parameters = accelerator.unwrap_model(model).parameters()
        return found | {"weights": torch.cat([p.detach().flatten() for p in parameters]).tolist()}

    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        if dist.is_initialized():
            dist.broadcast_object_list(shared, 0)
        script(save=f"{shared[0]}/state")
        found = script(load=f"{shared[0]}/state")
        if dist.is_initialized():
            dist.barrier()
        return found


def resumed_seedable(kind: Callable[..., Any]) -> dict[str, Any]:
    """With epochs that the script sets: accelerate's pass after a skipped one has the same order again."""
    return resumed(kind, use_seedable_sampler=True)


def resumed_by_workers(kind: Callable[..., Any]) -> dict[str, Any]:
    return resumed(kind, num_workers=1)


def begun_again(kind: Callable[..., Any], **config: Any) -> dict[str, Any]:
    """A pass that is left, and another one from the same batch on: its order is new, also after `load_state`."""
    import tempfile

    from accelerate import DataLoaderConfiguration

    torch.manual_seed(2)
    accelerator = kind(cpu=True, dataloader_config=DataLoaderConfiguration(**config), kwargs_handlers=unused())
    given = torch.Generator().manual_seed(5) if config else None
    _, loader = accelerator.prepare(Net(), DataLoader(Noisy(data_of(37)), 4, shuffle=True, generator=given))
    rows = [x.tolist() for x, _ in islice(loader, 2)]
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        if dist.is_initialized():
            dist.broadcast_object_list(folder, 0)
        accelerator.save_state(f"{folder[0]}/state")
        accelerator.wait_for_everyone()
        accelerator.load_state(f"{folder[0]}/state")
        accelerator.wait_for_everyone()
    for epoch in range(2):
        if config:
            loader.set_epoch(epoch)
        rows += [x.tolist() for x, _ in accelerator.skip_first_batches(loader, 2)]
    return {"rows": rows}


def begun_again_by_seed(kind: Callable[..., Any]) -> dict[str, Any]:
    """With a seedable sampler, and a generator from which torch's loader draws too."""
    return begun_again(kind, use_seedable_sampler=True)


def both(loop: Callable[..., Any], semantics: str | None) -> tuple[Any, Any]:
    import accelerate
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def ours(**options: Any) -> Any:
        return Accelerator(semantics=semantics, **options)

    mine = loop(ours)
    theirs = loop(accelerate.Accelerator)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return mine, theirs


def check_same(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert len(mine["losses"]) > 5
    assert mine["losses"] == pytest.approx(theirs["losses"], abs=1e-6)
    assert mine["weights"] == pytest.approx(theirs["weights"], abs=1e-6)
    assert mine["rates"] == theirs["rates"]
    assert mine["results"] == theirs["results"]
    assert len(set(mine["losses"])) > 5


@pytest.mark.parametrize("loop", [begun_again, begun_again_by_seed])
def test_a_pass_begun_again_has_accelerates_order(launch: Launcher, loop: Callable[..., Any]) -> None:
    for mine, theirs in [both(loop, "accelerate"), *launch(both, (loop, "accelerate"))]:
        assert mine == theirs


LOOPS = [plain, accumulating, late, split, mixed, augmented, resumed, resumed_seedable]


@pytest.mark.parametrize("loop", LOOPS)
def test_on_two_ranks_a_loop_ends_as_accelerates(launch: Launcher, loop: Callable[..., Any]) -> None:
    for mine, theirs in launch(both, (loop, "accelerate")):
        check_same(mine, theirs)


@pytest.mark.parametrize("loop", [*LOOPS, resumed_by_workers])
def test_alone_a_loop_ends_as_accelerates(loop: Callable[..., Any]) -> None:
    check_same(*both(loop, "accelerate"))


def test_differences_warn_once_in_a_loop_of_accelerate(launch: Launcher) -> None:
    def said(semantics: str | None, options: dict[str, Any]) -> list[str]:
        import warnings

        from nblaunch import errors

        errors._said.clear()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("default")
            accelerator = Accelerator(semantics=semantics, gradient_accumulation_steps=2, **options)
            model = nn.Linear(1, 1)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
            schedule: Any = LambdaLR(optimizer, lambda step: 1.0)
            loader = DataLoader(TensorDataset(torch.ones(6, 1)), 1)
            model, optimizer, schedule, loader, _ = accelerator.prepare(model, optimizer, schedule, loader, loader)
            for _ in range(2):
                for (x,) in loader:
                    with accelerator.accumulate(model):
                        accelerator.backward(model(x).sum())
                        optimizer.step()
                        schedule.step()
        return [str(each.message) for each in found]

    def check() -> dict[str, list[str]]:
        cases = {"none": (None, {}), "cpu": (None, {"cpu": True}), "exact": ("exact", {"cpu": True})}
        return {name: said(*case) for name, case in cases.items()} | {"accelerate": said("accelerate", {"cpu": True})}

    first, second = launch(check)
    assert first["exact"] == first["accelerate"] == []
    assert ["this schedule takes one step" in text for text in first["none"]] == [True]
    starts = ["this schedule takes one step", "prepared loaders draw the order", "the last optimizer step of this pass"]
    assert [text.startswith(start) for text, start in zip(first["cpu"], starts, strict=True)] == [True] * 3
    assert second["cpu"] == []  # rank 0 speaks for all


def test_a_handler_of_fp8_is_refused() -> None:
    with pytest.raises(ValueError, match="MSAMPRecipeKwargs is not supported"):
        Accelerator(kwargs_handlers=[type("MSAMPRecipeKwargs", (SimpleNamespace,), {})(opt_level="O2")])
