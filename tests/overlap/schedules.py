"""Runs schedules (``drawn.py``) with the engine over ``MixRunner`` on the sim device, with or without overlap.

``play`` runs one, on one rank or two, and checks on the way that no slot or block is reused while an in-flight step
reads it; ``check`` compares every token with its prediction.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace

from hal_core import ALONE, ENTERING, LEAVING, FinishReason, Group, GroupLost, HalError, StateConfig
from hal_core.runtime.bound import bind
from hal_engine.distributed.requests import RequestTable
from hal_engine.distributed.steps import StepOrder, orders_of
from hal_engine.engine import Engine, Limits, Scheduler
from hal_engine.stepping import AsyncLoop, Stepper
from hal_sim import SimPlugin, communicator
from hal_sim.mixing import MixRunner

from .drawn import VOCAB, expected

END = object()
"""To the second rank: there are no more steps, as opposed to None: exit."""
_jobs = count(1)


class Later:
    """A sink that resolves outputs when they are available, without waiting."""

    session = 1

    def __init__(self):
        self.records, self._pending = [], []

    def put(self, pending):
        self._pending.append(pending)
        self.look()

    def look(self):
        while self._pending and self._pending[0].ready():
            pending = self._pending.pop(0)
            try:
                self.records.append(pending.resolve())
            except HalError as error:  # of a group that is lost
                pending.complete(error)
            else:
                pending.complete(None)

    def close(self, timeout):
        self.look()


class Watched(Stepper):
    """A stepper that fails by assertion when a slot or a block is reused whose request continues behind the launched
    steps, or, where blocks are filled from elsewhere, while an in-flight step reads it.

    ``idle``: the request that left each slot, and its step; ``entered``: the last step with a new request.
    """

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self._tables, self.under_way, self.taken = {}, {}, 0
        self._names, self._over, self._robbed, self.idle = {}, set(), {}, []

    def launch(self, tasks):
        self._over |= {task.request.admission_id for task in tasks if task.kind in LEAVING}
        if any(task.kind in ENTERING for task in tasks):
            self.entered = self.steps
        for task in tasks:
            name = task.request.admission_id
            for number, reads in self.under_way.items():
                for slot, who, blocks in reads:
                    if who != name and ((task.kind in ENTERING and slot == task.slot) or {*blocks} & {*task.blocks}):
                        assert Scheduler.one_stream, f"slot {slot}, blocks {blocks} are read by step {number}"
                        self._robbed.setdefault(who, self.steps - 1)
            self._tables[name] = self._tables.get(name, ()) + tuple(task.blocks)
            self._names[name] = task.request.request_id
        launched = super().launch(tasks)
        order, held = launched.planned.step.order(self.state.name), self.state.host_table.admission_ids
        self.under_way[launched.step.number] = [
            (slot, int(held[slot]), self._tables[int(held[slot])]) for slot in order.tolist() if held[slot]
        ]
        return launched

    def take(self, launched):
        record = super().take(launched)
        number = launched.step.number
        assert number == min(self.under_way), "steps are taken out of their order"
        held = {self._names[who]: who for _, who, _ in self.under_way.pop(number)}
        given = dict(zip(record.request_ids, record.counts.tolist(), strict=True))
        self.idle += [(number, name) for name, who in held.items() if who in self._over and not given.get(name)]
        ended = (name for name, end in zip(record.request_ids, record.finish, strict=True) if end and name in held)
        self._over |= {held[name] for name in ended}
        for who, last in self._robbed.items():
            assert last > number or who in self._over, f"{self._names[who]} was not over when others had its places"
        self.taken += 1
        return record


def stepper_of(device, schedule, sink, group, kind):
    """A stepper of ``kind`` with its own runner and state; the ranks of a group find each other here."""
    state = device.state(schedule.sizes)
    given = SimpleNamespace(device=device, state=state, blocks=schedule.blocks, vocab_size=VOCAB, group=group)
    runner = MixRunner(given)
    if group.size > 1:
        device.open_group(state=state, group=group)
    return kind(device, state, runner, sink, blocks=schedule.blocks, group=group)


@contextlib.contextmanager
def same_names():
    """Give both ranks of this process one segment name; by its count of openings they would differ."""
    former = communicator._segment_name
    communicator._segment_name = lambda job, ranks: f"/halsim_0_0_{os.getpid()}_{job}"
    try:
        yield
    finally:
        communicator._segment_name = former


def sizes_of(*, slots, drafts):
    """A state of few slots and short requests."""
    return StateConfig(slots, 24, block_size=4, max_draft_tokens=drafts, max_stop_length=2)


class Follower(threading.Thread):
    """The second rank: it launches the steps that it receives, and takes the step before, or exits."""

    def __init__(self, schedule, overlap, options):
        super().__init__(daemon=True)
        self.orders, self.error = queue.SimpleQueue(), None
        self._given = schedule, overlap, options

    def run(self):
        schedule, overlap, options = self._given
        try:
            with bind(SimPlugin.open(1, options)) as device:
                stepper = stepper_of(device, schedule, Later(), Group((0, 1), 1), Watched)
                table, ahead = RequestTable(stepper.admit), AsyncLoop(stepper)
                while (order := self.orders.get()) is not None:
                    if order is END:
                        ahead.idle()
                        break
                    if overlap:
                        ahead.step(table.tasks(order), order.taken)
                    else:
                        stepper.step(table.tasks(order))
                for communicator_ in device.device._communicators.values():
                    communicator_.close()  # in-flight steps are lost with it
        except GroupLost:
            pass
        except BaseException as error:  # noqa: BLE001 (raised by the test's thread)
            self.error = error


@dataclass
class Outcome:
    """The results of a schedule: the end of each arrival, and the sink's records, by name."""

    ended: dict[int, object] = field(default_factory=dict)
    records: list[object] = field(default_factory=list)
    preemptions: int = 0
    losses: int = 0
    steps: int = 0


class Player:
    """Runs one schedule on an engine, and on a new one after a loss."""

    def __init__(self, schedule, mode, *, overlap, options=None, stepper=Watched):
        self.schedule, self.overlap, self._stepper = schedule, overlap, stepper
        self.options = {"mode": mode, "staged": 0, "devices": 2, "collective_timeout_ms": 20000, **(options or {})}
        self.outcome = Outcome()
        self.live: dict[str, int] = {}
        self.follower = None

    def open(self):
        """An engine on a newly opened device, with a second rank if one will be lost."""
        schedule, self.sink, self.gone = self.schedule, Later(), False
        several = schedule.loss is not None and not self.outcome.losses
        if several:
            self.options["job"] = f"job{next(_jobs)}"
            self.follower = Follower(schedule, self.overlap, self.options)
            self.follower.start()
        self.device = bind(SimPlugin.open(0, self.options))
        group, kind = (Group((0, 1), 0), self._telling()) if several else (ALONE, self._stepper)
        self.stepper = stepper_of(self.device, schedule, self.sink, group, kind)
        self.engine = Engine(self.stepper, Limits(chunk=schedule.chunk), overlap=self.overlap)

    def _telling(self):
        """The stepper of the first of two ranks; it forwards its launches to the second."""
        orders = self.follower.orders

        class Telling(self._stepper):
            def launch(self, tasks):
                orders.put(StepOrder(0, self.steps + 1, orders_of(tasks), self.taken))
                return super().launch(tasks)

        return Telling

    def play(self):
        try:
            return self._play()
        except BaseException:
            self._leave()
            raise

    def _leave(self):
        """After a failure: leave no work on the simulator, which other tests of this process use."""
        if self.follower is not None:
            self.follower.orders.put(None)
            self.follower.join(30)
        self.device.device.accelerator.synchronize()
        self.device.close()
        self.device.device.accelerator.reset()

    def _play(self):
        self.open()
        left, turn = list(enumerate(self.schedule.arrivals)), 0
        while left or self.live:
            for number, arrival in tuple(left):
                name = arrival.request.request_id
                if arrival.turn <= turn and name not in self.live:
                    left.remove((number, arrival))
                    self.live[name] = number
                    self.engine.submit(arrival.request)
            for when, name in self.schedule.aborts:
                if when == turn:
                    self.engine.abort(name)
            if self.follower is not None and turn == self.schedule.loss:
                self.follower.orders.put(None)
                self.gone = True
            scheduler = self.engine.scheduler
            oldest = scheduler.running[0] if scheduler.running else None
            try:
                self.take(self.engine.step())
            except GroupLost:
                assert turn >= self.schedule.loss
                self.go_on_elsewhere()
            if scheduler is self.engine.scheduler and oldest in (*scheduler.waiting, *scheduler._preempted):
                assert oldest.aborted, "the oldest request was preempted"
            self.sink.look()
            turn += 1
            assert turn < 800, "the schedule comes to no end"
        self.close()
        return self.outcome

    def take(self, ended):
        for finished in ended:
            number = self.live.pop(finished.request_id)
            assert number not in self.outcome.ended, f"{finished.request_id} ended twice"
            self.outcome.ended[number] = finished

    def go_on_elsewhere(self):
        """Take the requests back from the lost ranks, and open new ones."""
        self.outcome.losses += 1
        going_on, ended = self.engine.withdraw()
        self.take(ended)
        self.end()
        self.open()
        for request in going_on:
            self.engine.submit(request)

    def close(self):
        if self.follower is not None and self.follower.is_alive():
            self.follower.orders.put(END)
        going_on, ended = self.engine.withdraw()
        assert (going_on, ended) == ([], [])
        if not self.gone:  # else the in-flight step may be lost
            scheduler = self.engine.scheduler
            assert scheduler.pool.free == scheduler.pool.size, "blocks were lost"
        self.end()

    def end(self):
        """Close the device; the checker must have found no race."""
        self.outcome.preemptions += self.engine.scheduler.preemptions
        self.outcome.steps += self.engine.steps
        if self.follower is not None:
            self.follower.join(30)
            assert not self.follower.is_alive(), "the second rank does not end"
            if self.follower.error is not None:
                raise self.follower.error
            self.follower = None
        else:
            self.device.device.accelerator.synchronize()
        self.sink.look()
        self.outcome.records += self.sink.records
        accelerator = self.device.device.accelerator
        found = [
            str(race)
            for race in accelerator.races()
            if race.kind != "collective" or not (self.gone or self.outcome.losses)
        ]
        with contextlib.suppress(GroupLost):
            self.device.close()
        if accelerator.races():
            accelerator.reset()
        assert found == [], found[0]


def play(schedule, mode, *, overlap, **named):
    """One schedule from its beginning to its end."""
    return Player(schedule, mode, overlap=overlap, **named).play()


def check(schedule, outcome):
    """Each request has the predicted tokens, whole or up to its abort; the sink received them, each once, in order."""
    names = {name for _, name in schedule.aborts}
    delivered = {}
    for record in outcome.records:
        for row in record.rows():
            if len(row.tokens):
                runs = delivered.setdefault(row.request_id, [])
                if row.position == 0:
                    runs.append([])
                assert row.position == len(runs[-1]), f"{row.request_id}: tokens from {row.position} come out of order"
                runs[-1] += row.tokens.tolist()
    found = {}
    for number, arrival in enumerate(schedule.arrivals):
        finished, (tokens, reason) = outcome.ended[number], expected(arrival.request, schedule.sizes)
        who = f"arrival {number}, {finished.request_id!r}"
        if finished.reason is FinishReason.ABORT:
            assert finished.request_id in names, f"{who} was aborted by nobody"
            assert finished.token_ids == tokens[: len(finished.token_ids)], who
        else:
            assert (finished.reason, finished.token_ids) == (reason, tokens), f"{who}: {finished.message}"
        if finished.token_ids:
            found.setdefault(finished.request_id, []).append(list(finished.token_ids))
    assert delivered == found, "what the sink was given differs"
