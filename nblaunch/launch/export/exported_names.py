"""How each name of the notebook gets into a script: as its statement, a literal, or data in a file beside it."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import pprint
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nblaunch.errors import PayloadError
from nblaunch.launch.export import literals, origins, saved_values
from nblaunch.launch.export.cell_statements import CellSource, Statement, statements_of
from nblaunch.launch.export.saved_values import FIX, Survey
from nblaunch.launch.export.script import Entry, Imported, beside, in_order
from nblaunch.machine.segments import in_words
from nblaunch.transfer import definitions, reducers

_LINE_CHARS = 100
_Kind = Literal["definition", "expression", "literal", "module", "tensor", "array", "object"]
"""``expression``: the notebook's own, which gives the same value. ``module``: one that then loads its weights."""
_CODE = (types.FunctionType, type, reducers.CACHED)
_IMPORTED = (types.FunctionType, types.BuiltinFunctionType, type)


@dataclass(frozen=True, slots=True)
class _Carried:
    kind: _Kind
    value: Any
    survey: Survey | None
    statement: Statement | None = None
    text: str = ""
    again: Survey | None = None
    """Of what the expression gives: what both have in common, the script gets from other names."""

    @property
    def shared(self) -> set[tuple[str, int]]:
        """What the value may have in common with others, which two copies would lose."""
        own = self.survey.shared if self.survey is not None else set()
        return own - self.again.shared if self.again is not None else own


@dataclass
class ExportedNames:
    """The names that a script needs, with those that they need in turn.

    Args:
        cells: The cells that the notebook has run.
        names: Its names.
        hidden: Names that the script defines itself.

    Attributes:
        imports: The imports, by name.
        modules: Modules that the script must import for literals.
        notes: What the user should know.
    """

    cells: Sequence[CellSource]
    names: dict[str, Any]
    hidden: frozenset[str]
    imports: dict[str, Imported] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    _carried: dict[str, _Carried] = field(default_factory=dict)
    _waiting: list[str] = field(default_factory=list)

    @functools.cached_property
    def statements(self) -> list[Statement]:
        return statements_of(self.cells)

    def need(self, names: Iterable[str]) -> None:
        """Add names of the notebook, and what they need.

        Raises:
            PayloadError: A value cannot be written.
        """
        self._waiting += sorted(names, reverse=True)
        while self._waiting:
            name = self._waiting.pop()
            is_known = name in self.imports or name in self._carried or name in self.hidden
            if not is_known and name in self.names and not name.startswith("__"):
                self._add(name, self.names[name])

    def add(self, name: str, value: Any) -> None:
        """Add a value that is no name of the notebook, such as an argument."""
        self._carried[name] = self._data(name, value)
        self.need(())

    def literal_of(self, value: Any) -> str | None:
        """Return an expression for plain data; None if it is too long, or something else."""
        wanted: list[str] = []
        modules: set[str] = set()

        def need(name: str, thing: Any) -> bool:
            if isinstance(thing, types.ModuleType):
                modules.add(name)
                return True
            wanted.append(name)
            return self.names.get(name) is thing

        text = literals.literal(value, need)
        if text is None or len(text) > literals.MAX_LITERAL_CHARS:
            return None
        self.modules |= modules
        self.need(wanted)
        return text

    def _add(self, name: str, value: Any) -> None:
        imported = origins.find_import(self._binding(name), name, value)
        if imported is not None:
            self.imports[name] = imported
        elif isinstance(value, _CODE) and definitions.is_sent_by_value(value):
            statement = self._definition(name, value)
            self._carried[name] = _Carried("definition", value, None, statement)
            self._waiting += statement.reads
        else:
            found = self._repeated(name, value)
            if found is not None and found.statement is not None:
                self._carried[name] = found
                self._waiting += found.statement.reads
            elif isinstance(value, (types.ModuleType, *_IMPORTED)) and (text := origins.import_of(name, value)):
                self.imports[name] = Imported((0, 0), text)
            else:
                self._carried[name] = self._data(name, value)

    # -------------------------------------------------------------- imports
    def _binding(self, name: str) -> Iterator[Statement]:
        """Yield the statements that bind a name, the last one first."""
        return (each for each in reversed(self.statements) if name in each.binds)

    # -------------------------------------------------------------- definitions
    def _definition(self, name: str, value: Any) -> Statement:
        """Return the statement that has defined a function or class.

        Raises:
            PayloadError: There is none, or it would define something else.
        """
        for statement in self._binding(name):
            if self._defines(statement, name, value):
                self._check_class(statement, value)
                if (line := statement.shell_line()) is not None:
                    raise PayloadError(
                        f"{statement.cell.label}, line {line[0]}: `{line[1]}` is IPython's syntax, and a script "
                        f"needs it for `{name}`: write it in Python"
                    )
                return statement
        kind = "class" if isinstance(value, type) else "function"
        raise PayloadError(
            f"`{name}`: no cell of the notebook defines this {kind} as it is now: define it in a cell, or {FIX}"
        )

    def _check_class(self, statement: Statement, value: Any) -> None:
        """Raise PayloadError for methods that were added to a class; note bases that were defined again."""
        for method in origins.added_methods(statement, value):
            raise PayloadError(
                f"`{value.__name__}.{method}` was added to the class after its cell had run: write it into the class"
            )
        for base in value.__mro__[1:-1] if isinstance(value, type) else ():
            if base.__module__ == "__main__" and self.names.get(base.__name__) is not base:
                self.notes.append(
                    f"`{value.__name__}` is based on an earlier `{base.__name__}`; the script has the present one"
                )

    def _defines(self, statement: Statement, name: str, value: Any) -> bool:
        if isinstance(value, type):
            return origins.has_class(statement, name, value)
        function = inspect.unwrap(value)
        if isinstance(function, types.FunctionType):
            inner = [each for _, each in origins.enclosed(function) if isinstance(each, types.FunctionType)]
            if any(origins.has_code(statement, each) for each in (function, *inner)):  # inner ones: of a decorator
                return True
        expression = statement.value
        if isinstance(expression, (ast.Name, ast.Attribute)):
            is_known = literals.is_repeatable(expression, self.names, self.hidden)
            return is_known and literals.repeat(expression, self.names) is value
        if not (isinstance(expression, ast.Call) and isinstance(expression.func, ast.Name)):
            return False
        factory = self.names.get(expression.func.id)
        if not origins.makes(factory, function):
            return False
        for variable, held in origins.enclosed(function):
            self._check_enclosed(name, expression, factory, variable, held)
        return True

    def _check_enclosed(self, name: str, call: ast.Call, factory: Any, variable: str, value: Any) -> None:
        """Raise PayloadError if a call might give a closure another value."""
        if isinstance(value, (*_CODE, types.ModuleType)):
            return
        given = origins.argument(call, factory, variable)
        if given is None:
            again = origins.default(factory, variable)
        else:
            is_known = literals.is_repeatable(given, self.names, self.hidden)
            again = [literals.repeat(given, self.names)] if is_known else []
        is_equal = any(saved_values.is_same(Survey(each), Survey(value)) for each in again)
        if not is_equal:
            raise PayloadError(
                f"`{name}` has its own `{variable}`, and `{ast.unparse(call)}` might give another one in a script: "
                f"make `{variable}` a parameter, or {FIX}"
            )

    # -------------------------------------------------------------- values
    def _repeated(self, name: str, value: Any) -> _Carried | None:
        """Return the notebook's expression for a value, if it gives an equal value now."""
        if saved_values.is_tensor(value) or saved_values.is_array(value) or saved_values.is_map(value):
            return None
        own = value
        for statement in self._binding(name):
            value, expression = own, statement.value
            if expression is None or not literals.is_repeatable(expression, self.names, self.hidden):
                continue
            if any(self._changes(each, statement) for each in statement.reads):
                continue
            bound = statement.targets
            if bound is not None:
                value = tuple(self.names.get(each) for each in bound)
            try:
                survey = Survey(value)
                again = literals.repeat(expression, self.names)
                if saved_values.is_module(value):
                    saved_values.set_mode(again, value.training, self.names.values())
                repeated = Survey(again)
                if type(again) is not type(value):
                    continue
                if saved_values.is_same(survey, repeated):
                    return _Carried("expression", value, survey, statement, again=repeated)
                if saved_values.is_module(value) and saved_values.is_same_module(value, survey, repeated):
                    return _Carried("module", value, survey, statement, again=repeated)
            except Exception:  # noqa: BLE001, S112  # the user's classes may raise anything: the value itself is saved
                continue
        return None

    def _changes(self, name: str, statement: Statement) -> bool:
        """Return True if a value is bound by a statement itself, or again after it."""
        is_code = isinstance(self.names.get(name), (*_IMPORTED, *_CODE, types.ModuleType))
        return not is_code and any(each.order >= statement.order for each in self._binding(name))

    def _data(self, name: str, value: Any) -> _Carried:
        """Return a value as a literal, or as data in a file.

        Raises:
            PayloadError: Neither is possible.
        """
        text = self.literal_of(value)
        statement = next(self._binding(name), None)
        if text is not None and saved_values.is_map(value):  # its content is not read
            return _Carried("literal", value, None, statement, text)
        try:
            survey = Survey(value)
        except Exception as error:  # noqa: BLE001  # a user's __reduce__ may raise anything
            if text is not None:
                return _Carried("literal", value, None, statement, text)
            raise PayloadError(saved_values.why(name, value, error)) from None
        if text is not None:
            return _Carried("literal", value, survey, statement, text)
        if saved_values.is_tensor(value):
            return _Carried("tensor", value, survey, statement)
        if saved_values.is_map(value):
            self.notes.append(f"`{name}` is mapped from a file, and the script gets a copy of it")
        if saved_values.is_array(value):
            return _Carried("array", value, survey, statement)
        self._refuse_gpu(name, survey)
        self._waiting += survey.definitions
        return _Carried("object", value, survey, statement)

    def _refuse_gpu(self, name: str, survey: Survey) -> None:
        if any(each.is_cuda for each in survey.tensors.values()):
            raise PayloadError(f"`{name}` holds tensors of a GPU: move them to the CPU first, or {FIX}")

    # -------------------------------------------------------------- the outcome
    def missing(self) -> dict[str, str]:
        """Return the names that functions and classes of the script use and the notebook lacks, with a user of each."""
        found = {name: each.statement for name, each in self._carried.items() if each.kind == "definition"}
        bound = {name for each in found.values() if each is not None for name in each.sets}
        known = bound | self.hidden | self.names.keys() | vars(builtins).keys()
        return {name: user for user, each in found.items() if each is not None for name in each.reads - known}

    def settle(self) -> None:
        """Keep what several names share in one file, and check the size of all data.

        Raises:
            PayloadError: There is too much data.
        """
        shared = {name: each.shared for name, each in self._carried.items()}
        kinds = {name: each.kind for name, each in self._carried.items()}
        joined = {name for name, kind in kinds.items() if kind == "object"}
        alone = [name for name, kind in kinds.items() if kind in ("module", "literal", "tensor")]
        for i, name in enumerate(alone):
            for other in alone[i + 1 :]:
                if {kinds[name], kinds[other]} != {"tensor"} and shared[name] & shared[other]:
                    joined |= {name, other}
        more = joined
        while more:
            more = {n for n in shared if n not in joined and any(shared[n] & shared[other] for other in joined)}
            joined |= more
        for name in joined:
            each = self._carried[name]
            if each.survey is not None and each.kind != "object":
                self._refuse_gpu(name, each.survey)
                self._carried[name] = _Carried("object", each.value, each.survey, each.statement)
                self.need(each.survey.definitions)
        sizes = {n: each.survey.size for n, each in self._carried.items() if each.survey and _is_in_file(each)}
        if sum(sizes.values()) > saved_values.MAX_DATA_BYTES:
            largest = max(sizes, key=lambda name: sizes[name])
            raise PayloadError(
                f"`{largest}` has {in_words(sizes[largest])}, and the data beside a script may have "
                f"{in_words(saved_values.MAX_DATA_BYTES)}: load it in the cell or function"
            )

    def saved(self) -> dict[str, Any]:
        """Return what is loaded with ``weights_only=True``: tensors, arrays and weights by name."""
        found: dict[str, Any] = {}
        for name, each in self._carried.items():
            if each.kind in ("tensor", "array"):
                found[name] = saved_values.compact(each.value)
            elif each.kind == "module":
                found[name] = {key: value.cpu() for key, value in each.value.state_dict().items()}
            elif each.kind == "object" and saved_values.is_plain(each.value):
                found[name] = each.value
        return found

    def objects(self) -> dict[str, Any]:
        """Return what only pickle can load."""
        plain = self.saved()
        return {n: each.value for n, each in self._carried.items() if each.kind == "object" and n not in plain}

    def entries(self, saved: str, objects: str) -> list[Entry]:
        """Return the parts of the script, in an order in which they run.

        Args:
            saved: The script's name for what is loaded safely.
            objects: The same for what pickle loads.
        """
        found: dict[int, Entry] = {}
        by_name: dict[str, Entry] = {}
        pickled = self.objects()
        for name, each in self._carried.items():
            order = each.statement.order if each.statement is not None else (0, 0)
            bound = frozenset({name})
            if each.kind in ("definition", "expression", "module") and each.statement is not None:
                statement = each.statement
                loads = ""
                if each.kind == "module":
                    loads = f'\n{name}.load_state_dict({saved}["{name}"])'
                if saved_values.is_module(each.value) and not each.value.training:
                    loads += f"\n{name}.eval()"
                entry = found.get(id(statement)) or Entry(
                    order, statement.text + loads, statement.binds, statement.reads, statement.reads_at_once
                )
                found[id(statement)] = entry
            elif each.kind == "literal":
                entry = found[id(each)] = Entry(
                    order, _assignment(name, each), bound, frozenset(), _names_in(each.text)
                )
            elif name in pickled:
                needed = frozenset(each.survey.definitions if each.survey else ())
                text = f'{name} = {objects}["{name}"]'
                entry = found[id(each)] = Entry(order, text, bound, needed, needed | {objects})
            else:
                suffix = ".numpy()" if each.kind == "array" else ""
                if each.kind == "tensor" and each.value.is_cuda:
                    suffix = ".to(f\"cuda:{os.environ['LOCAL_RANK']}\")"
                    self.modules.add("os")
                entry = found[id(each)] = Entry(order, f'{name} = {saved}["{name}"]{suffix}', bound)
            by_name[name] = entry
        if pickled:
            needed = frozenset(d for name in pickled for d in (self._carried[name].survey or Survey(None)).definitions)
            load = f"{objects} = torch.load({beside('.objects.pt')}, weights_only=False)"
            load = f"# A pickle can run any code: load only one that you trust.\n{load}"
            first = min(by_name[name].order for name in pickled)
            by_name[objects] = found[0] = Entry(first, load, frozenset({objects}), needed, needed)
            self.modules.add("pathlib")
        return list(in_order(sorted(found.values(), key=lambda entry: entry.order), by_name))


def _assignment(name: str, literal: _Carried) -> str:
    """Return the notebook's own line if it says the same, else a new one."""
    value = literal.statement.value if literal.statement is not None else None
    if literal.statement is not None and value is not None and ast.unparse(value) == _normal(literal.text):
        return literal.statement.text
    line = f"{name} = {literal.text}"
    if len(line) <= _LINE_CHARS or type(literal.value) not in (list, tuple, dict) or _names_in(literal.text):
        return line
    return f"{name} = {pprint.pformat(literal.value, width=_LINE_CHARS, sort_dicts=False)}"


def _normal(text: str) -> str:
    return ast.unparse(ast.parse(text, mode="eval"))


def _names_in(text: str) -> frozenset[str]:
    return frozenset(node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name))


def _is_in_file(each: _Carried) -> bool:
    return each.kind in ("module", "tensor", "array", "object")
