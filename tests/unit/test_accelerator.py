"""The Accelerator in one process: wrappers only where needed, and their steps."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import DataLoader, TensorDataset

from nblaunch.errors import ArgumentError
from nblaunch.training import Prefetcher, shard
from nblaunch.training.accelerator import Accelerator
from nblaunch.training.distribute import _find_trainable
from nblaunch.training.gradients import plain_forward


@pytest.fixture(autouse=True)
def _no_precision_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": self.layer(x)}


def parts(samples: int = 8, batch_size: int = 2) -> tuple[Net, torch.optim.Optimizer, Any, DataLoader]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = TensorDataset(torch.arange(samples * 2.0).reshape(samples, 2) / samples)
    return net, optimizer, StepLR(optimizer, 1, gamma=0.5), DataLoader(data, batch_size)


# ------------------------------------------------------------------ settings
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nprocs": 0}, r"nprocs=0: must be an integer, at least 1"),
        ({"nprocs": True}, r"nprocs=True"),
        ({"compute_setup": "cuda"}, r"compute_setup='cuda': must be one of 'auto', 'cpu', 'gpu'"),
        ({"log_setup": "gpu"}, r"log_setup='gpu': must be one of 'cpu', 'auto'"),
        ({"dtype": torch.int64}, r"dtype=torch.int64: must be a floating-point or complex dtype"),
        ({"dtype": "float32"}, r"dtype='float32'"),
        ({"backend": "glooo"}, r"backend='glooo': must be one of 'gloo', 'nccl'"),
        ({"seed": -1}, r"seed=-1"),
        ({"semantics": "accelerate"}, r"Accelerator\(\) got an unexpected keyword argument 'semantics'"),
        ({"parallelism": 2}, r"parallelism=2: must be a Parallelism"),
        ({"mixed_precision": "fp8"}, r"mixed_precision='fp8': must be"),
        ({"gradient_accumulation_steps": 0}, r"gradient_accumulation_steps=0: must be"),
    ],
)
def test_a_wrong_argument_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Accelerator(**given)


def test_an_explicit_mixed_precision_overrides_the_launchs(monkeypatch: pytest.MonkeyPatch) -> None:
    undecided, decided = Accelerator(), Accelerator(mixed_precision="fp16")
    assert undecided.mixed_precision == "no"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert (undecided.mixed_precision, decided.mixed_precision) == ("bf16", "fp16")


def test_it_travels_as_settings_alone() -> None:
    accelerator = Accelerator(3, "cpu", dtype=torch.float64, gradient_accumulation_steps=2, seed=5)
    accelerator.prepare(*parts())
    with accelerator.accumulate():
        assert not accelerator.sync_gradients
    copied = pickle.loads(pickle.dumps(accelerator))

    assert (copied.nprocs, copied.dtype, copied.gradient_accumulation_steps, copied.seed) == (3, torch.float64, 2, 5)
    assert copied.sync_gradients
    assert not accelerator.sync_gradients


# ------------------------------------------------------------------ prepare
def test_alone_on_the_cpu_all_but_loaders_are_the_very_same() -> None:
    *given, loader = parts()
    *prepared, sharded = Accelerator(compute_setup="cpu").prepare(*given, loader)
    assert all(now is then for now, then in zip(prepared, given, strict=True))
    assert (sharded.batch_size, sharded.dataset, sharded.sampler) == (2, loader.dataset, loader.sampler)
    assert [batch[0].tolist() for batch in sharded] == [batch[0].tolist() for batch in loader]


def test_a_sharded_loader_is_prepared_as_itself() -> None:
    sharded: Any = shard(parts()[3])  # for a loop that sets epochs itself
    assert Accelerator(compute_setup="cpu").prepare(sharded) is sharded
    sharded.set_epoch(4)
    assert [sharded.is_last for _ in sharded] == [False, False, False, True]
    assert sharded.epoch == 5


def test_a_prefetcher_is_not_prepared() -> None:
    with pytest.raises(
        ArgumentError, match=r"a Prefetcher cannot be prepared.*Prefetcher\(accelerator.prepare\(loader\)"
    ):
        Accelerator(compute_setup="cpu").prepare({"data": [Prefetcher(parts()[3], "cpu")]})


def test_one_object_comes_as_itself_and_nests_as_nests() -> None:
    net, optimizer, schedule, loader = parts()
    accelerator = Accelerator(compute_setup="cpu", gradient_accumulation_steps=2)
    assert accelerator.prepare(net) is net
    assert accelerator.prepare() == ()
    assert accelerator.prepare(None, "text", 3) == (None, "text", 3)
    prepared = accelerator.prepare({"both": [schedule, (optimizer, net)], "rest": (loader, "text")})
    assert prepared["both"][1][1] is net
    assert prepared["both"][1][0].inner is optimizer
    assert prepared["both"][0].inner is schedule
    assert isinstance(prepared["rest"][0], DataLoader)
    assert prepared["rest"][1] == "text"


def test_preparing_twice_changes_nothing() -> None:
    accelerator = Accelerator(compute_setup="cpu", gradient_accumulation_steps=2, mixed_precision="bf16")
    once = accelerator.prepare(*parts())
    assert all(now is then for now, then in zip(accelerator.prepare(*once), once, strict=True))


def test_dtype_applies_to_parameters_states_and_batches() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.real = nn.Parameter(torch.ones(2))
            self.complex = nn.Parameter(torch.full((2,), 1 + 2j))
            self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    module = Mixed()
    optimizer = torch.optim.Adam(module.parameters())
    (module.real.sum() + module.complex.abs().sum()).backward()
    optimizer.step()
    real, accelerator = module.real, Accelerator(compute_setup="cpu", dtype=torch.float64)
    optimizer, module = accelerator.prepare(optimizer, module)

    assert module.real is real
    assert (module.real.dtype, module.complex.dtype) == (torch.float64, torch.complex128)
    assert module.complex[0].detach() != 1
    assert module.complex.detach().imag.abs().min() > 1
    assert module.count.dtype == torch.int64
    assert optimizer.state[module.real]["exp_avg"].dtype == torch.float64
    assert optimizer.state[module.complex]["exp_avg"].dtype == torch.complex128
    assert [t.dtype for t in accelerator.prepare_batch([torch.ones(1), torch.tensor(1)])] == [
        torch.float64,
        torch.int64,
    ]


def test_a_schedule_that_was_pickled_steps_without_a_warning() -> None:
    net, optimizer, schedule, _ = parts()
    net, optimizer, schedule = pickle.loads(pickle.dumps((net, optimizer, schedule)))
    net, optimizer, schedule = Accelerator(compute_setup="cpu").prepare(net, optimizer, schedule)
    net(torch.ones(1, 2))["out"].sum().backward()
    optimizer.step()
    schedule.step()  # a warning is an error here
    assert optimizer.param_groups[0]["lr"] == 0.05


# ------------------------------------------------------------------ accumulation
def test_the_last_steps_loss_is_divided_by_the_batches_that_it_has() -> None:
    accelerator = Accelerator(compute_setup="cpu", gradient_accumulation_steps=4)
    for _ in range(2):
        given = parts(10, 1)
        net, loader = accelerator.prepare(given[0], given[3])
        shares = []
        for batch in loader:
            with accelerator.accumulate(net):
                accelerator.backward(net(*batch)["out"].sum())  # the bias has a gradient of 1
            shares.append(net.layer.bias.grad.item())
            net.zero_grad()
        assert shares == [0.25] * 8 + [0.5] * 2
    accelerator.backward(net(*batch)["out"].sum() * 2)
    assert net.layer.bias.grad.item() == 1.0  # as the last one: no new step began


def test_the_last_step_of_an_unsized_stream_has_the_full_divisor() -> None:
    class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Any:
            return iter(torch.ones(3, 2))

    accelerator = Accelerator(compute_setup="cpu", gradient_accumulation_steps=2)
    net, loader = accelerator.prepare(parts()[0], DataLoader(Stream(), 1))
    shares = []
    for x in loader:
        with accelerator.accumulate(net):
            accelerator.backward(net(x)["out"].sum())
        shares.append((net.layer.bias.grad.item(), accelerator.sync_gradients))
        net.zero_grad()
    assert shares == [(0.5, False), (0.5, True), (0.5, True)]


def nested_before(outer: Any, inner: Any) -> Iterator[None]:
    for _ in outer:
        assert len(list(inner)) == 2  # validation, taken to its end
        yield


def nested_within(outer: Any, inner: Any) -> Iterator[None]:
    for _ in outer:
        for _ in inner:
            yield


@pytest.mark.parametrize(
    ("batches", "every", "sizes", "expected"),
    [
        (nested_before, 2, (10, 4), [False, True, False, True, True]),
        (nested_within, 3, (4, 10), [False, False, True, False, True] * 2),
        (partial(zip, strict=False), 3, (12, 8), [False, False, True, True]),  # the shorter one yields last
    ],
)
def test_of_several_loaders_the_latest_ends_steps(
    batches: Any, every: int, sizes: tuple[int, int], expected: list[bool]
) -> None:
    accelerator = Accelerator(compute_setup="cpu", gradient_accumulation_steps=every)
    synced = []
    for _ in batches(*accelerator.prepare(*(parts(size, 2)[3] for size in sizes))):
        with accelerator.accumulate():
            synced.append(accelerator.sync_gradients)
    assert synced == expected


def test_wrapped_objects_follow_the_accelerator_that_prepares_them() -> None:
    earlier = Accelerator(compute_setup="cpu", gradient_accumulation_steps=2)
    net, inner, schedule, _ = parts()
    given = net, *earlier.prepare(inner, schedule)
    net, *given = pickle.loads(pickle.dumps(given))  # as into a rank
    accelerator = Accelerator(compute_setup="cpu", gradient_accumulation_steps=2)
    optimizer, steps = accelerator.prepare(*given)
    assert accelerator.prepare(optimizer, steps) == (optimizer, steps)
    before = net.layer.weight.clone()
    with accelerator.accumulate():
        accelerator.backward(net(torch.ones(1, 2))["out"].sum())
        optimizer.step()
        steps.step()
    assert torch.equal(net.layer.weight, before)
    assert steps.state_dict()["last_epoch"] == 0


def test_gradients_stay_and_are_not_clipped_in_between() -> None:
    accelerator = Accelerator(compute_setup="cpu", gradient_accumulation_steps=2)
    net, optimizer = accelerator.prepare(*parts()[:2])
    with accelerator.accumulate(net):
        accelerator.backward(net(torch.ones(1, 2))["out"].sum())
        assert accelerator.clip_grad_norm_(net.parameters(), 1e-3) is None
        optimizer.zero_grad()
    assert net.layer.weight.grad.tolist() == [[0.5, 0.5]]
    with accelerator.accumulate(net):
        accelerator.backward(net(torch.ones(1, 2))["out"].sum())
        assert accelerator.clip_grad_norm_(net.parameters(), 0.25) == pytest.approx(3**0.5)
    assert net.layer.weight.grad.norm() == pytest.approx(0.25 * (2 / 3) ** 0.5, rel=1e-3)


def test_the_wraps_are_the_ones_inside_in_all_else() -> None:
    _, inner, schedule, _ = parts()
    accelerator = Accelerator(compute_setup="cpu", gradient_accumulation_steps=2)
    optimizer, steps = accelerator.prepare(inner, schedule)

    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(steps, torch.optim.lr_scheduler.LRScheduler)
    optimizer.param_groups[0]["lr"] = 0.3
    assert inner.param_groups[0]["lr"] == 0.3
    optimizer.load_state_dict(optimizer.state_dict())
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *args: calls.append("step"))
    optimizer.step()
    assert calls == ["step"]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(inner.param_groups) == 2
    assert steps.get_last_lr() == [0.1]
    assert StepLR(optimizer, 1).optimizer is optimizer  # a schedule may be made of the prepared one
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert copy.deepcopy(steps).get_last_lr() == steps.get_last_lr()


# ------------------------------------------------------------------ mixed precision
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_prepared_module_computes_in_half_precision_and_gives_full(precision: str, dtype: torch.dtype) -> None:
    inside: list[torch.dtype] = []
    net = parts()[0]
    net.layer.register_forward_hook(lambda module, args, out: inside.append(out.dtype))
    accelerator = Accelerator(compute_setup="cpu", mixed_precision=precision)
    model = accelerator.prepare(net)

    assert model is net
    assert model(torch.ones(1, 2))["out"].dtype == torch.float32
    assert inside == [dtype]
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


def test_the_wrapped_forward_pickles_copies_and_comes_off() -> None:
    accelerator = Accelerator(compute_setup="cpu", mixed_precision="bf16")
    model = accelerator.prepare(parts()[0])
    x = torch.full((1, 2), 1 / 3)
    expected = model(x)["out"]
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(x)["out"], expected)
        with torch.no_grad():
            other.layer.weight.zero_()  # it is the copy's own forward
            assert torch.equal(other(x)["out"].view(1), other.layer.bias.bfloat16().float())
        assert torch.equal(model(x)["out"], expected)
    assert list(model.state_dict()) == ["layer.weight", "layer.bias"]

    assert accelerator.unwrap_model(model) is model
    assert torch.equal(model(x)["out"], expected)
    plain_forward(model)
    assert "forward" not in vars(model)
    assert torch.equal(model(x)["out"], model.layer(x))


def test_a_forward_of_the_instance_itself_is_used_and_put_back() -> None:
    net: Any = parts()[0]
    net.forward = own = lambda x: net.layer(x).bfloat16()
    accelerator = Accelerator(compute_setup="cpu", mixed_precision="bf16")
    assert accelerator.prepare(net)(torch.ones(1, 2)).dtype == torch.float32
    plain_forward(net)
    assert net.forward is own


def test_float16_scales_clips_unscaled_and_skips_infinite_steps() -> None:
    accelerator: Any = Accelerator(compute_setup="cpu", mixed_precision="fp16")
    net, optimizer, schedule = accelerator.prepare(*parts()[:3])
    start = net.layer.weight.detach().clone()

    accelerator.backward(net(torch.ones(1, 2))["out"].sum() / 4)  # the scale is 65536: more than float16 holds
    assert net.layer.weight.grad.max() > 1000
    norm = accelerator.clip_grad_norm_(net.parameters(), 100.0)
    accelerator.clip_grad_norm_(net.parameters(), 100.0)  # unscaled once
    assert norm == pytest.approx(3**0.5 / 4)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    torch.testing.assert_close(net.layer.weight.detach(), start - 0.025)

    after, scale = net.layer.weight.detach().clone(), accelerator._gradients.scaler.get_scale()
    accelerator.backward(net(torch.ones(1, 2))["out"].sum() * torch.inf)
    optimizer.step()
    schedule.step()
    assert torch.equal(net.layer.weight, after)
    assert schedule.get_last_lr() == [0.05]
    assert accelerator._gradients.scaler.get_scale() == scale / 2


def test_gradients_are_unscaled_once_and_only_those_that_are_named() -> None:
    accelerator: Any = Accelerator(compute_setup="cpu", mixed_precision="fp16")
    nets = [accelerator.prepare(nn.Linear(1, 1, bias=False)) for _ in range(3)]
    optimizers = [accelerator.prepare(torch.optim.SGD(net.parameters(), lr=1.0)) for net in nets]
    large = accelerator._gradients.scaler.get_scale() / 4
    accelerator.backward(sum(net(torch.ones(1, 1)) for net in nets).sum() / 4)
    found = []
    for count in (1, 2, 3, 3):
        accelerator.clip_grad_norm_([net.weight for net in nets[:count]], 1e9)
        found.append([net.weight.grad.item() for net in nets])
    assert found == [[0.25, large, large], [0.25, 0.25, large], [0.25] * 3, [0.25] * 3]  # each once
    schedule = accelerator.prepare(StepLR(optimizers[2].inner, 1, gamma=0.5))
    optimizers[2].step()
    schedule.step()
    assert schedule.get_last_lr() == [0.5]
    assert [len(accelerator._prepared.of(kind)) for kind in (nn.Module, torch.optim.Optimizer)] == [3, 3]
    assert accelerator._prepared.of(LRScheduler) == [schedule.inner]


def test_two_optimizers_of_one_loss_are_unscaled_alike() -> None:
    accelerator: Any = Accelerator(compute_setup="cpu", mixed_precision="fp16")
    first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    one, two = (torch.optim.SGD(m.parameters(), lr=1.0) for m in (first, second))
    first, second, one, two = accelerator.prepare(first, second, one, two)
    accelerator._gradients.scaler.set_growth_interval(1)  # each update doubles the scale
    before = [module.weight.detach().clone() for module in (first, second)]
    accelerator.backward((first(torch.ones(1, 1)) + second(torch.ones(1, 1))).sum() / 4)
    one.step()
    two.step()
    for module, start in zip((first, second), before, strict=True):
        torch.testing.assert_close(start - module.weight.detach(), torch.full((1, 1), 0.25))


# ------------------------------------------------------------------ collectives without others


def test_a_dict_of_figures_says_what_is_wrong_with_it() -> None:
    accelerator = Accelerator(compute_setup="cpu")
    with pytest.raises(ArgumentError, match=r"op='median': must be one of 'mean', 'sum', 'max', 'min'"):
        accelerator.all_reduce_dict({}, op="median")
    for op in ("avg", "AVG", "MEAN", "Sum"):
        assert accelerator.all_reduce_dict({"a": 2.0}, op=op) == {"a": 2.0}
    with pytest.raises(ArgumentError, match=r"'a' on rank 0 is array\(\[0\., 0\.\]\) of type ndarray: use a float, an"):
        accelerator.all_reduce_dict({"a": np.zeros(2)})
    assert accelerator.all_reduce_dict({"n": -(2**63)}, op="sum") == {"n": -(2**63)}
    assert list(accelerator.all_reduce_dict({"b": 1, 3: 2.0})) == ["b", 3]
    assert accelerator.all_reduce_dict({}) == {}


def test_collectives_of_one_process_return_the_usual_shapes() -> None:
    accelerator = Accelerator(compute_setup="cpu")
    loss = torch.tensor(2.0, requires_grad=True)
    gathered = accelerator.gather({"loss": loss, "rows": (torch.ones(2, 3), None)})
    assert gathered["loss"].tolist() == [2.0]
    assert not gathered["loss"].requires_grad
    assert gathered["rows"][0].shape == (2, 3)
    assert accelerator.gather_for_metrics(torch.ones(2)).shape == (2,)
    assert accelerator.reduce([torch.tensor(3)])[0].tolist() == 3
    assert accelerator.reduce(torch.tensor(3), "mean").dtype == torch.float64
    assert accelerator.broadcast(loss) is loss
    with pytest.raises(ArgumentError, match="reduction='min'"):
        accelerator.reduce(loss, "min")


# ------------------------------------------------------------------ save
def test_a_file_is_there_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, path = Accelerator(compute_setup="cpu"), tmp_path / "deep" / "model.pt"
    accelerator.save({"epoch": 1}, path)
    assert torch.load(path) == {"epoch": 1}

    class Stops:
        def __reduce__(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        accelerator.save({"epoch": Stops()}, str(path))
    monkeypatch.setattr(os, "replace", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        accelerator.save({"epoch": 2}, path)
    assert torch.load(path) == {"epoch": 1}
    assert os.listdir(path.parent) == ["model.pt"]


# ------------------------------------------------------------------ distribute
def test_a_distributed_function_keeps_its_signature() -> None:
    def train(x: int, rank: int) -> None:
        """Train."""

    accelerator = Accelerator(nprocs=1, compute_setup="cpu")
    distributed = accelerator.distribute(train)
    assert distributed.__name__ == "train"
    assert distributed.__doc__ == "Train."
    with pytest.raises(ArgumentError, match=r"do not fit .*train: missing a required argument: 'x'"):
        distributed()
    with pytest.raises(ArgumentError, match=r"fun=3: must be a function"):
        accelerator.distribute(3)  # type: ignore[arg-type]


class Plain:
    """Holds what it is given."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


def test_parts_in_reference_cycles_are_found_once() -> None:
    named, second, deep, deeper = (nn.Linear(1, 1) for _ in range(4))
    run: Any = Plain(trainer=Plain(model=deep, inner=Plain(model=deeper)), models=[named])
    run.trainer.run = run

    def helper(depth: int) -> Any:
        return other(depth) or named

    def other(depth: int) -> Any:
        return helper(depth - 1) if depth else second

    def train(run: Plain) -> Any:
        return helper(3)

    found = list(_find_trainable(train, (run,), {"again": [run, {"itself": train}]}))
    assert dict(found) == {
        ("function", "helper", "named"): named,
        ("args", 0, "trainer", "model"): deep,
        ("function", "helper", "other", "second"): second,
    }
    assert len(found) == 3
    assert run.trainer.inner.model is deeper  # three attributes deep: left alone


def test_distribute_cannot_run_in_the_background() -> None:
    with pytest.raises(ArgumentError, match="block=False is not supported: distribute waits for the ranks"):
        Accelerator(compute_setup="cpu").distribute(print, block=False)
    with pytest.raises(ArgumentError, match=r"detach='night' is not supported: .* launch that function with detach"):
        Accelerator(compute_setup="cpu").distribute(print, detach="night")
