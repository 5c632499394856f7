"""A runner whose step runs entirely on the device's stream (``native/mix.cc``): no model, but every token is checkable.

The next token of a request is a mix of all its tokens and its seed, read from a paged cache that the step itself fills.
If the state has room for drafts, they are made and checked on the device too. So the engine's own loop runs with
overlapped steps, under the race checker, without a GPU: ``hal run --device sim --runner hal_sim.mixing:MixRunner``.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import TYPE_CHECKING

from hal_core import InvalidValue, Request, SlotState, Step, Stream
from hal_core.handover import DeviceBlocks

from hal_sim.device import SimDevice

if TYPE_CHECKING:
    from hal_core.devices import Memory
    from hal_engine.stepping import PlannedStep, RunnerSetup

_READ = (
    *("seq_lens_this_time", "seq_lens_encoder", "seq_lens_decoder", "prompt_lens", "step_idx", "stop_flags"),
    *("next_tokens", "draft_num", "draft_tokens", "block_tables", "blocks_num", "seed", "max_dec_len"),
)
_FIELDS = (*_READ, "sampled_token_ids", "accept_tokens", "accept_num", "token_ids")
"""The order of ``Field`` in ``native/mix.cc``."""
_ARGUMENTS = Struct(f"<{len(_FIELDS) + 1}Q8i")
_MASK = (1 << 64) - 1


class MixRunner:
    """Mixes tokens on the sim device (:class:`hal_engine.stepping.Runner`), without the host. It reads them from
    ``cache``, and its requests may move (``--split``)."""

    needs_host, drafts_on_device = "", True
    supports = frozenset({"seed", "min_tokens", "max_tokens", "stop_sequences", "eos_token_ids"})
    """It has no distribution to sample from."""

    def __init__(self, setup: RunnerSetup) -> None:
        device, state = setup.device.device, setup.state
        if not isinstance(device, SimDevice):
            raise InvalidValue(
                f"MixRunner runs only on the sim device, not on {setup.device.name}",
                cure="give --device sim, or another --runner",
                argument="--runner",
            )
        self.vocab_size, self._device, sizes = setup.vocab_size, device, state.sizes
        self._cache: Memory = device.allocate(max(1, setup.blocks) * sizes.block_size * 8)
        facts = {"layout": "8 bytes a token", "block size": str(sizes.block_size)}
        self.cache = DeviceBlocks(setup.device, self._cache, setup.blocks, sizes.block_size * 8, facts)
        addresses = [state.memory.address + state.layout.fields[name].offset for name in _FIELDS]
        self._arguments = _ARGUMENTS.pack(
            *addresses,
            self._cache.address,
            sizes.num_slots,
            sizes.max_model_len,
            sizes.max_draft_tokens,
            sizes.max_blocks,
            sizes.block_size,
            setup.blocks,
            self.vocab_size,
            state.speculative,
        )

    def check(self, request: Request) -> None:
        """Accept every request of the supported parameters."""

    def launch(self, state: SlotState, step: PlannedStep, stream: Stream) -> Step:
        """Launch one kernel over all slots."""
        self._device.accelerator.launch("hal_mix_step", self._arguments, self._device.own_stream(stream).raw)
        return step.step

    def propose(self, state: SlotState, step: Step, stream: Stream) -> None:
        """Launch one kernel over all slots."""
        self._device.accelerator.launch("hal_mix_draft", self._arguments, self._device.own_stream(stream).raw)


def mixed(seed: int, tokens: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """Return the ``count`` tokens after ``tokens``, for a request whose field ``seed`` is ``seed``: the reference of
    the kernel, in Python."""
    value, given = seed & _MASK, list[int]()
    for token in tokens:
        value = _mix(value, token)
    for _ in range(count):
        given.append((value >> 11) % vocab_size)
        value = _mix(value, given[-1])
    return given


def _mix(value: int, token: int) -> int:
    value ^= (token + 0x9E37_79B9_7F4A_7C15 + (value << 6) + (value >> 2)) & _MASK
    value = value * 0xBF58_476D_1CE4_E5B9 & _MASK
    return value ^ (value >> 27)
