"""Random batches of an episode (``episodes.py``): in a real state on the cpu device, by the hooks, into a sink."""

import contextlib
import logging
import random
import zlib

import numpy as np
from hal_core.devices.cpu import CpuPlugin
from hal_core.errors import SinkClosed, SinkFull
from hal_core.runtime.bound import bind
from hal_core.slots.admission import Request, SamplingParams, admit
from hal_core.slots.fields import StateConfig
from hal_core.slots.step import Step
from hal_core.slots.tasks import Task, TaskKind

SLOTS = 8
PARAMS = SamplingParams(max_tokens=60)
LENGTH = 2


def token(request, position):
    """The token of a request at a position; both sides compute it without communication."""
    return zlib.crc32(f"{request}:{position}".encode()) & 0x7FFF_FFFF


class Running:
    """A request: how many tokens it has and shall have."""

    def __init__(self, name, wanted):
        self.name, self.wanted, self.generated, self.admitted = name, wanted, 0, None


class Batches:
    """Batches of a worker with the name ``life``. ``large``: frames too large for a checksum."""

    def __init__(self, sink, life, seed, *, large):
        logging.getLogger("hal").setLevel(logging.ERROR)  # that the cpu device is synchronous is known here
        self.random, self.top_k = random.Random(seed), 1023 if large else 2
        self.sizes = StateConfig(
            num_slots=SLOTS, max_model_len=64, block_size=64, max_draft_tokens=3, max_logprobs=self.top_k
        )
        self.bound = bind(CpuPlugin.open(0, {}))
        self.state = self.bound.state(self.sizes)
        self.stream = self.bound.default_stream
        self.life, self.made, self.sink = life, 0, sink
        self.slots, self.waiting = [None] * SLOTS, []

    def close(self):
        """Close the device. Its outputs that a closed sink did not take have failed."""
        with contextlib.suppress(SinkClosed):
            self.bound.close()

    def leave(self, rows):
        """Preempt and abort; sometimes the whole batch. Records the expected rows of the next record."""
        dice = self.random.random()
        for slot, running in enumerate(self.slots):
            if running is None:
                continue
            kind = None
            if dice < 0.04:
                kind = TaskKind.PREEMPTED
            elif self.random.random() < 0.03:
                kind = self.random.choice([TaskKind.PREEMPTED, TaskKind.ABORTED])
            if kind is None:
                continue
            yield Task(kind, slot, running.admitted)
            rows.append([running.name, kind.name, 0, []])
            if kind is TaskKind.PREEMPTED:
                self.waiting.append(running)
            self.slots[slot] = None

    def enter(self):
        for slot, running in enumerate(self.slots):
            if running is not None or self.random.random() < 0.4:
                continue
            if self.waiting:
                running = self.waiting.pop(0)
            else:
                self.made += 1
                running = Running(f"{self.life}-{self.made}", self.random.randint(1, 30))
            output = [token(running.name, at) for at in range(running.generated)]
            running.admitted = admit(Request(running.name, [1, 2], PARAMS, output), self.state.layout)
            self.slots[slot] = running
            yield Task(TaskKind.PREFILL, slot, running.admitted, 0, LENGTH + len(output), [slot])

    def step(self, number):
        """Run one step up to its output; return the rows that its record must have, in any order."""
        rows = []
        reports = self.random.random() < 0.03  # a step that only reports removed requests
        tasks = [*self.leave(rows)]
        tasks += [] if reports else [*self.enter()]
        if tasks:
            self.bound.insert_tasks(state=self.state, tasks=tasks, stream=self.stream).wait()
        speculative = self.random.random() < 0.5
        columns, ended = self.sample(speculative, rows)
        for name, values in columns.items():
            self.bound.async_set_value(target=self.state.view(name), value=values, stream=self.stream).wait()
        order = self.random.sample(range(SLOTS), SLOTS)
        logprobs = self.random.choice([None, 0, self.top_k])
        step = Step(number, {"target": np.array(order, np.int32)}, speculative=speculative, logprobs=logprobs)
        with contextlib.suppress(SinkFull):  # it is kept
            self.bound.save_output(state=self.state, step=step, sink=self.sink, stream=self.stream)
        self.state.release(ended)
        for slot in ended:
            self.slots[slot] = None
        return rows

    def sample(self, speculative, rows):
        n, most = SLOTS, self.sizes.max_accept
        columns = {
            "accept_num": np.zeros((n, 1), np.int32),
            "step_idx": np.zeros((n, 1), np.int64),
            "stop_reason": np.zeros((n, 1), np.int32),
            "accept_tokens": np.full((n, most), -7, np.int64),
            "sampled_token_ids": np.full((n, 1), -7, np.int64),
            "topk_token_ids": np.full((n, most, self.top_k + 1), -7, np.int64),
        }
        ended = []
        for slot, running in enumerate(self.slots):
            if running is None:
                continue
            count = self.random.randint(0, min(most if speculative else 1, running.wanted - running.generated))
            tokens = [token(running.name, running.generated + at) for at in range(count)]
            rows.append([running.name, "TOKEN" if count else "NONE", running.generated, tokens])
            running.generated += count
            columns["accept_num"][slot] = count
            columns["step_idx"][slot] = running.generated
            columns["accept_tokens" if speculative else "sampled_token_ids"][slot, :count] = tokens
            columns["topk_token_ids"][slot, :count] = np.array(tokens, np.int64)[:, None]  # alternatives are tokens too
            if count and running.generated == running.wanted:
                columns["stop_reason"][slot] = 1
                ended.append(slot)
        columns["topk_token_ids"] = columns["topk_token_ids"].reshape(n, -1)
        return columns, ended
