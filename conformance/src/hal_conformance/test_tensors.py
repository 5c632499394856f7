"""Tensors of a framework as targets and values (G1, G7), also lazy ones (G6)."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hal_core.errors import DeviceClosed, HalError, Unavailable
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import View
from hal_core.slots.admission import Request
from hal_core.slots.fields import StateConfig
from hal_core.slots.tasks import Task, TaskKind

from .fixtures.large_blocks import LargeBlock
from .harness import backdoor
from .harness.asserts import assert_raises, assert_says
from .harness.backdoor import PATIENCE, arrive
from .harness.bits import Array, noise
from .harness.guarantees import guarantee
from .kit import Kit

SIZES = StateConfig(num_slots=512, max_model_len=256, block_size=16, max_draft_tokens=3)


@guarantee(1, requires="tensors")
def test_g01_a_tensor_over_a_field_shows_what_hooks_write_later(kit: Kit) -> None:
    bound, support = kit.bound, kit.subject.support
    state = bound.state(SIZES)
    support.tensor(kit.device, np.zeros(4, np.int64))  # its framework is imported from now on
    try:
        tensors = {name: state.tensor(name) for name in ("block_tables", "token_ids", "accept_num", "stop_flags")}
    except Unavailable as error:  # which a device may be, with a reason
        pytest.skip(str(error))
    admitted = state.admit(Request("r", list(range(100, 140))))
    arrive(
        bound.insert_tasks(
            state=state,
            tasks=[Task(TaskKind.PREFILL, 511, admitted, 0, 40, [7, 5, 3])],
            stream=bound.default_stream,
        )
    )
    arrive(bound.async_set_value(target=state.view("accept_num")[510], value=3, stream=bound.default_stream))
    seen = {name: support.values_of(kit.device, tensor) for name, tensor in tensors.items()}
    assert seen["block_tables"][511, :3].tolist() == [7, 5, 3], "the tensor of block_tables is not the state's memory"
    assert seen["token_ids"][511, :40].tolist() == list(range(100, 140)), "the tensor of token_ids is not the state's"
    assert seen["accept_num"][:, 0].tolist() == [0] * 510 + [3, 0], "a value was written, but its tensor has other ones"
    assert seen["stop_flags"].dtype == np.bool_
    assert seen["stop_flags"][:, 0].tolist() == [True] * 511 + [False], "one slot runs, but the tensor disagrees"


def outlived(kit: Kit) -> object:
    """Return a tensor over a field of a dropped state, of a closed device."""
    bound = kit.open()
    state = bound.state(SIZES)
    try:
        tensor: object = state.tensor("token_ids")
    except Unavailable as error:
        bound.close()
        pytest.skip(str(error))
    task = Task(TaskKind.PREFILL, 511, state.admit(Request("r", list(range(100, 140)))), 0, 40, [7, 5, 3])
    arrive(bound.insert_tasks(state=state, tasks=[task], stream=bound.default_stream))
    bound.close()
    assert_raises(DeviceClosed, lambda: state.tensor("token_ids"), "asking a closed device for a tensor")
    return tensor


@guarantee(1, also=(26,), requires="tensors")
def test_g01_a_tensor_keeps_its_memory_when_its_state_and_device_are_gone(kit: Kit) -> None:
    support = kit.subject.support
    support.tensor(kit.device, np.zeros(4, np.int64))  # its framework is imported from now on
    tensor = outlived(kit)
    gc.collect()
    others = [kit.bound.state(SIZES) for _ in range(4)]  # one of them would reuse that state's memory
    seen = support.values_of(kit.device, tensor)
    assert others
    assert seen[511, :40].tolist() == list(range(100, 140)), "a tensor that outlived its device shows something else"


@guarantee(5, requires="tensors", also=(1,))
def test_g05_tensors_of_one_address_and_shape_differ_by_their_strides(kit: Kit) -> None:
    support, should = kit.subject.support, np.zeros(64, np.int64)
    tensor: Any = support.tensor(kit.device, should.copy())
    for turn, part in enumerate([slice(0, 8), slice(0, 16, 2), slice(0, 64, 8), slice(0, 8), slice(0, 24, 3)], 1):
        arrive(kit.bound.async_set_value(target=tensor[part], value=turn, stream=kit.device.default_stream))
        should[part] = turn
        got = support.values_of(kit.device, tensor)
        assert (got == should).all(), f"{turn} was written to [{part.start}:{part.stop}:{part.step}]: {got.tolist()}"


def on_device(kit: Kit, values: np.ndarray[Any, Any]) -> View:
    """Return a view of device memory with these values."""
    memory, stream = kit.device.allocate(values.nbytes), kit.device.default_stream
    backdoor.write(kit.device, memory, 0, values.view(np.uint8), stream)
    return View.contiguous(memory, 0, values.shape, dtype_of(values.dtype.name))


@guarantee(7, requires=("not async_h2d", "tensors"), also=(1,))
@pytest.mark.parametrize("nbytes", [4096, 1 << 16, (3 << 20) + 8])
def test_g07_a_large_value_for_a_tensor_is_there_when_the_call_returns(kit: Kit, nbytes: int) -> None:
    """Read in the framework's own way: no call of the device comes between, with which it could catch up."""
    bound, support, count = kit.bound, kit.subject.support, nbytes // 8
    tensor = support.tensor(kit.device, np.zeros(count, np.int64))
    forms: dict[str, Callable[[np.ndarray[Any, Any]], object]] = {
        "an array": np.asarray,
        "a tensor": lambda values: support.tensor(kit.device, values),
        "a value on the device": lambda values: on_device(kit, values),
    }
    for seed, (what, form) in enumerate(forms.items()):
        values = noise(seed, nbytes).view(np.int64)
        value = form(values.copy())
        ticket = bound.async_set_value(target=tensor, value=value, stream=bound.default_stream)
        wrong = np.flatnonzero(support.values_of(kit.device, tensor) != values)
        assert not len(wrong), f"{what} of {nbytes} bytes: the call has returned, and element {wrong[0]} is not there"
        assert ticket.mode == "sync", f"{what} of {nbytes} bytes: the ticket says {ticket.mode!r}"
        assert ticket.done(), f"{what} of {nbytes} bytes: the ticket is not done on return"


PARTS: dict[str, Any] = {
    "whole": np.s_[:],
    "every second slot": np.s_[::2],
    "slots in reverse": np.s_[::-1],
    "a hundred tokens of each slot": np.s_[:, :100],
}
"""Parts of a field of 512 slots and 256 tokens."""


@guarantee(7, requires=("not async_h2d", "tensors"), also=(1,))
@pytest.mark.parametrize("part", PARTS)
def test_g07_a_field_that_a_model_reads_is_there_when_the_call_returns(kit: Kit, part: str) -> None:
    bound, support = kit.bound, kit.subject.support
    state = bound.state(SIZES)
    support.tensor(kit.device, np.zeros(4, np.int64))  # its framework is imported from now on
    try:
        tensor = state.tensor("token_ids")
    except Unavailable as error:
        pytest.skip(str(error))
    should = np.array(support.values_of(kit.device, tensor))
    values = noise(5, should.nbytes).view(np.int64)
    should[PARTS[part]] = value = values.reshape(should.shape)[PARTS[part]].copy()
    bound.async_set_value(target=state.view("token_ids")[PARTS[part]], value=value, stream=bound.default_stream)
    wrong = np.argwhere(support.values_of(kit.device, tensor) != should)
    assert not len(wrong), f"token_ids was set ({part}), but slot {wrong[0][0]} is wrong in a tensor over it"


class LikeTorch:
    """A host tensor with torch's ways to say what its memory is; the kit needs no torch.

    ``negative``: the elements are the negated memory. Another layout, ``is_quantized`` and ``is_nested``: the memory is
    no elements.
    """

    def __init__(self, memory: Array, negative: bool = False, **kind: Any) -> None:  # noqa: ANN401 (attributes)
        self._memory, self._negative = memory, negative
        self.dtype, self.shape, self.device = str(memory.dtype), memory.shape, SimpleNamespace(type="cpu")
        self.layout, self.is_quantized, self.is_nested = "torch.strided", False, False
        vars(self).update(kind)

    def data_ptr(self) -> int:
        """Return the address of the memory."""
        return int(self._memory.ctypes.data)

    def numel(self) -> int:
        """Return the number of elements."""
        return self._memory.size

    def is_neg(self) -> bool:
        """Return whether the memory is negated lazily."""
        return self._negative

    def is_conj(self) -> bool:
        """Return False: these are real."""
        return False

    def detach(self) -> LikeTorch:
        """Return the same tensor."""
        return self

    resolve_conj = detach

    def resolve_neg(self) -> LikeTorch:
        """Return a tensor whose memory is its elements."""
        return LikeTorch(-self._memory) if self._negative else self

    def numpy(self) -> Array:
        """Return the elements, if they are the memory; torch raises otherwise."""
        if self._negative or self.is_quantized or self.is_nested or self.layout != "torch.strided":
            raise RuntimeError("no NumPy array can be made of this tensor")
        return self._memory


KINDS: dict[str, dict[str, Any]] = {
    "sparse": {"layout": "torch.sparse_coo"},
    "of compressed rows": {"layout": "torch.sparse_csr"},
    "quantized": {"is_quantized": True},
    "nested": {"is_nested": True},
}


@guarantee(6)
@pytest.mark.parametrize("name", ["float32", "float64", "int32", "int64"])
def test_g06_a_lazily_negated_tensor_is_written_as_its_elements(kit: Kit, name: str) -> None:
    dtype, memory = dtype_of(name), np.arange(1, 25, dtype=name).reshape(4, 6)
    for step in (1, 2):
        block = LargeBlock(kit, 64 + 48 * dtype.itemsize)
        target = View(block.memory, 64, (4, 6), (6 * step * dtype.itemsize, step * dtype.itemsize), dtype)
        block.write(target, LikeTorch(memory.copy(), negative=True), -memory)
        block.check(f"a tensor of {name} whose memory is the negative of its elements")
        block.write(target, LikeTorch(memory.copy()), memory)
        block.check(f"a tensor of {name} whose memory is its elements")


@guarantee(6)
@pytest.mark.parametrize("kind", KINDS)
def test_g06_a_tensor_whose_memory_is_no_elements_is_refused(kit: Kit, kind: str) -> None:
    block = LargeBlock(kit, 256)
    target = View.contiguous(block.memory, 0, (4, 6), dtype_of("float32"))
    tensor = LikeTorch(np.ones((4, 6), np.float32), **KINDS[kind])
    error = assert_raises(HalError, lambda: block.set(target, tensor).wait(PATIENCE), f"a value that is {kind}")
    assert_says(error, device=kit.bound.name, hook="async_set_value", argument="value")
    block.check(f"a value that is {kind}, refused")
