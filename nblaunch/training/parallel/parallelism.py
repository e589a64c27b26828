"""`Parallelism`: how ranks divide a model that is too large for one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, NamedTuple

from torch import nn

from nblaunch.errors import ArgumentError
from nblaunch.machine.arguments import named_arguments, one_of, whole_number

STYLES = ("colwise", "colwise_gather", "rowwise", "sequence")
"""Names of styles of tensor parallelism in a plan."""

Units = Sequence[type[nn.Module] | str] | Callable[[str, nn.Module], bool]


class MeshSizes(NamedTuple):
    """Sizes of the dimensions of the mesh of ranks, outermost first; the field names are those of the dimensions."""

    replicate: int
    shard: int
    tensor: int

    @property
    def is_fully_sharded(self) -> bool:
        """Return True if ``fully_shard`` divides the parameters, or lets groups of ranks exchange gradients."""
        return self.replicate * self.shard > 1


@named_arguments
@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Divides a model among the ranks: ``Accelerator(parallelism=Parallelism())``.

    With `shard` each rank keeps a part of every parameter, its gradient and its optimizer state, and ranks gather a
    unit's parameters while it computes: FSDP2, torch's ``fully_shard``. With `tensor` the ranks of a group of that
    size divide single layers, as `plan` says, and compute on the same samples. The ranks form a mesh of `replicate` ×
    `shard` × `tensor`; consecutive ranks are a tensor group. In a single process a Parallelism has no effect.

    Args:
        shard: Ranks among which parameters are divided. True (default): all that `replicate` and `tensor` leave.
            False: each rank keeps whole parameters (except for what `tensor` divides).
        replicate: Groups of ranks that each hold the whole model and exchange gradients. Default: 1, and with a number
            or False for `shard` what is left.
        tensor: Ranks that divide single layers. Default 1.
        plan: For `tensor`, by name of a module how it is divided: ``"colwise"`` (a linear layer's outputs, an
            embedding's columns), ``"rowwise"`` (a linear layer's inputs, an embedding's rows), ``"colwise_gather"``
            (each rank gets all outputs), ``"sequence"`` (a norm or dropout over parts of a sequence), or any
            ``torch.distributed.tensor.parallel.ParallelStyle``. A ``*`` stands for one part of a dotted name:
            ``{"layers.*.up": "colwise", "layers.*.down": "rowwise"}``.
        units: Modules whose parameters are gathered together: classes, names of modules (with ``*``), or a function
            ``(name, module) -> bool``. Default: a transformers model's ``_no_split_modules``, else the modules in each
            ``nn.ModuleList``, and of an ``nn.Transformer``. The rest of the model is a unit of its own.
        reshard_after_forward: Whether a unit's parameters are freed between forward and backward. False needs more
            memory and gathers them once less. A number: see ``fully_shard``. Default: torch's own.
        cpu_offload: Whether parameters, gradients and optimizer states stay in the CPU's memory; for GPUs.

    Raises:
        ArgumentError: An argument is wrong.
    """

    shard: bool | int = True
    replicate: int | None = None
    tensor: int = 1
    plan: Mapping[str, Any] | None = None
    units: Units | None = None
    reshard_after_forward: bool | int | None = None
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.shard, bool):
            whole_number("shard", self.shard, least=1)
        if self.replicate is not None:
            whole_number("replicate", self.replicate, least=1)
        whole_number("tensor", self.tensor, least=1)
        self._check_plan()
        self._check_units()
        if self.reshard_after_forward is not None and not isinstance(self.reshard_after_forward, bool):
            whole_number("reshard_after_forward", self.reshard_after_forward, least=1)
        if self.cpu_offload and self.shard is False:
            raise ArgumentError("cpu_offload=True, shard=False: only sharded parameters can stay on the CPU")

    def _check_plan(self) -> None:
        given: Any = self.plan
        if given is not None and not isinstance(given, Mapping):
            raise ArgumentError(f"plan={given!r:.80}: must be a dict from names of modules to styles")
        if given and self.tensor == 1:
            raise ArgumentError("plan: there is nothing to divide with tensor=1: give tensor=2 or more")
        if self.tensor > 1 and not given:
            raise ArgumentError(f'tensor={self.tensor}, plan={given!r}: name what is divided: {{"up": "colwise"}}')
        for name, style in (given or {}).items():
            if isinstance(style, str):
                one_of(f"plan[{name!r}]", style, STYLES)
            elif not callable(getattr(style, "_apply", None)):
                raise ArgumentError(
                    f"plan[{name!r}]={style!r:.80}: must be one of {', '.join(STYLES)} or a ParallelStyle"
                )

    def _check_units(self) -> None:
        given: Any = self.units
        if given is None or (callable(given) and not isinstance(given, type)):
            return
        if isinstance(given, (str, type)) or not isinstance(given, Sequence):
            raise ArgumentError(f"units={given!r:.80}: must be a list of classes or names, or a function")
        for unit in given:
            if not isinstance(unit, str) and not (isinstance(unit, type) and issubclass(unit, nn.Module)):
                raise ArgumentError(f"units: {unit!r:.80} is neither a class of modules nor a name")

    # ------------------------------------------------------------------ sizes
    def sizes(self, world_size: int) -> MeshSizes:
        """Return the sizes of the mesh for this number of ranks.

        Raises:
            ArgumentError: The ranks cannot be divided so.
        """
        if world_size % self.tensor:
            raise ArgumentError(f"tensor={self.tensor}: does not divide the {world_size} ranks")
        rest = world_size // self.tensor
        if self.shard is True:
            replicate = self.replicate or 1
            shard = rest // replicate
        else:
            shard = int(self.shard) or 1
            replicate = self.replicate or max(1, rest // shard)
        if replicate * shard != rest:
            parts = f"replicate={replicate}, shard={self.shard}, tensor={self.tensor}"
            raise ArgumentError(f"{parts}: their product must be the number of ranks, which is {world_size}")
        if shard % int(self.reshard_after_forward or 1):
            raise ArgumentError(f"reshard_after_forward={self.reshard_after_forward}: does not divide shard={shard}")
        return MeshSizes(replicate, shard, self.tensor)

    def copies(self, world_size: int) -> int:
        """Return how many ranks compute on the same samples."""
        return self.sizes(world_size).tensor if world_size > 1 else 1

    # ------------------------------------------------------------------ which modules
    def planned(self, module: nn.Module) -> dict[str, Any]:
        """Return the style of each module that the plan names.

        Raises:
            ArgumentError: A name in the plan is no module's.
        """
        names = [name for name, _ in module.named_modules() if name]
        styles: dict[str, Any] = {}
        for pattern, style in (self.plan or {}).items():
            found = [name for name in names if matches(name, pattern)]
            if not found:
                raise ArgumentError(f"plan[{pattern!r}]: the {type(module).__name__} has no such module{_like(names)}")
            styles |= dict.fromkeys(found, style)
        return styles

    def units_of(self, module: nn.Module) -> dict[str, nn.Module]:
        """Return the modules that are sharded as units, by name, innermost first; without the root.

        Raises:
            ArgumentError: A class or name in `units` is in no part of the module, or is a list of modules.
        """
        parts = {name: part for name, part in module.named_modules() if name}
        if self.units is None:
            found = _default_units(module, parts)
        elif callable(self.units):
            found = {name for name, part in parts.items() if self.units(name, part)}
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
                    f"units: {name} is a {type(parts[name]).__name__}, without a forward: name its parts"
                )
        return {name: parts[name] for name in sorted(in_order, key=lambda name: -name.count("."))}


def matches(name: str, pattern: str) -> bool:
    """Return True if a dotted name fits a pattern, part by part."""
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
    """Return the names in short, those that differ in their numbers once."""
    short = [".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names]
    distinct = [name for name, _ in groupby(dict.fromkeys(short))]
    shown = ", ".join(distinct[:12]) + (", …" if len(distinct) > 12 else "")
    return f": it has {shown}" if distinct else ""
