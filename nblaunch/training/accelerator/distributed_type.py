"""`DistributedType` and `RankState`: how this process runs, under the names that loops for accelerate read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch


class DistributedType(str, Enum):
    """How ranks run. Members equal strings, and accelerate's members of the same names."""

    NO = "NO"
    """A single process."""
    MULTI_CPU = "MULTI_CPU"
    """Several ranks that compute on the CPU."""
    MULTI_GPU = "MULTI_GPU"
    """Several ranks that compute on GPUs."""
    FSDP = "FSDP"
    """Several ranks, each with a part of every parameter."""
    # Never the type here, but loops compare with them.
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"

    __str__ = str.__str__


@dataclass(frozen=True)
class RankState:
    """A snapshot of how this process runs: ``accelerator.state``."""

    distributed_type: DistributedType
    num_processes: int
    process_index: int
    local_process_index: int
    device: torch.device
    mixed_precision: str
    fsdp_plugin: Any = None
    """As it was given to the Accelerator."""
    deepspeed_plugin: None = None
    """There is none here, as in accelerate without DeepSpeed; so is the next one."""
    megatron_lm_plugin: None = None

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        return self.num_processes > 1
