"""Functions that ranks of a pool run; a rank imports this file."""

import contextlib
import functools
import itertools
import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import hal_engine.distributed.rank
import hal_engine.distributed.state_check
import hal_paddle_runner.making
import numpy as np
from hal_core import ENTERING, ByteRange, Group, HalError
from hal_core.devices import HostCommunicator, open_groups
from hal_core.runtime.policy import Policy
from hal_core.tickets import DONE
from hal_engine.distributed.control_messages import Hello
from hal_engine.distributed.rank import serve, versions
from hal_engine.model.config import read_config
from hal_engine.timeouts import TIMEOUTS
from hal_paddle_runner.batch import ModelBatch
from hal_paddle_runner.loading import load_model
from hal_paddle_runner.ranks import TensorRanks
from hal_paddle_runner.runner import ModelRunner


def steps(vocab):
    """Two rows: one fed in two pieces and a token, the other whole and a token beside them."""
    rng = np.random.default_rng(7)
    ids = rng.integers(0, vocab, (2, 20))
    table = np.array([[0, 1, 2], [3, 4, 5]], np.int32)
    for feeds in ([(0, 0, 5)], [(0, 5, 6), (1, 0, 9)], [(0, 11, 1), (1, 9, 1)]):
        yield ModelBatch(
            np.concatenate([ids[row, at : at + count] for row, at, count in feeds]),
            np.concatenate([np.arange(at, at + count) for _, at, count in feeds]),
            np.array([count for *_, count in feeds], np.int32),
            np.array([at for _, at, _ in feeds], np.int32),
            table[[row for row, *_ in feeds]],
        )


def logits_of(model):
    """The logits of each step, or None where a rank has none."""
    model.allocate_cache(6, 8)
    return [model.forward(batch) for batch in steps(model.config.vocab_size)]


def split_logits(rank, directories, everywhere):
    """In a rank: the logits of each step of each checkpoint, split over two ranks."""
    open_groups([(0, 1)])
    ranks = TensorRanks(Group((0, 1), rank.rank))
    return [logits_of(load_model(folder, ranks=ranks, everywhere=everywhere)) for folder in directories]


def be_a_rank(rank, url, how="", *arguments):
    """In a rank: serve the engine at ``url``; ``how`` names this rank's fault.

    Return None, or the end: the error's class, its text, and for a lost rank its number and the step.
    """
    try:
        with LIARS[how](rank, *arguments) if how else contextlib.nullcontext():
            serve(url, rank.rank, rank.size)
    except HalError as error:
        return type(error).__name__, str(error), getattr(error, "rank", None), getattr(error, "step", None)
    return None


@contextlib.contextmanager
def no_broadcast(rank):
    """``broadcast_tokens`` does nothing."""
    with mock.patch.object(Policy, "broadcast_tokens", return_value=DONE):
        yield


@contextlib.contextmanager
def left_out(rank, field):
    """``broadcast_tokens`` leaves ``field`` as each rank had it, as if it were missing in the list of its fields."""
    original = Policy.broadcast_tokens

    def broadcast(policy, device, hooks, state, group, stream):
        view = state.view(field)
        place = state.layout.fields[field]
        part = ByteRange(place.offset, place.stride * state.sizes.num_slots)
        copied = device.copy_out(state.memory, [part], stream)
        copied.wait()
        before = copied.data[0].view(place.field.dtype.storage).reshape(view.shape).copy()
        ticket = original(policy, device, hooks, state, group, stream)
        if not group.is_first:
            ticket.wait()
            policy.async_set_value(device, hooks, view, before, stream).wait()
        return ticket

    with mock.patch.object(Policy, "broadcast_tokens", broadcast):
        yield


@contextlib.contextmanager
def ending(rank, victim, step, *arguments, act):
    """The rank ``victim`` calls ``act`` in its step ``step``, when its part of the model has run."""
    steps = itertools.count(1)
    original = ModelRunner._write

    def write(worker, tokens):
        if rank.rank == victim and next(steps) == step:
            act(*arguments)
        original(worker, tokens)

    with mock.patch.object(ModelRunner, "_write", write):
        yield


def send(number):
    """A function that sends this process a signal."""
    return lambda: os.kill(os.getpid(), number)


def hang(mark):
    """Make the file ``mark`` and never return; other threads continue."""
    Path(mark).touch()
    threading.Event().wait()


@contextlib.contextmanager
def broadcasting(rank):
    """Record the bytes of each broadcast in which the rank takes part."""
    original, kept = HostCommunicator.broadcast, rank.kept.setdefault("broadcasts", [])
    kept.clear()

    def broadcast(communicator, memory, part, stream):
        kept.append(part.nbytes)
        return original(communicator, memory, part, stream)

    with mock.patch.object(HostCommunicator, "broadcast", broadcast):
        yield


@contextlib.contextmanager
def closing(rank):
    """Count how often each of the rank's proposers is closed."""
    original, kept = hal_paddle_runner.making.make_proposer, rank.kept.setdefault("closed", [])
    kept.clear()

    def make(name, setup):
        proposer = original(name, setup)
        number, close = len(kept), proposer.close
        kept.append(0)

        def counted():
            kept[number] += 1
            close()

        proposer.close = counted
        return proposer

    with mock.patch("hal_paddle_runner.making.make_proposer", make):
        yield


@contextlib.contextmanager
def astray(rank, step, slot, token):
    """Make the first rank give ``slot`` an invalid token id in its step ``step``; the other ranks receive it."""
    steps, original = itertools.count(1), ModelRunner._write

    def write(runner, tokens):
        if rank.rank == 0 and next(steps) == step:
            tokens.fields["sampled_token_ids"][slot, 0] = token
        original(runner, tokens)

    with mock.patch.object(ModelRunner, "_write", write):
        yield


@contextlib.contextmanager
def raising(rank, folder, step="1"):
    """The runner of ``failing.py`` in ``folder`` can be found, and raises in that step."""
    with mock.patch.object(sys, "path", [folder, *sys.path]), mock.patch.dict(os.environ, FAILING_STEPS=step):
        yield


RAISING = {"before the layers": "launch", "after the layers": "_write", "drafting": "propose"}
"""Where the model's runner raises, and its method that is called there."""


@contextlib.contextmanager
def raising_at(rank, name, where, ranks, wait):
    """On ``ranks``, the model's runner raises in the step in which the request ``name`` enters. ``wait``: how long it
    waits for the other ranks."""
    launch, method = ModelRunner.launch, RAISING[where]
    original = getattr(ModelRunner, method)

    def launched(runner, state, step, stream):
        runner.is_marked = rank.rank in ranks and any(
            kind in ENTERING and request.request_id == name
            for kind, request in zip(step.tasks.plain["kinds"], step.tasks.requests, strict=True)
        )
        if method == "launch":
            raises(runner)
        return launch(runner, state, step, stream)

    def called(runner, *arguments):
        raises(runner)
        return original(runner, *arguments)

    def raises(runner):
        if runner.is_marked:
            raise RuntimeError(f"no memory for {name}")

    usual, TIMEOUTS.raised = TIMEOUTS.raised, wait
    replaced = {"launch": launched} if method == "launch" else {"launch": launched, method: called}
    try:
        with mock.patch.multiple(ModelRunner, **replaced):
            yield
    finally:
        TIMEOUTS.raised = usual


def broadcasts(rank):
    """In a rank: return the records of :func:`broadcasting`."""
    return rank.kept["broadcasts"]


def closed(rank):
    """In a rank: return the records of :func:`closing`."""
    return rank.kept["closed"]


def changed(what):
    """Faults that make a rank differ from the rest, by name."""
    module, found = "hal_engine.distributed.rank", versions()
    wrong = {
        "checkpoint": (f"{module}.checkpoint_digest", lambda folder: "another one"),
        "slot table": (f"{module}.lay_out", lambda sizes: SimpleNamespace(digest=bytes(32))),
        "groups": (f"{module}.RankLayout.groups", lambda layout: [(1, 0)]),
        "version": (f"{module}.versions", lambda: found | {"paddle-hal-core": "0.0"}),
        "protocol": (f"{module}.Hello", lambda rank, size, facts: Hello(rank, size, facts, protocol=0)),
        "size": (f"{module}.Hello", lambda rank, size, facts: Hello(rank, 3, facts)),
        "broken checkpoint": (f"{module}.read_config", lambda folder: read_config(folder / "none")),
    }
    return mock.patch(*wrong[what])


def different(rank, what):
    """Rank 1 differs from rank 0."""
    return changed(what) if rank.rank == 1 else contextlib.nullcontext()


@contextlib.contextmanager
def patched(rank, target, replacement):
    """Replace an object of the product."""
    with mock.patch(target, replacement):
        yield


def all_but_the_tokens(check):
    """The columns that a check compares, without those that ranks learn from the first one."""
    return {name: column for name, column in COLUMNS(check).items() if "accept" not in name and "token" not in name}


COLUMNS = hal_engine.distributed.state_check.StateCheck._columns
MODULE = "hal_engine.distributed.rank"
LYING = {
    "no check": ("hal_engine.distributed.state_check.StateCheck.compare", lambda check, step: None),
    "half a check": ("hal_engine.distributed.state_check.StateCheck._columns", all_but_the_tokens),
    "any step": ("hal_engine.distributed.loop.StepLoop._check_number", lambda loop, order: None),
    "says nothing": (f"{MODULE}._Serving._tell", lambda serving, error: None),
    "its own words": (f"{MODULE}.error_of", lambda verdict: HalError(f"process {os.getpid()}: {verdict.what}")),
}
"""Further faults of a rank, by name."""


def lie(rank, url, liar, how="", *arguments):
    """In a rank: run with one more fault."""
    with patched(rank, *LYING[liar]):
        return be_a_rank(rank, url, how, *arguments)


LIARS = {
    "astray": astray,
    "broadcasting": broadcasting,
    "closing": closing,
    "different": different,
    "no broadcast": no_broadcast,
    "left out": left_out,
    "raising": raising,
    "raising at": raising_at,
    "hung": functools.partial(ending, act=hang),
    "killed": functools.partial(ending, act=send(signal.SIGKILL)),
    "stopped": functools.partial(ending, act=send(signal.SIGSTOP)),
}
