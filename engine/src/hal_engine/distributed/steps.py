"""Step messages: the work of all ranks of a group in one step, as bytes.

A message is a MessagePack map (:class:`_Body`) with the number of the group and that of the step, counted from 1
without holes. Token and block ids are the bytes of little-endian int32 arrays. A reader skips unknown names.

A request is sent once, with the task by which it enters a slot. Later tasks name it by slot and name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from hal_core import (
    ENTERING,
    AdmittedRequest,
    FrameError,
    InvalidValue,
    Request,
    SamplingParams,
    SplitRole,
    Task,
    TaskKind,
)

from hal_engine.transport.channel import Buffer

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Id = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 31) - 1)]
_MOST_STEPS = (1 << 63) - 1
_IDS = np.dtype("<i4")


class _Request(msgspec.Struct, omit_defaults=True, gc=False):
    prompt: bytes
    params: SamplingParams
    output: bytes = b""
    role: SplitRole = SplitRole.MIXED


class _Task(msgspec.Struct, omit_defaults=True, gc=False):
    kind: TaskKind
    slot: Count
    name: str
    request: _Request | None = None
    computed: Count = 0
    scheduled: Count = 0
    blocks: bytes = b""
    first_block: Count = 0
    first_token: Id = -1
    drafts: bytes = b""


class _Body(msgspec.Struct, gc=False):
    group: Count
    number: Annotated[int, msgspec.Meta(ge=1, le=_MOST_STEPS)]
    tasks: list[_Task]
    taken: Annotated[int, msgspec.Meta(ge=0, le=_MOST_STEPS)] = 0


def _plain(value: object) -> object:
    """Convert NumPy's numbers to Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise InvalidValue(f"{value!r} cannot be sent", cure="give numbers and texts", argument="params")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoder = msgspec.msgpack.Decoder(_Body)


@dataclass(frozen=True, slots=True)
class TaskOrder:
    """A task in a message: as :class:`hal_core.Task`, with its name, and with the request itself if it enters."""

    kind: TaskKind
    slot: int
    name: str
    request: Request | None = None
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0
    blocks: tuple[int, ...] = ()
    first_block: int = 0
    first_token: int = -1
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOrder:
    """One decoded step message: the number of the group and of the step, and the tasks in their order.

    ``taken``: how many steps' outputs the engine had taken, so that requests that ended in them have left their slots.
    """

    group: int
    number: int
    tasks: tuple[TaskOrder, ...]
    taken: int = 0


def orders_of(tasks: Sequence[Task]) -> tuple[TaskOrder, ...]:
    """Return the scheduler's tasks as a message holds them."""
    return tuple(
        TaskOrder(
            task.kind,
            task.slot,
            task.request.request_id,
            _request_of(task.request) if task.kind in ENTERING else None,
            task.num_computed_tokens,
            task.num_scheduled_tokens,
            tuple(task.blocks),
            task.first_block,
            task.first_token,
            tuple(task.drafts),
        )
        for task in tasks
    )


def _request_of(admitted: AdmittedRequest) -> Request:
    """Return an admitted request in the form in which it is admitted again at its insertion."""
    tokens, prompt = admitted.tokens.tolist(), admitted.prompt_len
    return Request(admitted.request_id, tokens[:prompt], admitted.params, tuple(tokens[prompt:]), admitted.role)


def encode_step(order: StepOrder) -> bytes:
    """Return one step message. Raises :class:`InvalidValue` for numbers that a message cannot hold."""
    return _encoder.encode(_Body(order.group, order.number, [_packed(task) for task in order.tasks], order.taken))


def decode_step(data: Buffer) -> StepOrder:
    """Return the step message. Raises only :class:`FrameError` for invalid bytes."""
    try:
        body = _decoder.decode(data)
        tasks = tuple(_unpacked(task) for task in body.tasks)
    except (msgspec.MsgspecError, InvalidValue, ValueError, RecursionError) as error:
        raise FrameError(f"a step message is unreadable: {error}", cure="install one version on all hosts") from error
    return StepOrder(body.group, body.number, tasks, body.taken)


def _packed(order: TaskOrder) -> _Task:
    request = order.request
    packed = None
    if request is not None:
        packed = _Request(_bytes(request.prompt), request.params, _bytes(request.output), request.role)
    return _Task(
        order.kind,
        order.slot,
        order.name,
        packed,
        order.num_computed_tokens,
        order.num_scheduled_tokens,
        _bytes(order.blocks),
        order.first_block,
        order.first_token,
        _bytes(order.drafts),
    )


def _unpacked(task: _Task) -> TaskOrder:
    request = task.request
    if (request is not None) != (task.kind in ENTERING):
        raise FrameError(f"a task {task.kind.name} {'with' if request else 'without'} a request")
    entering = None
    if request is not None:
        entering = Request(task.name, _ids(request.prompt), request.params, _ids(request.output), request.role)
    return TaskOrder(
        task.kind,
        task.slot,
        task.name,
        entering,
        task.computed,
        task.scheduled,
        _ids(task.blocks),
        task.first_block,
        task.first_token,
        _ids(task.drafts),
    )


def _bytes(ids: Sequence[int]) -> bytes:
    array = np.asarray(ids, np.int64) if len(ids) else np.zeros(0, np.int64)
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < 1 << 31:
        raise InvalidValue("ids must be 0 to 2**31 - 1", cure="admit the request first", argument="tasks")
    return array.astype(_IDS).tobytes()


def _ids(data: bytes) -> tuple[int, ...]:
    if len(data) % _IDS.itemsize:
        raise FrameError(f"{len(data)} bytes are no whole number of ids")
    return tuple(np.frombuffer(data, _IDS).tolist())
