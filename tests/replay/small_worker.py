"""A worker without a model, and what it does in tests of recordings."""

import numpy as np
from hal_conformance.harness import backdoor
from hal_conformance.harness.sinks import KeepingSink
from hal_conformance.replay import frames
from hal_core import Companion, FinishReason, Request, SamplingParams, StateConfig, StateField, Step, Task, TaskKind

SIZES = StateConfig(num_slots=4, max_model_len=64, max_logprobs=2, max_draft_tokens=2, vocab_size=100)


class SmallWorker:
    """A worker on cpu whose tokens come from the host (``write``) or from a kernel (``kernel``)."""

    def __init__(self, bound, sizes=SIZES, **options):
        self.bound, self.stream = bound, bound.default_stream
        self.state = bound.state(sizes, **options)
        self.speculative, self.steps = sizes.max_draft_tokens > 0, 0

    def enter(self, slots, extra=None):
        requests = [
            Request(f"r{slot}", [5, 6, 7 + slot], SamplingParams(max_tokens=30), extra=extra or {}) for slot in slots
        ]
        self.requests = [self.state.admit(request) for request in requests]
        pairs = zip(slots, self.requests, strict=True)
        tasks = [Task(TaskKind.PREFILL, at, one, num_scheduled_tokens=3, blocks=[at]) for at, one in pairs]
        self.bound.insert_tasks(state=self.state, tasks=tasks, stream=self.stream)

    def write(self, tokens):
        """Write one token a slot from the host."""
        column = np.full((self.state.sizes.num_slots, 1), -1)
        for slot, token in tokens.items():
            column[slot] = token
        if not self.speculative:
            self.set("sampled_token_ids", column)
            return
        self.set("accept_tokens", np.pad(column, ((0, 0), (0, self.state.sizes.max_draft_tokens)), constant_values=-1))
        self.set("accept_num", (column >= 0).astype(np.int32))

    def kernel(self, **fields):
        """Write whole fields as a model's kernel does: past the hooks."""
        for name, values in fields.items():
            place = self.state.layout.fields[name]
            data = np.zeros((self.state.sizes.num_slots, place.width), place.field.dtype.storage)
            data[: len(values), : np.shape(values)[1]] = values
            backdoor.write(
                self.bound.device, self.state.memory, place.offset, data.view(np.uint8).reshape(-1), self.stream
            )

    def set(self, name, value):
        self.bound.async_set_value(target=self.state.view(name), value=value, stream=self.stream)

    def step(self, slots, *, take=True, drafts=None, **options):
        step = Step(self.steps, {"target": slots}, speculative=self.speculative, **options)
        self.steps += 1
        self.bound.update_inputs(state=self.state, step=step, stream=self.stream)
        if drafts is not None:
            self.bound.set_drafts(state=self.state, step=step, drafts=drafts, stream=self.stream)
        sink = KeepingSink()
        ticket = self.bound.save_output(state=self.state, step=step, sink=sink, stream=self.stream)
        if take:
            record = self.state.take(ticket)
            sink.resolve_all()
            return record
        return sink


def given_of(path, name):
    """Return the values of all frames of a name."""
    return [one.given for one in frames.Recording(path).frames() if one.name == name]


def from_host(bound, tokens=9):
    worker = SmallWorker(bound)
    worker.enter([0, 2])
    worker.write({0: tokens, 2: 11})
    worker.step([0, 2], drafts={2: [1, 2]})
    worker.write({0: 8, 2: 1})
    worker.step([0, 2])


def kernels_tokens(bound):
    worker = SmallWorker(bound)
    worker.enter([0, 1, 3])
    tokens = [[9, 8, 7], [6, 5, 4], [0, 0, 0], [3, 2, 1]]
    ids, ranks = np.arange(36).reshape(4, 3, 3), np.arange(12).reshape(4, 3)
    ids[..., 0], ids = tokens, ids.reshape(4, 9)
    worker.kernel(
        accept_tokens=tokens,
        accept_num=[[3], [1], [0], [2]],
        topk_token_ids=ids,
        topk_logprobs=-ids / 8,
        topk_ranks=ranks,
    )
    first = worker.step([3, 0, 1], logprobs=2)
    assert first.tokens.tolist() == [3, 2, 9, 8, 7, 6]


def late_errors(bound):
    worker = SmallWorker(bound)
    worker.enter([0, 1])
    worker.kernel(stop_flags=[[True], [False], [True], [True]], accept_tokens=[[0], [7]], accept_num=[[0], [1]])
    record = worker.step([0, 1], late_errors=lambda: {0: "no token could be sampled"})
    assert record.finish.tolist() == [FinishReason.ERROR, FinishReason.NONE]


def outside_the_vocabulary(bound, *, host=True):
    worker = SmallWorker(bound, StateConfig(num_slots=4, max_model_len=64, vocab_size=100))
    worker.enter([0, 1])
    for tokens in ([100, 7], [3, 8]):
        if host:
            worker.write(dict(enumerate(tokens)))
        else:
            worker.kernel(sampled_token_ids=np.array([tokens]).T)
        record = worker.step([0, 1])
    assert record.counts.tolist() == [0, 1], "later tokens of the request are not reported"


def departures(bound):
    worker = SmallWorker(bound)
    worker.enter([0, 1, 2])
    worker.write({0: 9, 1: 8, 2: 7})
    worker.step([0, 1, 2])
    worker.state.release([1])
    task = Task(TaskKind.PREEMPTED, 0, worker.requests[0])
    bound.insert_tasks(state=worker.state, tasks=[task], stream=worker.stream)
    worker.write({2: 6})
    assert worker.step([0, 1, 2]).request_ids == ("r0", "r2")


def end_before_a_step(bound):
    worker = SmallWorker(bound)
    worker.enter([0, 1])
    worker.state.release([0])
    worker.enter([0])
    worker.write({0: 9, 1: 8})
    worker.step([0, 1])


def declared_fields_and_companions(bound):
    fields = [StateField("lora", "bfloat16", value="extra"), StateField("row", "int32", 3, value="extra")]
    own = [Companion("proposer", [StateField("depth", "int64", value=lambda request: len(request.prompt))])]
    worker = SmallWorker(bound, fields=fields, companions=own)
    worker.enter([0, 1], {"lora": 1.5, "row": [1, 2, 3]})
    worker.write({0: 9, 1: 8})
    worker.set("lora", [0.5, 1.5, 2.5, 3.5])
    worker.step([0, 1])


def every_view(bound):
    worker = SmallWorker(bound)
    worker.enter([0, 1, 2])
    for view, value in (
        (worker.state.view("seed")[::-2], [[3], [4]]),
        (worker.state.view("token_ids")[1, 4:20:3], 77),
        (worker.state.view("stop_flags")[3], True),
        (worker.state.view("top_p")[1:3, 0], [0.25, 0.5]),
    ):
        bound.async_set_value(target=view, value=value, stream=worker.stream)
