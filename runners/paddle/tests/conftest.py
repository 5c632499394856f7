"""A model with predictable tokens, and a device whose memory the host cannot touch."""

from types import SimpleNamespace

import numpy as np
import pytest
from hal_core.contract.capabilities import Capabilities
from hal_core.devices.base import DeviceBase
from hal_core.devices.sync import SyncStream
from hal_core.errors import InvalidValue
from hal_core.memory.copies import HostCopy
from hal_core.memory.plan import apply_to_host
from hal_core.runtime.bound import bind
from hal_core.tickets import DONE
from hal_engine.model import DEFAULT_CHECKPOINT

from tests.model.conftest import checkpoints as checkpoints
from tests.model.reference import Reference

VOCAB = 97


class PagedOracle:
    """A stand-in model: its paged cache holds token ids, and the next token depends on all of the cache.

    ``nan_after``: token counts at which its logits are invalid. ``spread``: the number of its possible best tokens;
    with few, it repeats itself. ``rows``, ``fed``: the number of rows and tokens of each step. ``launches``: for the
    caller, each step's prediction and the tokens that it fed.
    """

    config = SimpleNamespace(vocab_size=VOCAB)

    def __init__(self, spread=VOCAB):
        self.spread = spread
        self.nan_after, self.rows, self.fed, self.launches = set(), [], [], []

    def allocate_cache(self, blocks, block_size):
        self.cache = np.full((blocks, block_size), -1, np.int64)

    def forward(self, batch):
        size, at = self.cache.shape[1], 0
        logits = np.zeros((len(batch.token_ids), VOCAB), np.float32)
        self.rows.append(len(batch.row_lengths))
        self.fed.append(len(batch.token_ids))
        for row, (length, context) in enumerate(zip(batch.row_lengths, batch.context_lengths, strict=True)):
            table = batch.block_tables[row]
            for position in range(context, context + length):
                assert batch.positions[at] == position
                self.cache[table[position // size], position % size] = batch.token_ids[at]
                places = range(position + 1)
                logits[at] = self.logits([int(self.cache[table[place // size], place % size]) for place in places])
                at += 1
        assert at == len(batch.token_ids)
        return logits[np.cumsum(batch.row_lengths) - 1 if batch.outputs is None else batch.outputs]

    def logits(self, known):
        """float32 ``[VOCAB]``: the best tokens are the predicted one and the next two, a step of 1 apart."""
        value = len(known)
        for token in known:
            value = (value * 31 + token + 7) % VOCAB
        logits = np.zeros(VOCAB, np.float32)
        for place in range(3):
            logits[(value % self.spread + place) % VOCAB] = 9.0 - place
        return np.full(VOCAB, np.nan, np.float32) if len(known) in self.nan_after else logits

    def expected(self, prompt, count):
        """The tokens that greedy decoding gives."""
        known = list(prompt)
        for _ in range(count):
            known.append(int(np.argmax(self.logits(known))))
        return tuple(known[len(prompt) :])


class OpaqueMemory:
    """Device memory without an address to follow; only the device has the bytes."""

    def __init__(self, device, nbytes):
        self.device, self.nbytes = device, nbytes

    @property
    def address(self):
        raise AssertionError("the host looked for the address of device memory")


class OpaqueDevice(DeviceBase):
    """Fulfils the contract with plans and copies alone; ``calls`` lists the requested operations."""

    name = "opaque"
    capabilities = Capabilities(
        async_h2d=False,
        async_d2h=False,
        fused_scatter=True,
        pinned_host=False,
        can_hold_stream=False,
        collective="",
        fallbacks={"async_set_value": "a test"},
    )

    def __init__(self):
        super().__init__(0)
        self._stream, self._bytes, self.calls = SyncStream(0), {}, []

    @property
    def default_stream(self):
        return self._stream

    def stream(self):
        return self._stream

    def allocate(self, nbytes):
        memory = OpaqueMemory(self, nbytes)
        self._bytes[id(memory)] = np.zeros(nbytes, np.uint8)
        return memory

    def resolve(self, target):
        raise InvalidValue("no foreign tensors here", cure="use a view of the state")

    def submit(self, plan, stream):
        apply_to_host(plan, self._bytes[id(plan.memory)])
        return DONE

    def copy_out(self, memory, parts, stream):
        self.calls.append("copy_out")
        return HostCopy([self._bytes[id(memory)][part.offset : part.end].copy() for part in parts])

    def update_inputs(self, state, step, stream):
        self.calls.append("update_inputs")
        before = list(self.calls)
        ticket = super().update_inputs(state, step, stream)
        self.calls = before  # its own copies are not the worker's
        return ticket

    def close(self):
        self._bytes.clear()


@pytest.fixture
def oracle():
    return PagedOracle()


@pytest.fixture
def opaque():
    with bind(OpaqueDevice()) as device:
        yield device


@pytest.fixture(scope="module")
def model():
    """The embedded checkpoint."""
    from hal_paddle_runner.loading import load_model

    return load_model(DEFAULT_CHECKPOINT)


@pytest.fixture(scope="module")
def dense():
    """The reference of the embedded checkpoint."""
    return Reference(DEFAULT_CHECKPOINT)
