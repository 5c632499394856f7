"""Serving with the torch runner on torch's CPU, and with the Paddle model, for the tests; and checkpoints for both."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from hal_core import MemorySink, SlotStatus, StateConfig
from hal_engine.engine import Engine, Limits
from hal_engine.stepping import RunnerSetup, Stepper

from hal import open_device

SIZES = StateConfig(num_slots=4, max_model_len=64, block_size=4, max_logprobs=3, max_eos=2, max_stop_length=3)


@dataclass
class Served:
    """The records of one request."""

    tokens: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    message: str = ""
    reason: int = 0


def run(stepper, requests, chunk=None, **options):
    """Serve all requests at once; return the records of each."""
    engine = Engine(stepper, Limits(chunk=chunk), **options)
    for request in requests:
        engine.submit(request)
    answers = {request.request_id: Served() for request in requests}
    for ended in engine.run():
        answers[ended.request_id].message, answers[ended.request_id].reason = ended.message, ended.reason
    stepper.sink.close(30.0)
    for record in stepper.sink.records:
        for row in record.rows():
            if row.status is SlotStatus.TOKEN:
                answers[row.request_id].tokens += row.tokens.tolist()
            if row.logprobs is not None and len(row.logprobs) and np.isfinite(row.logprobs[0, 0]):  # it wanted them
                for ids, values, rank in zip(row.logprob_token_ids, row.logprobs, row.ranks.tolist(), strict=True):
                    used = np.isfinite(values)
                    answers[row.request_id].logprobs.append((ids[used].tolist(), values[used], rank))
    return answers, engine


@contextmanager
def torch_stepper(directory, sizes=SIZES, blocks=64, dtype="float32", **options):
    """A stepper with the torch runner on the cpu device; ``stepper.runner`` is the runner."""
    import torch
    from hal_torch.runner import TorchRunner

    torch.set_num_threads(1)  # threads of so little work wait for each other
    with open_device("cpu") as device:
        setup = RunnerSetup(device, sizes, blocks, directory, dtype=dtype)
        yield Stepper(device, setup.state, TorchRunner(setup, **options), MemorySink(), blocks=blocks)


def by_torch(directory, requests, sizes=SIZES, blocks=64, dtype="float32", **options):
    """Return the tokens of each request from the torch runner."""
    with torch_stepper(directory, sizes, blocks, dtype) as stepper:
        return run(stepper, requests, **options)[0]


def by_paddle(directory, requests, sizes=SIZES, blocks=64, **options):
    """Return the tokens of each request from the Paddle model, on the cpu device."""
    from hal_paddle_runner.loading import load_model
    from hal_paddle_runner.worker import Worker

    with open_device("cpu") as device:
        worker = Worker(device, load_model(directory), sizes, blocks, MemorySink())
        return run(worker, requests, **options)[0]
