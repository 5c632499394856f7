"""Schedulers of a prefill/decode split: one computes the first token and keeps the blocks, the other continues from
there."""

from __future__ import annotations

from typing import NamedTuple

from hal_core import OutputRecord, Request, SplitRole, Task, TaskKind
from msgspec.structs import replace

from .generation import Finished, Generation, tokens_to_keep
from .scheduler import Grown, Scheduler

Key = tuple[str, int]
"""Name of a request, and its attempt number."""


class Prefilled(NamedTuple):
    """A request with its first token and without a slot; its blocks are kept until :meth:`release`."""

    request_id: str
    tokens: tuple[int, ...]
    aborted: bool


class PrefillScheduler(Scheduler):
    """Scheduler of a prefill worker, whose requests stop with their first token.

    No request grows here, so none is preempted. ``prefilled``: requests whose first token is in a record that was
    taken; the caller takes them out.
    """

    one_stream = False

    def __init__(self, *args: object, **named: object) -> None:
        super().__init__(*args, **named)  # type: ignore[arg-type]
        self.entry_tokens = self.tokens_per_step  # a proposer drafts behind the first token
        self.prefilled: list[Prefilled] = []
        self._kept: dict[str, list[int]] = {}

    @property
    def kept(self) -> int:
        """Number of requests that have left their blocks here."""
        return len(self._kept)

    def add(self, request: Request) -> None:
        """As :meth:`Scheduler.add`, in the prefill role."""
        super().add(replace(request, role=SplitRole.PREFILL))

    def has_room(self, request: Request) -> bool:
        """As :meth:`Scheduler.has_room`; False for a request whose blocks of an earlier attempt are still here."""
        return request.request_id not in self._kept and super().has_room(request)

    def update(self, record: OutputRecord) -> list[Finished]:
        """As :meth:`Scheduler.update`; a prefilled request leaves its slot, and its blocks stay."""
        ended = super().update(record)
        for generation in [one for one in self.running if one.slot >= 0 and one.known > one.goal]:
            name = generation.request_id
            self._remove(generation)
            self._in_flight.forget(generation)
            self._holdings.give_back(generation.slot, ())
            self._kept[name] = generation.blocks
            generation.slot, generation.blocks = -1, []
            del self._live[name]
            self.prefilled.append(Prefilled(name, tuple(generation.generated), generation.aborted))
        return ended

    def _grow(self, tasks: list[Task], short: list[Generation]) -> Grown:
        """Release the slots of requests whose whole prompt was fed: each gets one token."""
        return {}

    def _look_ahead(self, decoding: list[Generation], grown: Grown) -> None:
        """Return no drafts: none are fed here."""

    def keeps(self, request_id: str) -> bool:
        """Return whether the blocks of a request are kept."""
        return request_id in self._kept

    def release(self, request_id: str) -> None:
        """Free the blocks of a request: no peer reads them any more."""
        self.pool.release(self._kept.pop(request_id))


class DecodeScheduler(Scheduler):
    """Scheduler of a decode worker, which continues requests that a prefill worker computed.

    A slot and blocks are promised first (``reserve``), for one attempt at a request. Then the request is inserted
    (``insert``), or the attempt is given up (``drop``). A request that is preempted here is computed again here.
    """

    one_stream = False

    def __init__(self, *args: object, **named: object) -> None:
        super().__init__(*args, **named)  # type: ignore[arg-type]
        self._promised: dict[Key, Generation] = {}
        self._to_enter: list[tuple[Generation, tuple[int, ...]]] = []

    @property
    def load(self) -> int:
        """Number of requests that have not ended, promised ones included."""
        return len(self._live) + len(self._promised)

    @property
    def promised(self) -> int:
        """Number of promised places."""
        return len(self._promised)

    def has_place(self, request: Request) -> bool:
        """Return whether there is a slot and blocks for the request now. Requests that were preempted here come
        first."""
        free = bool(self._slots) and not (self.waiting or self._preempted)
        return free and self._wanted(request) <= self.pool.free

    def _wanted(self, request: Request) -> int:
        known, most = len(request.prompt) + len(request.output), request.params.max_tokens
        ahead = known + 1 + 2 * self.tokens_per_step
        return self._blocks_for(min(ahead, tokens_to_keep(len(request.prompt), most)))

    def reserve(self, request: Request, attempt: int) -> list[int] | None:
        """Promise a slot, and blocks for the request and its next tokens. Return the blocks for its keys and values, in
        their order, or None without room."""
        if not self.has_place(request):
            return None
        mine = replace(request, role=SplitRole.DECODE)
        generation = Generation(mine, self._admit(mine), len(request.prompt), list(request.output))
        generation.slot, generation.blocks = self._slots.pop(), self.pool.allocate(self._wanted(request))
        self._promised[request.request_id, attempt] = generation
        return generation.blocks[: self._blocks_for(len(request.prompt) + len(request.output))]

    def drop(self, key: Key) -> None:
        """End the attempt: no peer writes its blocks any more."""
        generation = self._promised.pop(key)
        self._slots.append(generation.slot)
        self.pool.release(generation.blocks)

    def insert(self, key: Key, first_token: int, drafts: tuple[int, ...]) -> None:
        """Insert a request whose blocks have arrived, with the next step, behind its first token."""
        generation = self._promised.pop(key)
        generation.generated.append(first_token)
        generation.enter(generation.slot, generation.blocks, generation.known)
        self._arrivals += 1
        generation.arrive(self._arrivals)
        self._live[generation.request_id] = generation
        self._to_enter.append((generation, drafts))

    def take_back(self, key: Key) -> bool:
        """Turn an insertion back into a promise, unless a step has it already. Return whether that was possible."""
        for entering in self._to_enter:
            generation = entering[0]
            if generation.request_id == key[0]:
                self._to_enter.remove(entering)
                self._promised[key] = self._live.pop(key[0])
                return True
        return False

    def withdraw(self) -> tuple[list[Request], list[Finished]]:
        """As :meth:`Scheduler.withdraw`, including requests that wait for their insertion."""
        self._to_enter.clear()
        self._promised.clear()
        return super().withdraw()

    def _grow(self, tasks: list[Task], short: list[Generation]) -> Grown:
        """As :meth:`Scheduler._grow`; then insert the requests whose blocks have arrived."""
        grown = super()._grow(tasks, short)
        for generation, drafts in self._to_enter:
            self._run(generation)
            tasks.append(
                Task(
                    TaskKind.REMOTE_PREFILL,
                    generation.slot,
                    generation.admitted,
                    generation.admitted.total,
                    blocks=generation.blocks,
                    first_token=generation.generated[-1],
                    drafts=drafts,
                )
            )
        self._to_enter.clear()
        return grown
