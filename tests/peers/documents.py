"""The programs of the tutorial "From PyTorch DDP to Accelerate to Trainer", as printed except for the repairs.

A repair is what a program needs anywhere today, under torchrun too; each is listed above its program. Every program
also returns what it printed, so that a test can look at it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torchvision import datasets, transforms


class BasicNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)
        self.act = F.relu

    def forward(self, x):
        x = self.act(self.conv1(x))
        x = self.act(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = self.dropout1(x)
        x = torch.flatten(x, 1)
        x = self.act(self.fc1(x))
        x = self.dropout2(x)
        x = self.fc2(x)
        output = F.log_softmax(x, dim=1)
        return output  # noqa: RET504  # as printed


def setup(rank, world_size):
    "Sets up the process group and configuration for PyTorch Distributed Data Parallelism"
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"

    # Initialize the process group
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


# Repairs: `model` and `device` are unbound (a BasicNet, the CPU); on a CPU there is no `.to(rank)` and no
# `device_ids=[rank]`.
def train_ddp(rank, world_size):
    setup(rank, world_size)
    device = "cpu"
    # Build DataLoaders
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307), (0.3081))])

    train_dset = datasets.MNIST("data", train=True, download=True, transform=transform)
    test_dset = datasets.MNIST("data", train=False, transform=transform)

    train_loader = torch.utils.data.DataLoader(train_dset, shuffle=True, batch_size=64)
    test_loader = torch.utils.data.DataLoader(test_dset, shuffle=False, batch_size=64)

    # Build model
    model = BasicNet().to(device)
    ddp_model = DDP(model)

    # Build optimizer
    optimizer = optim.AdamW(ddp_model.parameters(), lr=1e-3)

    # Train for a single epoch
    model.train()
    for _batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    # Evaluate
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()
    print(f"Accuracy: {100.0 * correct / len(test_loader.dataset)}")  # type: ignore[arg-type]  # as printed
    return correct / len(test_dset)


# Repairs: `BasicModel` is `BasicNet`; `device` is unbound (the accelerator's loaders move batches by themselves); each
# rank counts its own part of the test set and divides by the whole (`gather_for_metrics`, the library's own remedy).
def train_ddp_accelerate():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    accelerator = Accelerator()
    # Build DataLoaders
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307), (0.3081))])

    train_dset = datasets.MNIST("data", train=True, download=True, transform=transform)
    test_dset = datasets.MNIST("data", train=False, transform=transform)

    train_loader = torch.utils.data.DataLoader(train_dset, shuffle=True, batch_size=64)
    test_loader = torch.utils.data.DataLoader(test_dset, shuffle=False, batch_size=64)

    # Build model
    model = BasicNet()

    # Build optimizer
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)

    # Send everything through `accelerator.prepare`
    train_loader, test_loader, model, optimizer = accelerator.prepare(train_loader, test_loader, model, optimizer)

    # Train for a single epoch
    model.train()
    for _batch_idx, (data, target) in enumerate(train_loader):
        output = model(data)
        loss = F.nll_loss(output, target)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    # Evaluate
    model.eval()
    correct = 0
    seen = 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            pred = output.argmax(dim=1, keepdim=True)
            pred, target = accelerator.gather_for_metrics((pred, target))
            correct += pred.eq(target.view_as(pred)).sum().item()
            seen += len(target)
    print(f"Accuracy: {100.0 * correct / len(test_loader.dataset)}")
    figures = {"accuracy": correct / len(test_loader.dataset), "seen": seen, "steps": len(train_loader)}
    return {**figures, "processes": AcceleratorState().num_processes, "model": type(model).__name__}


# Repairs: `evaluation_strategy` is now `eval_strategy`; compute_loss gets `num_items_in_batch` too; `label_names`, for
# transformers reads them from the arguments of `forward`, and BasicNet's names none; `train_dset` and `test_dset` are
# globals of the document's notebook.
# Added for the tests: checkpoints after each epoch, a log every three steps, callbacks, and a learning rate for the
# few steps that there are.
def train_trainer_ddp(callbacks: Any = ()):
    from transformers import Trainer, TrainingArguments

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307), (0.3081))])
    train_dset = datasets.MNIST("data", train=True, download=True, transform=transform)
    test_dset = datasets.MNIST("data", train=False, transform=transform)

    model = BasicNet()

    training_args = TrainingArguments(
        "basic-trainer",
        per_device_train_batch_size=64,
        per_device_eval_batch_size=64,
        num_train_epochs=1,
        eval_strategy="epoch",
        remove_unused_columns=False,
        label_names=["labels"],
        save_strategy="epoch",
        logging_steps=3,
        learning_rate=1e-3,
    )

    def collate_fn(examples):
        pixel_values = torch.stack([example[0] for example in examples])
        labels = torch.tensor([example[1] for example in examples])
        return {"x": pixel_values, "labels": labels}

    class MyTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(inputs["x"])
            target = inputs["labels"]
            loss = F.nll_loss(outputs, target)
            return (loss, outputs) if return_outputs else loss

    trainer = MyTrainer(
        model,
        training_args,
        train_dataset=train_dset,
        eval_dataset=test_dset,
        data_collator=collate_fn,
        callbacks=list(callbacks),
    )

    trainer.train()
    return trainer
