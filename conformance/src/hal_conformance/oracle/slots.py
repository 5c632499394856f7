"""The oracle of slot state: the expected value of each byte by the contract, in plain Python and NumPy.

It is written from the contract (docs/contract.md) and the documentation of fields, tasks and steps. It shares no code
with the devices, :mod:`hal_core.slots.insertion`, :mod:`hal_core.slots.update`, :mod:`hal_core.slots.host_table` or
:mod:`hal_core.output.ticket`. From the layout it takes only a field's place, its type and its reset value.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from hal_core.slots.admission import AdmittedRequest, Request, SamplingParams
from hal_core.slots.declared import StateField
from hal_core.slots.fields import SplitRole
from hal_core.slots.layout import StateLayout
from hal_core.slots.tasks import Task, TaskKind

from ..harness.backdoor import Bytes, poisoned
from .values import stored

ROWS = ("token_ids", "block_tables", "stop_seqs", "stop_seqs_len", "bad_words")
"""Rows of a request's own length; bytes after the largest length written must not be read (G11)."""

LATE = ("topk_token_ids", "topk_logprobs", "topk_ranks")
"""Fields written only by a step that reports log-probabilities; until then they must not be read."""

SHOWN = 64
"""Elements of a row that a message shows."""

KEPT = (*ROWS, *LATE, "last_preempted", "last_aborted")
"""Fields that entering and leaving a slot do not reset."""


@dataclass
class Resident:
    """A request in a slot, and its progress."""

    request: Request
    admission_id: int
    admitted: AdmittedRequest
    prefilled: int
    blocks: int

    @property
    def total(self) -> int:
        """Tokens known when it entered."""
        return len(self.request.prompt) + len(self.request.output)


@dataclass(frozen=True)
class Leaver:
    """A request that left its slot and that no output has reported yet."""

    request_id: str
    kind: TaskKind


class Model:
    """The expected state: ``block`` are its bytes, ``cells`` the fields ``[slots, width]`` over them.

    - ``residents``: slot to the request in it; ``leavers``: slot to its departed, unreported requests.
    - ``written``: row field to the length written to each slot's row since it was last reset.
    - ``bound``: the same for ``token_ids`` as an upper bound for a host that does not know how many drafts a step
      accepted; between the two a reset is optional (``loose``).
    - ``failed``: admission id to the tokens generated, of requests that got a token outside the vocabulary (G21).
    - ``declared``: the fields of the state besides the slot table's.
    """

    def __init__(self, layout: StateLayout, declared: Sequence[StateField] = ()) -> None:
        self.layout, self.sizes, self.declared = layout, layout.sizes, tuple(declared)
        self.block = poisoned(layout.nbytes)
        self.cells: dict[str, np.ndarray[Any, Any]] = {}
        for name, place in layout.fields.items():
            part = self.block[place.offset : place.offset + place.stride * self.sizes.num_slots]
            self.cells[name] = part.view(place.field.dtype.storage).reshape(self.sizes.num_slots, place.width)
            if name not in ROWS and name not in LATE:
                self.cells[name][...] = self.reset(name)
        for header in layout.headers.values():
            self.block[header.offset : header.end] = 0
        self.requests: dict[int, Request] = {}
        self.residents: dict[int, Resident] = {}
        self.leavers: dict[int, list[Leaver]] = {}
        self.failed: dict[int, int] = {}
        self.written = {name: [0] * self.sizes.num_slots for name in ROWS}
        self.bound = [0] * self.sizes.num_slots
        self.loose: list[tuple[int, int, int]] = []

    def reset(self, name: str) -> Any:  # noqa: ANN401 (int, float or bool)
        """Return the value of a field in an empty slot."""
        return self.layout.fields[name].field.reset

    def get(self, name: str, slot: int) -> Any:  # noqa: ANN401 (int, float or bool)
        """Return the value of a scalar field."""
        return self.cells[name][slot, 0].item()

    def set(self, name: str, slot: int, values: Any) -> None:  # noqa: ANN401 (a scalar, or the first elements)
        """Set the first elements of a field of a slot."""
        row = self.cells[name][slot]
        listed = np.atleast_1d(np.asarray(values, row.dtype))
        row[: len(listed)] = listed

    # -- insert_tasks ------------------------------------------------------------------------------------------

    def insert(self, tasks: Iterable[Task]) -> None:
        """Apply valid tasks in their order (G9)."""
        for task in tasks:
            if task.kind in (TaskKind.PREFILL, TaskKind.REMOTE_PREFILL):
                self._enter(task)
            elif task.kind in (TaskKind.PREFILL_CHUNK, TaskKind.MORE_BLOCKS):
                self._go_on(task)
            else:
                self._leave(task)

    def _enter(self, task: Task) -> None:
        slot, request = task.slot, self.requests[task.request.admission_id]
        handoff = task.kind is TaskKind.REMOTE_PREFILL
        tokens = [*request.prompt, *request.output, *([task.first_token] if handoff else [])]
        self._empty(slot)
        for name, value in request_values(request, task.request.admission_id).items():
            self.set(name, slot, value)
        for field in self.declared:
            if field.value is not None:
                value = request.extra[field.name] if isinstance(field.value, str) else field.value(request)
                self.set(field.name, slot, stored(value, self.layout.fields[field.name].field.dtype))
        self.set("blocks_num", slot, len(task.blocks))
        if handoff:
            self.set("seq_lens_decoder", slot, len(tokens) - 1)
            self.set("seq_lens_this_time", slot, 1 + len(task.drafts))
            self.set("next_tokens", slot, task.first_token)
            self.set("step_idx", slot, len(request.output) + 1)
            self.set("draft_num", slot, len(task.drafts))
            self.set("draft_tokens", slot, list(task.drafts))
        else:
            self.set("seq_lens_decoder", slot, task.num_computed_tokens)
            self.set("seq_lens_this_time", slot, task.num_scheduled_tokens)
            self.set("seq_lens_encoder", slot, task.num_scheduled_tokens)
        self._rows(slot, request, tokens, task.blocks)
        total = len(request.prompt) + len(request.output)
        prefilled = total if handoff else task.num_computed_tokens + task.num_scheduled_tokens
        self.residents[slot] = Resident(request, task.request.admission_id, task.request, prefilled, len(task.blocks))

    def _rows(self, slot: int, request: Request, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        stops, longest = request.params.stop_sequences, self.sizes.max_stop_length
        padded = [token for stop in stops for token in (*stop, *[-1] * (longest - len(stop)))]
        self._row("token_ids", slot, tokens)
        self._row("block_tables", slot, blocks)
        self._row("stop_seqs", slot, padded)
        self._row("stop_seqs_len", slot, [len(stop) for stop in stops])
        self._row("bad_words", slot, request.params.bad_words)
        self.loose = [(at, max(low, len(tokens)) if at == slot else low, high) for at, low, high in self.loose]
        if self.bound[slot] > max(self.written["token_ids"][slot], len(tokens)):
            low = max(self.written["token_ids"][slot], len(tokens))
            self.loose.append((slot, low, self.bound[slot]))
        self.written["token_ids"][slot] = self.bound[slot] = len(tokens)

    def _row(self, name: str, slot: int, values: Sequence[int]) -> None:
        """Write a row, and reset it from there to the largest length written before (G11)."""
        row, before = self.cells[name][slot], self.written[name][slot]
        row[: len(values)] = values
        if before > len(values):
            row[len(values) : before] = self.reset(name)
        if name != "token_ids":
            self.written[name][slot] = len(values)

    def _go_on(self, task: Task) -> None:
        slot, resident = task.slot, self.residents[task.slot]
        row = self.cells["block_tables"][slot]
        row[resident.blocks : resident.blocks + len(task.blocks)] = task.blocks
        resident.blocks += len(task.blocks)
        self.written["block_tables"][slot] = max(self.written["block_tables"][slot], resident.blocks)
        self.set("blocks_num", slot, resident.blocks)
        if task.kind is TaskKind.PREFILL_CHUNK:
            self.set("seq_lens_this_time", slot, task.num_scheduled_tokens)
            self.set("seq_lens_encoder", slot, task.num_scheduled_tokens)
            resident.prefilled += task.num_scheduled_tokens

    def _leave(self, task: Task) -> None:
        resident = self.residents.pop(task.slot)
        self._empty(task.slot, {field.name for field in self.declared if field.kept})
        name = "last_preempted" if task.kind is TaskKind.PREEMPTED else "last_aborted"
        self.set(name, task.slot, resident.admission_id)
        self.leavers.setdefault(task.slot, []).append(Leaver(resident.request.request_id, task.kind))

    def _empty(self, slot: int, kept: Iterable[str] = ()) -> None:
        for name, cells in self.cells.items():
            if name not in KEPT and name not in kept:
                cells[slot] = self.reset(name)

    # -- the worker --------------------------------------------------------------------------------------------

    def release(self, slots: Iterable[int]) -> None:
        """Forget requests that have ended; the device's memory is unchanged."""
        for slot in slots:
            self.residents.pop(slot, None)

    def hand(self, drafts: Mapping[int, Sequence[int]]) -> None:
        """Set drafts for the next step: the row, the reset of its rest, their number, and the step's inputs (G12)."""
        for slot, tokens in drafts.items():
            if not tokens:
                continue
            feeds = self.residents[slot].request.role is not SplitRole.PREFILL
            self.set("draft_tokens", slot, [*tokens, *[-1] * (self.sizes.max_draft_tokens - len(tokens))])
            self.set("draft_num", slot, len(tokens))
            self.set("seq_lens_this_time", slot, 1 + len(tokens) if feeds else 0)

    def clean_up(self, order: Iterable[int]) -> None:
        """Clean up as save_output does, on every rank (G18)."""
        for slot in order:
            self.set("last_preempted", slot, 0)
            self.set("last_aborted", slot, 0)
            self.leavers.pop(slot, None)

    def may_append(self, order: Iterable[int], most: int) -> None:
        """Note that a step with these slots may append up to ``most`` tokens to each."""
        for slot in order:
            self.bound[slot] = min(self.bound[slot] + most, self.sizes.max_model_len)


def mixed_seed(seed: int, request_id: str) -> int:
    """Return seed and name of a request mixed as the contract defines: CRC-32 times the golden ratio of 64 bits, 63
    bits kept."""
    return (seed ^ (zlib.crc32(request_id.encode()) * 11400714819323198485)) % 2**63


def _numbers(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that are one number and have a field of their name."""
    given = {one.name: getattr(params, one.name) for one in fields(params)}
    others = {"seed", "min_tokens", "max_tokens", "logprobs"}
    return {name: value for name, value in given.items() if isinstance(value, int | float) and name not in others}


def request_values(request: Request, admission_id: int) -> Mapping[str, Any]:
    """Return field to value for every field that a request itself determines."""
    params = request.params
    return {
        "request_serial": admission_id,
        "prompt_lens": len(request.prompt),
        "step_idx": len(request.output),
        "stop_flags": False,
        "split_role": {SplitRole.MIXED: 0, SplitRole.PREFILL: 1, SplitRole.DECODE: 2}[request.role],
        **_numbers(params),
        "seed": mixed_seed(params.seed, request.request_id),
        "min_dec_len": params.min_tokens,
        "max_dec_len": params.max_tokens,
        "logprobs_num": -1 if params.logprobs is None else params.logprobs,
        "eos_num": len(params.eos_token_ids),
        "eos_token_ids": list(params.eos_token_ids),
        "stop_seqs_num": len(params.stop_sequences),
        "bad_words_num": len(params.bad_words),
    }


def difference(model: Model, got: Bytes) -> str:
    """Return "" if a state's bytes equal the model, else the first difference, got and expected."""
    for slot, low, high in model.loose:  # The host may not have known the length of the row.
        place = model.layout.fields["token_ids"]
        begin = place.offset + slot * place.stride
        cell = model.cells["token_ids"][slot]
        have = got[begin : begin + place.stride].view(cell.dtype)
        chosen = np.arange(low, high)[have[low:high] == model.reset("token_ids")]
        cell[chosen] = model.reset("token_ids")
    model.loose.clear()
    wrong = np.flatnonzero(got != model.block)
    return describe(model, got, int(wrong[0])) if len(wrong) else ""


def describe(model: Model, got: Bytes, at: int) -> str:
    """Return field, slot and element of byte ``at``, with its value and the expected one."""
    for name, place in model.layout.fields.items():
        end = place.offset + place.stride * model.sizes.num_slots
        if place.offset <= at < end:
            slot, inside = divmod(at - place.offset, place.stride)
            row = got[place.offset + slot * place.stride :][: place.stride].view(model.cells[name].dtype)
            element = inside // place.field.dtype.itemsize
            wanted = model.cells[name][slot]
            low = 0 if len(row) <= SHOWN else max(0, element - 4)
            what = "whole row" if len(row) <= SHOWN else f"from {low} on"
            return (
                f"{name}[{slot}, {element}] is {row[element]!r}, but should be {wanted[element]!r}"
                f" ({what}: got {row[low : low + SHOWN].tolist()}, should be {wanted[low : low + SHOWN].tolist()})"
            )
    return f"byte {at} lies between the fields; got {got[at]:#x}, but should be untouched ({model.block[at]:#x})"
