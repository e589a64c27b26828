"""The payload of a task on kept ranks: the function or cell, and the notebook's names that the ranks lack."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from nblaunch.errors import ArgumentError, PayloadError
from nblaunch.launch import payload as payloads
from nblaunch.launch.output.log_directory import state_root
from nblaunch.launch.payload import Shipment
from nblaunch.launch.result import Sent
from nblaunch.launch.session_ranks import SessionRanks
from nblaunch.launch.turn_queue import Ticket
from nblaunch.transfer import parameters, pickling
from nblaunch.transfer.parcel import pack
from nblaunch.transfer.sent_names import Gathered
from nblaunch.wire.messages import Cell, Payload, Settings, Source
from nblaunch.wire.session_messages import Question, SentName

_FIX = "create it in the ranks, or send the data to create it from"


@dataclass(frozen=True, slots=True)
class SessionTask:
    """A packed task.

    Attributes:
        payload: What runs.
        shipment: The same, packed.
        names: The notebook's names that it binds.
    """

    payload: Payload
    shipment: Shipment
    names: Mapping[str, SentName]


def pack_cell(cell: Cell, used: Sequence[str], ranks: SessionRanks, ticket: Ticket) -> SessionTask:
    """Pack a cell that uses these names of the notebook.

    Raises:
        PayloadError: A name that it uses cannot be sent, and the ranks do not have it.
    """
    payload = Payload(cell, (), {}, None, _settings(ranks), {}, **payloads.effects_of_cells())
    return _pack(payload, used, (), ranks, ticket)


def pack_question(question: Question, ranks: SessionRanks, ticket: Ticket) -> SessionTask:
    """Pack a question that is a task of its own."""
    packed = _pack(Payload(question, (), {}, None, Settings(), {}), (), (), ranks, ticket)
    return replace(packed, shipment=replace(packed.shipment, sources=ranks.last_sources))


def pack_call(function: Any, args: Any, kwargs: Any, ranks: SessionRanks, ticket: Ticket) -> SessionTask:
    """Pack a call.

    Raises:
        ArgumentError: The function cannot be called with these arguments.
        PayloadError: The function or an argument cannot be sent.
    """
    if not callable(function):
        cell = "; %%distributed runs a cell" if isinstance(function, str) else ""
        raise ArgumentError(f"function={function!r:.80}: must be a function, not {pickling.describe(function)}{cell}")
    try:
        arguments = parameters.check(function, args, kwargs, ranks.plan.world_size)
    except TypeError as error:
        raise ArgumentError(
            f"{parameters.summary(args, kwargs)} do not fit {payloads.name_of(function)}: {error}"
        ) from None
    payload = Payload(function, args, kwargs, None, _settings(ranks), {}, **payloads.effects_of_cells())
    return _pack(payload, (), (function, args, kwargs), ranks, ticket, arguments)


def gather_values(values: Mapping[str, Any], ranks: SessionRanks, only: Sequence[int] | None) -> Gathered:
    """Return what `Session.push` sends: these values, whatever the ranks have, and the names that they use.

    Raises:
        PayloadError: A value cannot be sent.
    """
    try:
        gathered = ranks.sent.gather_pushed(values, ranks.present)
    except Exception as error:  # noqa: BLE001  # a user's __reduce__; its frames are nblaunch's own
        raise PayloadError(_why(values) or f"push: {error}") from None
    where = None if only is None else tuple(only)
    pushed = {name: replace(gathered.names[name], ranks=where) for name in values}
    return replace(gathered, names={**gathered.names, **pushed})


def _pack(
    payload: Payload,
    used: Iterable[str],
    code: Sequence[Any],
    ranks: SessionRanks,
    ticket: Ticket,
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> SessionTask:
    sources: dict[str, Source] = dict(payloads.sources_in(payload))
    bound = {each.name for names in ranks.bound for each in names}
    gathered: Gathered | None = None
    try:
        sent = [*code, *payload.attributes.values()]
        gathered = ranks.sent.gather(used, sent, ranks.present, bound, is_idle=ranks.queue.is_first(ticket))
        names = gathered.names

        def note(files: set[str]) -> dict[str, Source]:
            sources.update(payloads.sources_of(files))
            return sources

        def build(found: pickling.Found) -> Payload:
            return replace(
                payload,
                names=names,
                sources=pickling.Late(lambda: note(found.files)),
                main=pickling.Late(lambda: found.main),
            )

        parts = {name: each.value for name, each in names.items()}
        parts |= {
            name if name not in parts else f"{name} of {payloads.name_of(payload.function)}": value
            for name, value in arguments.items()
        }
        parcel = pack(build, state_root, parts, gathered.home, is_cached=True, is_here=ranks.sent.is_here)
    except Exception as error:  # noqa: BLE001  # a user's __reduce__; its frames are nblaunch's own
        name = payloads.name_of(payload.function)
        if code and isinstance(code[0], types.FunctionType):
            used = [*used, *pickling.globals_used(code[0])]
        suspects = {name: ranks.sent.names[name] for name in used if name in ranks.sent.names}
        suspects |= {f"args of {name}": code[1:]} if code else {}
        raise PayloadError(_why(suspects) or f"{name} cannot be sent to the ranks: {error}") from None
    return SessionTask(payload, Shipment(parcel, sources, Sent.of(parcel)), names)


def _why(values: Mapping[str, Any]) -> str:
    for name, value in values.items():
        reason = pickling.explain(value, f"`{name}`")
        if reason is not None:
            return f"{reason}: {reason.advice or _FIX}"
    return ""


def _settings(ranks: SessionRanks) -> Settings:
    """Return the notebook's random states and defaults for each rank's first task; later it goes on with its own."""
    return replace(payloads.settings(), ranks=tuple(sorted(ranks.unset))) if ranks.unset else Settings()
