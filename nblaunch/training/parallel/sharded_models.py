"""Models that ranks divide: sharding in place, optimizers over the new parameters, gradient norms."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from nblaunch.errors import ArgumentError
from nblaunch.training.collectives import broadcast_tensors
from nblaunch.training.exchange import check_same, exchange
from nblaunch.training.parallel.parallelism import MeshSizes, Parallelism
from nblaunch.training.topology import collective_device, world

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_TENSOR_DIMENSIONS = ("tensor", "tp")
"""Names of a mesh's dimension whose ranks divide layers: ours, and accelerate's and transformers'."""
_meshes: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Meshes in use, by default group, then by device and sizes. A session may get a new group; a mesh keeps its own."""
_replacements: Any = WeakIdKeyDictionary()
"""The sharded parameter that took a parameter's place, by the latter, while an optimizer still has it."""


def is_sharded(tensor: Any) -> bool:
    """Return True for a DTensor: each rank holds a part of it, or a copy."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh")


def has_sharded_parameters(module: nn.Module) -> bool:
    """Return True if the forward pass of this module is a collective."""
    return any(map(is_sharded, module.parameters()))


def copies_in(module: nn.Module) -> int:
    """Return how many ranks compute on the same samples, by the meshes of a module's parameters."""
    meshes: list[Any] = [getattr(parameter, "device_mesh", None) for parameter in module.parameters()]
    sizes = [
        mesh.size(dimension)
        for mesh in meshes
        if mesh is not None
        for dimension, name in enumerate(mesh.mesh_dim_names or ())
        if name in _TENSOR_DIMENSIONS
    ]
    return max(sizes, default=1)


def is_fully_sharded(module: Any) -> bool:
    """Return True for a module that ``fully_shard`` was applied to."""
    return hasattr(module, "set_requires_gradient_sync")


# ------------------------------------------------------------------ sharding
def shard_model(module: nn.Module, parallelism: Parallelism, device: torch.device, precision: str) -> None:
    """Divide a module's parameters in place, after rank 0's were sent to all ranks. A collective.

    Args:
        module: With equal parameters in shape and type on every rank.
        parallelism: How.
        device: Where the module computes.
        precision: ``"no"``, ``"bf16"`` or ``"fp16"``: the type in which parameters are gathered.

    Raises:
        ArgumentError: The module, or this device or precision, cannot be divided so.
    """
    sizes = parallelism.sizes(world().size)
    _check(module, parallelism, device, precision)
    before = dict(module.named_parameters(remove_duplicate=False))
    units = parallelism.units_of(module) if sizes.is_fully_sharded else {}
    _check_tied(module, units)
    _check_equal(module, units)
    broadcast_tensors((*module.parameters(), *module.buffers()))
    mesh = _mesh(device.type, sizes)
    if sizes.tensor > 1:
        _divide_layers(module, parallelism, mesh["tensor"])
        _share_random_state(mesh["tensor"], device)
    if sizes.is_fully_sharded:
        _fully_shard(module, units, mesh, parallelism, precision)
    else:
        module.to(device)
    after = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in before.items():
        if after[name] is not parameter:
            _replacements[parameter] = after[name]
            _free(parameter)


def _check(module: nn.Module, parallelism: Parallelism, device: torch.device, precision: str) -> None:
    kind = type(module).__name__
    is_fully_sharded = parallelism.sizes(world().size).is_fully_sharded
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise ArgumentError(f"prepare: the {kind} is on the meta device, without values: make it on the CPU")
        if isinstance(parameter, nn.UninitializedParameter):
            raise ArgumentError(f"prepare: {name} of the {kind} has no shape yet: call the module once before")
        if parameter in _replacements:
            raise ArgumentError(
                f"prepare: {name} of the {kind} is also a parameter of a module that the ranks have divided: "
                "make both parts of one module, and prepare that"
            )
        if is_fully_sharded and parameter.dim() == 0:
            raise ArgumentError(
                f"prepare: {name} of the {kind} is a scalar, which cannot be sharded: make it of shape [1]"
            )
    if parallelism.cpu_offload and device.type == "cpu":
        raise ArgumentError("cpu_offload=True: the ranks compute on the CPU, so there is nothing to offload")
    if precision == "fp16" and parallelism.tensor > 1:
        raise ArgumentError(f'mixed_precision="fp16", tensor={parallelism.tensor}: use "bf16", which needs no scaler')


def _check_equal(module: nn.Module, units: Mapping[str, nn.Module]) -> None:
    """Refuse modules that differ between ranks, whose collectives would hang or mix up their parameters."""
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    own = {name: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for name, tensor in tensors}
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    check_same("prepare", exchange({**own, "units": ", ".join(units) or "none", "frozen": ", ".join(frozen) or "none"}))


def _check_tied(module: nn.Module, units: Mapping[str, nn.Module]) -> None:
    """Refuse one parameter in two units, which fully_shard would make two parameters of.

    Raises:
        ArgumentError: There is one.
    """
    unit_of = {part: name for name, part in units.items()}
    paths = {  # of a module that is used in several places too
        path: unit_of[part] for path, part in module.named_modules(remove_duplicate=False) if part in unit_of
    }
    places: dict[Tensor, tuple[str, str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        path = max((path for path in paths if name.startswith(f"{path}.")), key=len, default="")
        unit = paths.get(path, "")
        earlier, its_unit = places.setdefault(parameter, (name, unit))
        if unit != its_unit:
            raise ArgumentError(
                f"units: {earlier} and {name} are one parameter, and lie in different units ({its_unit or 'the rest'} "
                f"and {unit or 'the rest'}): choose units=... that hold both or neither"
            )


def _mesh(device_type: str, sizes: MeshSizes) -> Any:
    """Return the mesh of all ranks. A collective the first time."""
    from torch.distributed.device_mesh import init_device_mesh

    known = _meshes.setdefault(dist.group.WORLD, weakref.WeakValueDictionary())
    key = (device_type, sizes)
    mesh = known.get(key)
    if mesh is None:
        mesh = known[key] = init_device_mesh(device_type, tuple(sizes), mesh_dim_names=MeshSizes._fields)
    return mesh


def _fully_shard(
    module: nn.Module, units: Mapping[str, nn.Module], mesh: Any, parallelism: Parallelism, precision: str
) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": mesh["replicate", "shard"] if mesh.size(0) > 1 else mesh["shard"]}
    half = _HALF.get(precision)
    inner = outer = MixedPrecisionPolicy()
    if half is not None:
        inner = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        outer = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, output_dtype=torch.float32)
    if parallelism.reshard_after_forward is not None:
        options["reshard_after_forward"] = parallelism.reshard_after_forward
    if parallelism.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    for part in (*units.values(), module):
        whole = [parameter for parameter in part.parameters() if not is_sharded(parameter)]
        for parameter in whole:
            parameter.data = parameter.data.contiguous()  # fully_shard takes no other
        if next(part.parameters(), None) is not None:
            fully_shard(part, mp_policy=outer if part is module else inner, **options)
        for parameter in whole:
            _free(parameter)


def _free(parameter: Tensor) -> None:
    """Free the memory of a parameter that was replaced, on the GPU too; an optimizer may hold it until `rebind`."""
    parameter.data = parameter.data.new_empty(0)


def _divide_layers(module: nn.Module, parallelism: Parallelism, mesh: Any) -> None:
    """Divide layers by the plan, and keep tied parameters tied."""
    from torch.distributed.tensor.parallel import parallelize_module

    names: dict[Tensor, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    styles = parallelism.planned(module)
    for name, style in styles.items():
        layer = module.get_submodule(name)
        if style in ("colwise", "rowwise") and not isinstance(layer, nn.Embedding):
            _check_even(layer, name, style, mesh.size())
        styles[name] = _style(layer, style)
    parallelize_module(module, mesh, styles)
    now = dict(module.named_parameters(remove_duplicate=False))
    for before, tied in names.items():
        for name in tied:
            now[name].requires_grad_(before.requires_grad)  # torch 2.8 makes it trainable
        _tie_again(module, tied, now)


def _share_random_state(mesh: Any, device: torch.device) -> None:
    """Let the ranks of a tensor group draw the same numbers from torch's generators, as for the masks of dropout."""
    group, source = mesh.get_group(), int(mesh.mesh[0])
    state = torch.get_rng_state().to(collective_device())
    dist.broadcast(state, src=source, group=group)
    torch.set_rng_state(state.cpu())
    if device.type == "cuda":
        state = torch.cuda.get_rng_state(device).to(collective_device())
        dist.broadcast(state, src=source, group=group)
        torch.cuda.set_rng_state(state.cpu(), device)


def _style(layer: nn.Module, style: Any) -> Any:
    """Return torch's style for a name of a plan."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    if not isinstance(style, str):
        return style
    if style == "rowwise":
        return RowwiseParallel(input_layouts=Replicate()) if isinstance(layer, nn.Embedding) else RowwiseParallel()
    if style == "sequence":
        return SequenceParallel()
    if style == "colwise" and isinstance(layer, nn.Embedding):
        return ColwiseParallel(output_layouts=Replicate())
    return ColwiseParallel(output_layouts=Replicate()) if style == "colwise_gather" else ColwiseParallel()


def _check_even(layer: nn.Module, name: str, style: str, ranks: int) -> None:
    """Refuse uneven parts of activations: ranks would draw different numbers for dropout, and differ from then on.

    Raises:
        ArgumentError: A dimension is not a multiple of the number of ranks.
    """
    attribute = "out_features" if style == "colwise" else "in_features"
    size = getattr(layer, attribute, 0)
    if size % ranks:
        raise ArgumentError(f"plan: {name} has {attribute}={size}, which tensor={ranks} does not divide")


def _tie_again(module: nn.Module, tied: list[str], now: Mapping[str, Tensor]) -> None:
    first = now[tied[0]]
    for name in tied[1:]:
        other = now[name]
        if other is first:
            continue
        if getattr(other, "placements", None) != getattr(first, "placements", None):
            raise ArgumentError(
                f"plan: {tied[0]} and {name} are one parameter, and the plan divides them differently: an embedding "
                'by "rowwise" and the linear layer by "colwise" are alike'
            )
        owner, _, attribute = name.rpartition(".")
        module.get_submodule(owner).register_parameter(attribute, first)  # type: ignore[arg-type]  # a Parameter


# ------------------------------------------------------------------ optimizers
def rebind(optimizer: Optimizer) -> None:
    """Give an optimizer the sharded parameters in place of those it was made of, and their part of its state."""
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            if parameter not in _replacements:
                continue
            sharded = _replacements[parameter]
            group["params"][index] = sharded
            state = optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[sharded] = {key: part_like(value, sharded) for key, value in state.items()}


def part_like(value: Any, parameter: Any) -> Any:
    """Return this rank's part of a whole tensor, sharded like its parameter; anything of another shape unchanged."""
    if not isinstance(value, Tensor) or is_sharded(value) or value.dim() == 0:
        return value
    if parameter is None or value.shape != parameter.shape:
        return value
    if not is_sharded(parameter):
        return value.to(parameter.device)
    from torch.distributed.tensor import DTensor

    mesh, part = parameter.device_mesh, value
    for dimension in reversed(range(mesh.ndim)):  # a layer's division first, then that of its part
        divided: int | None = getattr(parameter.placements[dimension], "dim", None)
        if divided is not None:
            parts = part.chunk(mesh.size(dimension), divided)
            at = mesh.get_local_rank(dimension)
            part = parts[at] if at < len(parts) else part.narrow(divided, 0, 0)
    local = part.contiguous().clone().to(parameter.to_local().device)
    return DTensor.from_local(
        local, mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


# ------------------------------------------------------------------ training
def free_gathered(module: nn.Module) -> None:
    """Free the parameters that a forward pass without a backward pass has left gathered."""
    parts: list[Any] = [part for part in module.modules() if is_fully_sharded(part)]
    for part in parts:
        part.reshard()


def drop_unshared_gradients(module: nn.Module) -> None:
    """Drop what a module by ``fully_shard`` holds of an unfinished optimizer step: gradients not exchanged yet.

    They are in no parameter's ``grad``, and torch has no public way to them.
    """
    own: list[Any] = [part for part in module.modules() if is_fully_sharded(part)]
    for state in (part._get_fsdp_state() for part in own):
        several = getattr(state, "_fsdp_param_groups", None)  # newer than torch 2.8
        for group in [state._fsdp_param_group] if several is None else several:
            for parameter in () if group is None else group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):  # after its first forward pass
                    parameter._unsharded_param.grad = None


@contextmanager
def no_gradient_sync(module: Any) -> Iterator[None]:
    """A context in which the ranks exchange no gradients of a module by ``fully_shard``, or by DDP."""
    with ExitStack() as stack:
        no_sync = getattr(module, "no_sync", None)  # of DDP, of FSDP, and of a compiled one of these
        if no_sync is not None:
            stack.enter_context(no_sync())
        elif is_fully_sharded(module):
            module.set_requires_gradient_sync(False)
            stack.callback(module.set_requires_gradient_sync, True)
        yield


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """``clip_grad_norm_`` for whole, sharded and divided parameters together. A collective if any are.

    Returns:
        The norm over all parameters and ranks, as a plain tensor.
    """
    own = list(parameters)
    if not any(map(is_sharded, own)):
        plain: Tensor = nn.utils.clip_grad_norm_(own, max_norm, norm_type)
        return plain
    groups: dict[Any, list[Tensor]] = {}
    for parameter in own:
        if parameter.grad is not None:  # one operation takes tensors of one mesh
            groups.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    if not groups:
        return torch.tensor(0.0)
    norms = [
        _whole(nn.utils.get_total_norm([part.grad for part in group if part.grad is not None], norm_type))
        for group in groups.values()
    ]
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    for group in groups.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole
