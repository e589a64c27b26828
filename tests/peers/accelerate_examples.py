"""Loops of accelerate's examples (examples/by_feature), with a small model and numbers in place of BERT and MRPC.

As a script it runs each under accelerate's own launcher, and writes what the ranks return into a folder.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset


def get_dataloaders(batch_size: int = 4) -> tuple[DataLoader[Any], DataLoader[Any]]:
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x, (x.sum(1) > 0).long())
    return DataLoader(data, batch_size, shuffle=True), DataLoader(TensorDataset(*data[:13]), batch_size)


def parts() -> tuple[nn.Module, Any, Any]:
    from accelerate.utils import set_seed

    set_seed(42)
    model = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, optimizer, LambdaLR(optimizer, lambda step: 0.95**step)


def weights(accelerator: Any, model: nn.Module) -> list[float]:
    own = accelerator.unwrap_model(model).parameters()
    found: list[float] = torch.cat([parameter.detach().flatten() for parameter in own]).tolist()
    return found


def nlp_example(accelerator: Any = None, **options: Any) -> list[Any]:
    from accelerate import Accelerator

    accelerator = accelerator or Accelerator(cpu=True, **options)
    train, valid = get_dataloaders()
    model, optimizer, schedule = parts()
    model, optimizer, train, valid, schedule = accelerator.prepare(model, optimizer, train, valid, schedule)
    found: list[Any] = []
    for _ in range(2):
        model.train()
        for x, y in train:
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            found += [loss.item(), schedule.get_last_lr()[0]]
        model.eval()
        for x, y in valid:
            with torch.no_grad():
                predictions = model(x).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, y))
            found += [*predictions.tolist(), *references.tolist()]
    found += weights(accelerator, model)
    accelerator.end_training()
    return found


def gradient_accumulation() -> list[Any]:
    return nlp_example(gradient_accumulation_steps=3)


def complete_cv_example() -> list[Any]:
    from accelerate import DataLoaderConfiguration

    config = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
    return nlp_example(mixed_precision="bf16", dataloader_config=config)


def ddp_comm_hook() -> list[Any]:
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    hook: Any = DDPCommunicationHookType.FP16
    return nlp_example(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=hook)])


def tracking() -> list[Any]:
    from accelerate import Accelerator
    from accelerate.tracking import TensorBoardTracker

    assert TensorBoardTracker.main_process_only
    with tempfile.TemporaryDirectory() as folder:
        accelerator = Accelerator(cpu=True, project_dir=folder)
        accelerator.init_trackers("example", {"lr": 0.05})
        accelerator.log({"loss": 0.5}, step=0)
        return nlp_example(accelerator)


def early_stopping() -> list[Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = parts()
    model, optimizer, train = accelerator.prepare(model, optimizer, get_dataloaders()[0])
    losses = []
    for x, y in train:
        loss = functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == 3 + accelerator.process_index:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    assert len(losses) == 3
    return [*losses, *weights(accelerator, model)]


def local_sgd() -> list[Any]:
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = parts()
    model, optimizer, train = accelerator.prepare(model, optimizer, get_dataloaders()[0])
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as local:
        for x, y in train:
            accelerator.backward(functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            local.step()
    return weights(accelerator, model)


def checkpointing() -> list[Any]:
    """A script that saves within its first epoch, and its second start."""
    import torch.distributed as dist
    from accelerate import Accelerator
    from accelerate.utils import broadcast_object_list

    accelerator = Accelerator(cpu=True)
    with tempfile.TemporaryDirectory() as own:
        folder = broadcast_object_list([own])[0]
        found = []
        for load in (False, True):
            model, optimizer, schedule = parts()
            model, optimizer, train, schedule = accelerator.prepare(model, optimizer, get_dataloaders()[0], schedule)
            if load:
                accelerator.load_state(folder)
            for step, (x, y) in enumerate(accelerator.skip_first_batches(train, 3) if load else train):
                accelerator.backward(functional.cross_entropy(model(x), y))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                if not load and step == 2:
                    accelerator.save_state(folder)
            found += weights(accelerator, model)
            accelerator.free_memory()
        dist.barrier()
    return found


EXAMPLES: list[Callable[[], list[Any]]] = [
    *(nlp_example, gradient_accumulation, complete_cv_example, ddp_comm_hook, tracking),
    *(early_stopping, local_sgd, checkpointing),
]


def _write(number: int, folder: str) -> None:
    from accelerate.state import PartialState

    found = EXAMPLES[number]()
    path = Path(folder) / f"{EXAMPLES[number].__name__}-{PartialState().process_index}.json"
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    import torch._dynamo  # which optimizers import: once, instead of in every rank
    from accelerate import notebook_launcher

    for index in range(len(EXAMPLES)):
        notebook_launcher(_write, (index, sys.argv[1]), num_processes=2, use_port=sys.argv[2])
