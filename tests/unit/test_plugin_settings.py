"""accelerate's objects as the Accelerator reads them: by their attributes, as here by stand-ins."""

from __future__ import annotations

import pickle
from datetime import timedelta
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nblaunch.errors import AbsentNameError, ArgumentError
from nblaunch.training import Accelerator, DistributedType
from nblaunch.training.accelerator.plugin_settings import read_handlers


class Hook(Enum):
    FP16 = "fp16"
    NO = "no"


DDP = SimpleNamespace(
    find_unused_parameters=True, bucket_cap_mb=25, broadcast_buffers=True, comm_hook=Hook.FP16, comm_wrapper=Hook.NO
)
SCALER = SimpleNamespace(init_scale=8.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=3, enabled=True)
GROUP = SimpleNamespace(backend="nccl", init_method=None, timeout=timedelta(seconds=7))
AUTOCAST = SimpleNamespace(enabled=False, cache_enabled=None)


class OtherKwargs:
    pass


# ------------------------------------------------------------------ handlers
def test_handlers_are_told_apart_by_their_attributes() -> None:
    handlers = read_handlers([GROUP, AUTOCAST, SCALER, DDP])
    assert handlers.ddp == {"find_unused_parameters": True, "comm_hook": "fp16"}
    assert handlers.scaler == vars(SCALER)
    assert handlers.group == {"timeout": timedelta(seconds=7)}  # nccl is its default, on the CPU too
    assert handlers.autocast == {"enabled": False, "cache_enabled": None}


def test_a_handlers_values_arrive_where_they_count() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[SCALER, AUTOCAST, DDP])
    accelerator = pickle.loads(pickle.dumps(accelerator))
    assert accelerator.ddp_kwargs == {"find_unused_parameters": True, "comm_hook": "fp16"}
    assert accelerator.scaler is not None
    assert (accelerator.scaler.get_scale(), accelerator.scaler.get_growth_interval()) == (8.0, 3)
    with accelerator.autocast():
        assert not torch.is_autocast_enabled("cpu")
    with accelerator.autocast(SimpleNamespace(enabled=True, cache_enabled=None)):
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("handlers", "message"),
    [
        ([OtherKwargs()], "kwargs_handlers: OtherKwargs is not supported: give DistributedDataParallelKwargs"),
        ([AUTOCAST, AUTOCAST], "two handlers are like SimpleNamespace"),
    ],
)
def test_a_handler_that_cannot_be_used_is_named(handlers: list[Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Accelerator(kwargs_handlers=handlers)


def test_a_profile_has_the_settings_of_its_handler(tmp_path: Any) -> None:
    handler = SimpleNamespace(
        activities=["cpu"], record_shapes=True, profile_memory=False, with_flops=False, output_trace_dir=tmp_path / "on"
    )
    with Accelerator(cpu=True, kwargs_handlers=[handler]).profile() as profiler:
        torch.ones(3, 4) @ torch.ones(4, 5)
    shapes = [event.input_shapes for event in profiler.key_averages(group_by_input_shape=True)]
    assert [[3, 4], [4, 5]] in shapes
    assert (tmp_path / "on" / "profile_0.json").stat().st_size > 0
    with Accelerator().profile({"activities": ["cpu"]}) as profiler:
        torch.ones(2) + 1
    assert all(not event.input_shapes for event in profiler.key_averages())


# ------------------------------------------------------------------ loaders and accumulation
def test_loader_settings_come_as_an_object_or_a_mapping() -> None:
    given = SimpleNamespace(split_batches=True, dispatch_batches=None, even_batches=False, data_seed=3)
    for settings in (given, vars(given)):
        accelerator = Accelerator(dataloader_config=settings)
        assert (accelerator.split_batches, accelerator.even_batches, accelerator.dispatch_batches) == (
            True,
            False,
            None,
        )
        accelerator.even_batches = True
        assert accelerator.even_batches
    with pytest.raises(ArgumentError, match="dataloader_config: unknown batch: the keys are data_seed, dispatch"):
        Accelerator(dataloader_config={"batch": 1})
    with pytest.raises(ArgumentError, match="dataloader_config=3: must have the attributes of LoaderSettings"):
        Accelerator(dataloader_config=3)


def test_accumulation_settings_come_from_the_plugin() -> None:
    plugin = SimpleNamespace(num_steps=3, sync_with_dataloader=False)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin, semantics="exact")
    assert accelerator.gradient_accumulation_steps == 3
    with pytest.raises(ArgumentError, match="gradient_accumulation_steps=2 beside gradient_accumulation_plugin"):
        Accelerator(gradient_accumulation_steps=2, gradient_accumulation_plugin=plugin)
    with pytest.raises(ArgumentError, match="num_steps=0: must be a whole number"):
        Accelerator(gradient_accumulation_plugin={"num_steps": 0})

    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(4.0)), 1))
    synced = []
    for _ in range(3):
        for _batch in loader:
            with accelerator.accumulate():
                synced.append(accelerator.sync_gradients)
    assert synced == [False, False, True] * 4  # the ends of passes end no step


def test_accumulation_can_be_set_before_prepare_only() -> None:
    accelerator = Accelerator(compute_setup="cpu")
    accelerator.gradient_accumulation_steps = 2
    model = nn.Linear(1, 1)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    with accelerator.accumulate():
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.weight.grad is not None
    assert not optimizer.step_was_skipped

    accelerator = Accelerator(compute_setup="cpu")
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    assert not optimizer.step_was_skipped
    with pytest.raises(ArgumentError, match="gradient_accumulation_steps=4: an optimizer was prepared"):
        accelerator.gradient_accumulation_steps = 4
    accelerator.free_memory()
    accelerator.gradient_accumulation_steps = 4
    assert accelerator.gradient_accumulation_steps == accelerator.gradient_state.num_steps == 4


def test_a_difference_warns_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nblaunch.errors._said", set())
    loader = DataLoader(TensorDataset(torch.arange(4.0)), 1)
    with pytest.warns(UserWarning, match="prepared loaders draw the order of samples from their seed"):
        Accelerator(cpu=True, gradient_accumulation_steps=2).prepare(loader)
    Accelerator(cpu=True, gradient_accumulation_steps=2).prepare(loader)  # another line, as in another cell


def test_a_loop_of_accelerate_may_accumulate_after_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nblaunch.errors._said", set())
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer, loader = accelerator.prepare(
        torch.optim.SGD(model.parameters(), lr=1.0), DataLoader(TensorDataset(torch.arange(5.0)), 1)
    )
    accelerator.gradient_accumulation_steps = 2
    before, stepped = model.weight.clone(), []

    def train() -> None:
        for _batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
                optimizer.zero_grad()
                stepped.append(accelerator.sync_gradients)

    with pytest.warns(UserWarning, match="the last optimizer step of this pass has 1 of 2 batches"):
        train()
    train()  # a second warning would be an error
    assert stepped == [False, True, False, True, True] * 2
    assert torch.allclose(before - model.weight, torch.tensor(6.0))


# ------------------------------------------------------------------ what is not there
def test_what_only_accelerate_has_says_what_to_use() -> None:
    accelerator = Accelerator()
    with pytest.raises(AbsentNameError, match="has no fp8_backend: use mixed_precision="):
        _ = accelerator.fp8_backend  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match=r"torch_tp_plugin=OtherKwargs\(...\): .* use parallelism=Parallelism"):
        Accelerator(torch_tp_plugin=OtherKwargs())
    with pytest.raises(ArgumentError, match=r"dynamo_backend='inductor': .* use torch.compile"):
        Accelerator(dynamo_backend="inductor")
    Accelerator(deepspeed_plugin=None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'gpus'"):
        Accelerator(gpus=2)


def test_other_unknown_names_are_plain_attribute_errors() -> None:
    accelerator = Accelerator()
    assert not hasattr(accelerator, "fp8_backend")
    assert not hasattr(accelerator, "no_such_name")
    with pytest.raises(AttributeError, match="'Accelerator' object has no attribute 'no_such_name'") as caught:
        _ = accelerator.no_such_name  # type: ignore[attr-defined]
    assert not isinstance(caught.value, AbsentNameError)
    assert caught.value.name == "no_such_name"


def test_an_accelerator_with_every_setting_travels() -> None:
    accelerator = Accelerator(
        cpu=True, dataloader_config={"split_batches": True}, gradient_accumulation_plugin={"num_steps": 2},
        rng_types=["torch"], semantics="accelerate", log_with=[], project_dir="somewhere",
    )  # fmt: skip
    accelerator.set_trigger()
    copied = pickle.loads(pickle.dumps(accelerator))
    assert (copied.split_batches, copied.gradient_accumulation_steps, copied.rng_types) == (True, 2, ["torch"])
    assert (copied.semantics, copied.project_dir, str(copied.device)) == ("accelerate", "somewhere", "cpu")
    assert not copied.check_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"semantics": "ours"}, "semantics='ours': must be one of 'exact', 'accelerate'"),
        ({"kwargs_handlers": 3}, "kwargs_handlers=3: must be a list of handlers"),
        ({"project_config": 3}, "project_config=3: must have the attributes of accelerate's ProjectConfiguration"),
        ({"rng_types": "xla"}, "rng_types='xla': must be one of 'generator', 'torch', 'cuda'"),
        ({"rng_types": ["xla"]}, "rng_types='xla': must be one of 'generator', 'torch', 'cuda'"),
        ({"cpu": True, "compute_setup": "gpu"}, 'cpu=True contradicts compute_setup="gpu"'),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Accelerator(**given)


# ------------------------------------------------------------------ position
def test_a_single_process_is_described_under_accelerates_names() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert accelerator.distributed_type == DistributedType.NO == "NO"
    assert str(accelerator.distributed_type) == "NO"
    state = accelerator.state
    assert (state.num_processes, state.process_index, state.mixed_precision) == (1, 0, "bf16")
    assert [state.is_main_process, state.is_local_main_process, state.is_last_process] == [True] * 3
    assert not state.use_distributed
    assert state.deepspeed_plugin is accelerator.deepspeed_plugin is None
    assert not accelerator.multi_device
    assert not accelerator.is_fsdp2
    assert accelerator.should_save_model


def test_decorators_run_the_function_where_it_belongs() -> None:
    accelerator = Accelerator(cpu=True)

    @accelerator.on_main_process
    def main(value: int) -> int:
        """Say."""
        return value

    @accelerator.on_process(process_index=5)
    def fifth(value: int) -> int:
        return value

    assert (main(1), fifth(value=2), main.__name__, main.__doc__) == (1, 2, "main", "Say.")
    assert accelerator.on_local_process(abs, local_process_index=3)(-3) == 3
    assert accelerator.on_last_process(abs)(-4) == accelerator.on_local_main_process()(abs)(-4) == 4
    with pytest.raises(ArgumentError, match="process_index=None: must be a whole number"):
        accelerator.on_process(abs)


def test_alone_nothing_is_split_or_padded() -> None:
    accelerator = Accelerator(cpu=True)
    given = ["a", "b"]
    with accelerator.split_between_processes(given, apply_padding=True) as part:
        assert part is given
    tensor = torch.ones(2)
    assert accelerator.pad_across_processes(tensor) is tensor
    with pytest.raises(ArgumentError, match="value is a str: make it a tensor"):
        accelerator.pad_across_processes("text")
    model = nn.Linear(1, 1)
    with accelerator.join_uneven_inputs([model], even_batches=False), accelerator.trigger_sync_in_backward(model):
        assert not accelerator.verify_device_map(model)
    model.hf_device_map = {"a": 0, "b": 1}  # type: ignore[assignment]
    assert accelerator.verify_device_map(model)


def test_freed_memory_is_returned_as_nones() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    assert accelerator.free_memory(model, "data") == [None, None]
    assert accelerator.clear() == []


def test_modules_can_stay_where_they_are() -> None:
    accelerator = Accelerator(compute_setup="cpu", device_placement=False)
    module = nn.Linear(1, 1, device="meta")
    assert next(accelerator.prepare(module).parameters()).is_meta
    accelerator = Accelerator(compute_setup="cpu")
    kept, other = accelerator.prepare(module, nn.Linear(1, 1), device_placement=[False, None])
    assert next(kept.parameters()).is_meta
    assert accelerator.prepare_model(module, device_placement=False) is module
    with pytest.raises(ArgumentError, match="device_placement has 1 values: give one for each of 2 objects"):
        accelerator.prepare(kept, other, device_placement=[True])
