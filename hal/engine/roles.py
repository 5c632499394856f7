"""Schedulers of a prefill/decode split: one gives the first token and keeps the blocks, the other goes on behind it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from hal_core import OutputRecord, Request, SplitRole, Task, TaskKind

from .generation import Finished, Generation, tokens_to_keep
from .scheduler import Grown, Scheduler

Key = tuple[str, int]
"""Name of a request, and the attempt at handing it over."""


class Prefilled(NamedTuple):
    """A request that has its first token and no slot any more; its blocks are kept until :meth:`release`."""

    request_id: str
    tokens: tuple[int, ...]
    aborted: bool


class PrefillScheduler(Scheduler):
    """Of a worker whose requests, all of the prefill role, stop with the first token that they are given.

    Nothing grows here, so nobody is preempted. ``prefilled``: who has got its first token with a record that was taken;
    to be taken out.
    """

    one_stream = False

    def __init__(self, *args: object, **named: object) -> None:
        super().__init__(*args, **named)  # type: ignore[arg-type]
        self.entry_tokens = self.tokens_per_step  # a proposer drafts behind the first token
        self.prefilled: list[Prefilled] = []
        self._kept: dict[str, list[int]] = {}

    @property
    def kept(self) -> int:
        """How many requests have left their blocks here."""
        return len(self._kept)

    def add(self, request: Request) -> None:
        """As :meth:`Scheduler.add`, in the prefill role."""
        super().add(replace(request, role=SplitRole.PREFILL))

    def has_room(self, request: Request) -> bool:
        """As :meth:`Scheduler.has_room`; one whose blocks of an earlier attempt are still here has none."""
        return request.request_id not in self._kept and super().has_room(request)

    def update(self, record: OutputRecord) -> list[Finished]:
        """As :meth:`Scheduler.update`; who goes on elsewhere leaves its slot, and its blocks stay."""
        ended = super().update(record)
        for generation in [one for one in self.running if one.slot >= 0 and one.known > one.goal]:
            name = generation.request_id
            self.running.remove(generation)
            self._stays.forget(generation)
            self._holdings.give_back(generation.slot, ())
            self._kept[name] = generation.blocks
            generation.slot, generation.blocks = -1, []
            del self._live[name]
            self.prefilled.append(Prefilled(name, tuple(generation.generated), generation.aborted))
        return ended

    def _grow(self, tasks: list[Task]) -> Grown:
        """Nothing grows: who has all its prompt fed is given one token, and is gone."""
        return {}

    def _look_ahead(self, decoding: list[Generation], grown: Grown) -> None:
        """Nobody's drafts are fed here."""

    def keeps(self, request_id: str) -> bool:
        """Whether the blocks of a request are kept."""
        return request_id in self._kept

    def release(self, request_id: str) -> None:
        """Nobody reads the blocks of a request any more."""
        self.pool.release(self._kept.pop(request_id))


class DecodeScheduler(Scheduler):
    """Of a worker that goes on with requests which another one prefilled.

    A slot and blocks are promised first (``reserve``), for one attempt at a request; then the request is let in
    (``insert``), or it is given up (``drop``). One that is preempted here is computed again here.
    """

    one_stream = False

    def __init__(self, *args: object, **named: object) -> None:
        super().__init__(*args, **named)  # type: ignore[arg-type]
        self._promised: dict[Key, Generation] = {}
        self._to_enter: list[tuple[Generation, tuple[int, ...]]] = []

    @property
    def load(self) -> int:
        """How many requests have not ended, those that are promised a place among them."""
        return len(self._live) + len(self._promised)

    @property
    def promised(self) -> int:
        """How many places are promised."""
        return len(self._promised)

    def has_place(self, request: Request) -> bool:
        """Whether there is a slot and blocks for the request now. Whoever was preempted here comes first."""
        free = bool(self._slots) and not (self.waiting or self._preempted)
        return free and self._wanted(request) <= self.pool.free

    def _wanted(self, request: Request) -> int:
        known, most = len(request.prompt) + len(request.output), request.params.max_tokens
        ahead = known + 1 + 2 * self.tokens_per_step
        return self._blocks_for(min(ahead, tokens_to_keep(len(request.prompt), most)))

    def reserve(self, request: Request, attempt: int) -> list[int] | None:
        """Promise a slot, and blocks for the request and its next tokens; those that its keys and values go into, in
        their order, or None without room."""
        if not self.has_place(request):
            return None
        mine = replace(request, role=SplitRole.DECODE)
        generation = Generation(mine, self._admit(mine), len(request.prompt), list(request.output))
        generation.slot, generation.blocks = self._slots.pop(), self.pool.allocate(self._wanted(request))
        self._promised[request.request_id, attempt] = generation
        return generation.blocks[: self._blocks_for(len(request.prompt) + len(request.output))]

    def drop(self, key: Key) -> None:
        """The attempt is over, and nobody writes its blocks."""
        generation = self._promised.pop(key)
        self._slots.append(generation.slot)
        self.pool.release(generation.blocks)

    def insert(self, key: Key, first_token: int, drafts: tuple[int, ...]) -> None:
        """All has arrived: let the request in with the next step, behind its first token."""
        generation = self._promised.pop(key)
        generation.generated.append(first_token)
        generation.enter(generation.slot, generation.blocks, generation.known)
        self._arrivals += 1
        generation.arrival = self._arrivals
        self._live[generation.request_id] = generation
        self._to_enter.append((generation, drafts))

    def take_back(self, key: Key) -> bool:
        """Have an insertion be a promise again, if no step was told of it yet; whether that is so."""
        for entering in self._to_enter:
            generation = entering[0]
            if generation.request_id == key[0]:
                self._to_enter.remove(entering)
                self._promised[key] = self._live.pop(key[0])
                return True
        return False

    def withdraw(self) -> tuple[list[Request], list[Finished]]:
        """As :meth:`Scheduler.withdraw`, with those that were about to be let in."""
        self._to_enter.clear()
        self._promised.clear()
        return super().withdraw()

    def _grow(self, tasks: list[Task]) -> Grown:
        """As :meth:`Scheduler._grow`; then those whose blocks have arrived are let in."""
        grown = super()._grow(tasks)
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
