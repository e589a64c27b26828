"""`Parallelism`: how ranks divide a model that is too large for one of them; and the whole states of such models.

The optimizer functions of ``torch.distributed.checkpoint.state_dict`` are not used: they step an optimizer that has no
state yet, so a state that is saved before the first step would begin with Adam's second one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from nblaunch.errors import ArgumentError
from nblaunch.machine.arguments import named_arguments, one_of, whole_number
from nblaunch.training.collectives import broadcast_tensors, check_same, exchange
from nblaunch.training.pytree import parameters_of, to_device, tree_map
from nblaunch.training.topology import collective_device, world

STYLES = ("colwise", "colwise_gather", "rowwise", "sequence")


class MeshSizes(NamedTuple):
    """Sizes of the dimensions of the mesh of ranks, outermost first; the field names are those of the dimensions."""

    replicate: int
    shard: int
    tensor: int

    @property
    def is_fully_sharded(self) -> bool:
        return self.replicate * self.shard > 1


@named_arguments
@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Shards a model over the ranks: ``Accelerator(parallelism=Parallelism())``.

    With `shard` each rank keeps a part of every parameter, gradient and optimizer state, and a unit's parameters are
    gathered while it computes: FSDP2, torch's ``fully_shard``. With `tensor`, groups of that many ranks split single
    layers as in `plan` and compute on the same samples: tensor parallelism. The ranks form a mesh of `replicate` ×
    `shard` × `tensor`; consecutive ranks are a tensor-parallel group. In a single process a Parallelism has no effect.

    Args:
        shard: Whether to shard parameters over all ranks left by `replicate` and `tensor` (default). False: each rank
            keeps whole parameters, except for layers split by `tensor`.
        replicate: Number of replicas: groups of ranks that each hold the whole model and average gradients. Default: 1;
            without `shard`, the number of ranks divided by `tensor`.
        tensor: Size of a tensor-parallel group. Default 1.
        plan: For `tensor`, how to split modules, by name: ``"colwise"`` (a linear layer's outputs, an embedding's
            columns), ``"rowwise"`` (a linear layer's inputs, an embedding's rows), ``"colwise_gather"`` (each rank gets
            all outputs), ``"sequence"`` (a norm or dropout over parts of a sequence), or any
            ``torch.distributed.tensor.parallel.ParallelStyle``. A ``*`` stands for one part of a dotted name:
            ``{"layers.*.up": "colwise", "layers.*.down": "rowwise"}``.
        units: Modules whose parameters are gathered together: classes, or names of modules (with ``*``). Default: a
            transformers model's ``_no_split_modules``, else the modules in each ``nn.ModuleList``, including those of
            an ``nn.Transformer``. The rest of the model is a unit of its own.
        reshard_after_forward: Whether to free a unit's parameters between forward and backward. False needs more
            memory, but gathers once less. Default: torch's.
        cpu_offload: Whether to keep parameters, gradients and optimizer states in CPU memory; for GPUs.

    Raises:
        ArgumentError: An argument is wrong.
    """

    shard: bool = True
    replicate: int | None = None
    tensor: int = 1
    plan: Mapping[str, Any] | None = None
    units: Sequence[type[nn.Module] | str] | None = None
    reshard_after_forward: bool | None = None
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        for name in ("shard", "reshard_after_forward", "cpu_offload"):
            value: object = getattr(self, name)
            if not isinstance(value, bool) and (value is not None or name != "reshard_after_forward"):
                raise ArgumentError(f"{name}={value!r:.80}: use True or False")
        if self.replicate is not None:
            whole_number("replicate", self.replicate, least=1)
        whole_number("tensor", self.tensor, least=1)
        self._check_plan()
        self._check_units()
        if self.cpu_offload and not self.shard:
            raise ArgumentError("cpu_offload=True, shard=False: only sharded parameters can be offloaded")

    def _check_plan(self) -> None:
        given: Any = self.plan
        if given is not None and not isinstance(given, Mapping):
            raise ArgumentError(f"plan={given!r:.80}: must be a dict from module names to styles")
        if given and self.tensor == 1:
            raise ArgumentError("plan has no effect with tensor=1: use tensor=2 or more")
        if self.tensor > 1 and not given:
            raise ArgumentError(f'tensor={self.tensor}, plan={given!r}: name the layers to split: {{"up": "colwise"}}')
        for name, style in (given or {}).items():
            if isinstance(style, str):
                one_of(f"plan[{name!r}]", style, STYLES)
            elif not callable(getattr(style, "_apply", None)):
                raise ArgumentError(
                    f"plan[{name!r}]={style!r:.80}: must be one of {', '.join(STYLES)} or a ParallelStyle"
                )

    def _check_units(self) -> None:
        given: Any = self.units
        if given is not None and (isinstance(given, str) or not isinstance(given, Sequence)):
            raise ArgumentError(f"units={given!r:.80}: must be a list of classes or names")
        for unit in given or ():
            if not isinstance(unit, str) and not (isinstance(unit, type) and issubclass(unit, nn.Module)):
                raise ArgumentError(f"units: {unit!r:.80} is neither a module class nor a name")

    # ------------------------------------------------------------------ sizes
    def sizes(self, world_size: int) -> MeshSizes:
        """Return the sizes of the mesh for this number of ranks."""
        if world_size % self.tensor:
            raise ArgumentError(f"tensor={self.tensor}: must divide the number of ranks, {world_size}")
        rest = world_size // self.tensor
        replicate = self.replicate or (1 if self.shard else rest)
        shard = rest // replicate if self.shard else 1
        if replicate * shard != rest:
            parts = f"replicate={replicate}, shard={self.shard}, tensor={self.tensor}"
            raise ArgumentError(f"{parts}: their product must be the number of ranks, {world_size}")
        return MeshSizes(replicate, shard, self.tensor)

    def copies(self, world_size: int) -> int:
        """Return how many ranks compute on the same samples."""
        return self.sizes(world_size).tensor if world_size > 1 else 1

    # ------------------------------------------------------------------ which modules
    def planned(self, module: nn.Module) -> dict[str, Any]:
        """Return the style of each module that the plan names."""
        names = [name for name, _ in module.named_modules() if name]
        styles: dict[str, Any] = {}
        for pattern, style in (self.plan or {}).items():
            found = [name for name in names if matches(name, pattern)]
            if not found:
                raise ArgumentError(f"plan[{pattern!r}]: the {type(module).__name__} has no such module{_like(names)}")
            styles |= dict.fromkeys(found, style)
        return styles

    def units_of(self, module: nn.Module) -> dict[str, nn.Module]:
        """Return the modules that are sharded as units, by name, innermost first; without the root."""
        parts = {name: part for name, part in module.named_modules() if name}
        if self.units is None:
            found = _default_units(module, parts)
        else:
            found = set()
            for unit in self.units:
                its = {
                    name
                    for name, part in parts.items()
                    if (matches(name, unit) if isinstance(unit, str) else isinstance(part, unit))
                }
                if not its:
                    label = repr(unit) if isinstance(unit, str) else unit.__name__
                    raise ArgumentError(f"units: the {type(module).__name__} has no {label}{_like(list(parts))}")
                found |= its
        in_order = [name for name in parts if name in found]  # the same on every rank
        for name in in_order:
            if type(parts[name]).forward is nn.Module.forward:
                raise ArgumentError(
                    f"units: {name} is a {type(parts[name]).__name__}, which has no forward: name its submodules"
                )
        return {name: parts[name] for name in sorted(in_order, key=lambda name: -name.count("."))}


def matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _default_units(module: nn.Module, parts: Mapping[str, nn.Module]) -> set[str]:
    classes = getattr(module, "_no_split_modules", None)
    if classes:
        return {name for name, part in parts.items() if type(part).__name__ in classes}
    lists = [name for name, part in parts.items() if isinstance(part, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return {
        name
        for name, part in parts.items()
        if name.rpartition(".")[0] in outermost
        and type(part).forward is not nn.Module.forward  # else its hooks would never run
        and any(True for _ in part.parameters())
    }


def _like(names: Sequence[str]) -> str:
    short = [".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names]
    distinct = [name for name, _ in groupby(dict.fromkeys(short))]
    shown = ", ".join(distinct[:12]) + (", …" if len(distinct) > 12 else "")
    return f": it has {shown}" if distinct else ""


HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_TENSOR_DIMENSIONS = ("tensor", "tp")
"""Names of a mesh's dimension whose ranks divide layers: ours, and accelerate's and transformers'."""
_meshes: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Meshes in use, by default group, then by device and sizes. A session may get a new group; a mesh keeps its own."""
_replacements: Any = WeakIdKeyDictionary()
"""The sharded parameter that took a parameter's place, by the latter, while an optimizer still has it."""


def unwrapped(model: nn.Module) -> nn.Module:
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def is_sharded(tensor: Any) -> bool:
    """Return True for a DTensor: each rank holds a part of it, or a copy."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh")


def is_divided(part: Any) -> bool:
    """Return True if ranks hold parts of this module's or optimizer's parameters: its forward is a collective."""
    return any(map(is_sharded, part.parameters() if isinstance(part, nn.Module) else parameters_of(part)))


def copies_in(module: nn.Module) -> int:
    """Return how many ranks compute on the same samples, by the meshes of a module's parameters."""
    sharded: list[Any] = [*filter(is_sharded, module.parameters())]
    meshes = {parameter.device_mesh for parameter in sharded}
    named = [pair for mesh in meshes for pair in zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)]
    return max((size for name, size in named if name in _TENSOR_DIMENSIONS), default=1)


def is_fully_sharded(module: Any) -> bool:
    return hasattr(module, "set_requires_gradient_sync")


# ------------------------------------------------------------------ sharding
def shard_model(module: nn.Module, parallelism: Parallelism, device: torch.device, precision: str) -> None:
    """Divide a module's parameters in place, after rank 0's were sent to all ranks. A collective."""
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
            raise ArgumentError(f"prepare: the {kind} is on the meta device and has no values: create it on the CPU")
        if isinstance(parameter, nn.UninitializedParameter):
            raise ArgumentError(f"prepare: {name} of the {kind} is uninitialized: call the module once first")
        if parameter in _replacements:
            raise ArgumentError(
                f"prepare: {name} of the {kind} is also a parameter of a sharded module: prepare one module that has "
                "both as its parts"
            )
        if is_fully_sharded and parameter.dim() == 0:
            raise ArgumentError(
                f"prepare: {name} of the {kind} is a scalar, which cannot be sharded: give it shape [1]"
            )
    if parallelism.cpu_offload and device.type == "cpu":
        raise ArgumentError("cpu_offload=True needs GPUs, but the ranks compute on the CPU")
    if precision == "fp16" and parallelism.tensor > 1:
        raise ArgumentError(f'mixed_precision="fp16", tensor={parallelism.tensor}: use "bf16", which needs no scaler')


def _check_equal(module: nn.Module, units: Mapping[str, nn.Module]) -> None:
    """Refuse modules that differ between ranks, whose collectives would hang or mix up their parameters."""
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    own = {name: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for name, tensor in tensors}
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    check_same("prepare", exchange({**own, "units": ", ".join(units) or "none", "frozen": ", ".join(frozen) or "none"}))


def _check_tied(module: nn.Module, units: Mapping[str, nn.Module]) -> None:
    """Refuse one parameter in two units, which fully_shard would make two parameters of."""
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
                f"units: {earlier} and {name} are the same parameter, but in different units ({its_unit or 'the rest'} "
                f"and {unit or 'the rest'}): use units that hold both or neither"
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
    half = HALF.get(precision)
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
    from torch.distributed.tensor.parallel import parallelize_module

    names: dict[Tensor, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    styles = parallelism.planned(module)
    for name, style in styles.items():
        layer = module.get_submodule(name)
        attribute = {"colwise": "out_features", "rowwise": "in_features"}.get(str(style), "")
        size = getattr(layer, attribute, 0)  # embeddings have neither
        if size % mesh.size():
            raise ArgumentError(f"plan: {name} has {attribute}={size}, not divisible by tensor={mesh.size()}")
        styles[name] = _style(layer, style)
    parallelize_module(module, mesh, styles)
    now = dict(module.named_parameters(remove_duplicate=False))
    for before, tied in names.items():
        first = now[tied[0]]
        for name in tied:
            other = now[name].requires_grad_(before.requires_grad)  # torch 2.8 makes it trainable
            if getattr(other, "placements", None) != getattr(first, "placements", None):
                raise ArgumentError(
                    f"plan: {tied[0]} and {name} are the same parameter, but would be split differently: use "
                    '"rowwise" for an embedding and "colwise" for its linear layer'
                )
            if other is not first:
                owner, _, attribute = name.rpartition(".")
                module.get_submodule(owner).register_parameter(attribute, first)


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
    """``clip_grad_norm_`` for whole, sharded and divided parameters together. A collective if any are."""
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
    norms: list[Any] = [
        nn.utils.get_total_norm([part.grad for part in group if part.grad is not None], norm_type)
        for group in groups.values()
    ]
    whole = [norm.full_tensor() if is_sharded(norm) else norm for norm in norms]
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(whole[0].device) for norm in whole]), norm_type)
    for group in groups.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def full_state(part: Any) -> dict[str, Any]:
    """Return the whole ``state_dict()`` of a module or optimizer on the CPU of rank 0, elsewhere {}. A collective.

    An optimizer's has numbers for parameters, so it loads into an optimizer that is not divided. Tensors that are whole
    may share the memory of the part's own.
    """
    own = unwrapped(part) if isinstance(part, nn.Module) else part
    state: dict[str, Any] = gathered(own.state_dict())
    return state if world().rank == 0 else {}


def gathered(tree: Any) -> Any:
    """Return a pytree with each divided tensor whole, on the CPU; on ranks other than 0 None for it. A collective."""

    def whole(leaf: Any) -> Any:
        if not is_sharded(leaf):
            return leaf
        full = leaf.detach().full_tensor().cpu()
        if world().rank != 0:
            return None
        has_padding = full.untyped_storage().nbytes() != full.nbytes  # of uneven parts, which files would hold too
        return full.clone() if has_padding else full

    tree = tree_map(whole, tree)
    return to_device(tree, "cpu") if world().rank == 0 else tree


def load_full_state(part: Any, state: Mapping[str, Any], **options: Any) -> None:
    """Load a whole ``state_dict()`` into a module, optimizer, or anything else that has a state.

    Where ranks divide it each rank loads its part of the tensors; it is no collective.
    """
    if isinstance(part, nn.Module) and is_divided(part):
        own = part.state_dict()
        state = {name: part_like(value, own.get(name)) for name, value in state.items()}
    elif isinstance(part, Optimizer) and is_divided(part):
        state = _optimizer_parts(part, state)
    part.load_state_dict(state, **options)


def _optimizer_parts(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, parameters_of(optimizer), strict=False))  # the optimizer itself compares the groups

    def own_part(value: Any, number: int) -> Any:
        part = part_like(value, by_number.get(number))
        return part.clone() if part is value and isinstance(value, Tensor) else part  # it may be mapped from a file

    return {
        **state,
        "state": {
            number: {key: own_part(value, number) for key, value in own.items()}
            for number, own in state["state"].items()
        },
    }
