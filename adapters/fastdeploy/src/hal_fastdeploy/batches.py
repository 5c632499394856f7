"""FastDeploy's batches of tensors, where they are: an InputBatch's ``share_inputs`` and an MTP proposer's inputs.

A tensor is resolved once, and again when another one is found in its place: waking up and updates of weights do that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from hal_core import BoundDevice, InvalidValue, SlotRuns, View, Writes

from .values import Array, Ragged, scalars

Table = Mapping[str, tuple[str, str]]
"""Name to dtype and shape of tensors that an insertion writes; letters are sizes (:class:`Places`)."""
NO_MORE: Table = {}
THINKING: Table = {
    "enable_thinking": ("bool", "n1"),
    **dict.fromkeys(("max_think_lens", "max_reply_lens", "limit_think_status"), ("int32", "n1")),
}
#: Of a runner and of a proposer.
COMMON: Table = {
    "input_ids": ("int64", "nC"),
    "block_tables": ("int32", "nB"),
    "step_idx": ("int64", "n1"),
    "stop_flags": ("bool", "n1"),
    **dict.fromkeys(("encoder_block_lens", "seq_lens_encoder", "seq_lens_decoder"), ("int32", "n")),
}
#: Of the GPU's and of the XPU's runner.
RUNNERS: Table = {
    **COMMON,
    **dict.fromkeys(("prompt_lens", "top_k", "min_dec_len", "max_dec_len", "infer_seed"), ("int64", "n1")),
    **dict.fromkeys(("top_p", "min_p", "temperature"), ("float32", "n1")),
    **dict.fromkeys(("penalty_score", "frequency_score", "presence_score"), ("float32", "n1")),
    **dict.fromkeys(("temp_scaled_logprobs", "top_p_normalized_logprobs"), ("bool", "n1")),
    "step_seq_lens_decoder": ("int32", "n1"),
    "is_block_step": ("bool", "n"),
    "eos_token_id": ("int64", "E1"),
    "bad_tokens": ("int64", "nV"),
    "bad_tokens_len": ("int64", "n"),
    "stop_seqs_len": ("int32", "nQ"),
    "stop_seqs": ("int64", "nQq"),
}
TARGET: Table = {
    **RUNNERS,
    "token_ids_all": ("int64", "nL"),
    **dict.fromkeys(("seq_lens_this_time_buffer", "generated_modality"), ("int32", "n")),
    **THINKING,
}
XPU_TARGET: Table = {
    **RUNNERS,
    "seq_lens_this_time": ("int32", "n"),
    "first_token_ids": ("int64", "n1"),
    **dict.fromkeys(("ori_seq_lens_encoder", "max_think_lens", "limit_think_status"), ("int32", "n1")),
}
#: Tensors of some versions of the XPU's runner: the history before ``InputBatch``, and thinking as on the GPU.
XPU_OPTIONAL: Table = {"pre_ids": ("int64", "nL"), **THINKING}
DRAFTED: Table = {"draft_tokens": ("int64", "nD")}
PROPOSER: Table = {
    **COMMON,
    "pre_ids": ("int64", "nL"),
    "seq_lens_this_time_buffer": ("int32", "n"),
    **dict.fromkeys(("batch_drop", "is_block_step"), ("bool", "n1")),
    **dict.fromkeys(("recompute_token_num", "mask_rollback"), ("int32", "n1")),
}


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor and its view. ``memory``: the tensor's shape and address then; a framework's may get others."""

    tensor: Any
    view: View
    memory: tuple[Any, int | None]

    def holds(self, found: Any) -> bool:  # noqa: ANN401
        """Return whether ``found``, under the tensor's name now, is the tensor with its memory and shape."""
        return found is self.tensor and memory_of(found) == self.memory


def memory_of(tensor: Any) -> tuple[Any, int | None]:  # noqa: ANN401
    """Return a tensor's shape, and the address of a framework's."""
    return tensor.shape, tensor.data_ptr() if hasattr(tensor, "data_ptr") else None


class Places:
    """The tensors of one batch, resolved. ``sizes``: letter of the tables above to number, as the tensors have them."""

    def __init__(self, device: BoundDevice, batch: Any, table: Table, what: str, max_model_len: int) -> None:  # noqa: ANN401
        self.device, self.batch, self.table, self.what = device, batch, table, what
        self.sizes: dict[str, int] = {"L": max_model_len}
        self.found = {name: self._place(name) for name in table}

    def __getitem__(self, name: str) -> View:
        """The view of a tensor."""
        return self.found[name].view

    def __contains__(self, name: str) -> bool:
        return name in self.found

    def column(self, writes: Writes, name: str, slots: SlotRuns, values: list[Any] | Array) -> None:
        """Write one number for each slot: an int64 array, or a list with upstream's conversions."""
        view = self[name]
        if not isinstance(values, np.ndarray):
            values = scalars(values, view.dtype, name)
        writes.rows(view, slots, values.astype(view.dtype.storage, copy=False))

    def ragged(self, writes: Writes, name: str, slots: SlotRuns, rows: Ragged) -> None:
        """Write rows of different lengths."""
        writes.ragged(self[name], slots, rows.values, rows.lengths)

    def follow(self, batch: Any) -> list[str]:  # noqa: ANN401
        """Resolve the tensors that were replaced, or got other memory, in the batch that the runner has now. Return
        their names. Raises :class:`InvalidValue` for one of another dtype, shape or device."""
        self.batch = batch
        changed = {name: self._place(name) for name, place in self.found.items() if not place.holds(self._tensor(name))}
        self.found |= changed
        return [*changed]

    def _tensor(self, name: str) -> Any:  # noqa: ANN401
        try:
            return self.batch[name]
        except (KeyError, AttributeError):
            what = f"{self.what} has no {name!r}"
            raise InvalidValue(what, cure="mount a runner of a FastDeploy that was compared", argument=name) from None

    def _place(self, name: str) -> Place:
        tensor, (dtype, letters) = self._tensor(name), self.table[name]
        try:
            view = self.device.device.resolve(tensor)
        except InvalidValue as error:
            what = f"{self.what}[{name!r}]: {error.what}"
            raise InvalidValue(what, cure=error.cure, argument=name) from error
        if view.memory.device is not self.device.device:
            what = f"{self.what}[{name!r}] is memory of another opened device"
            raise InvalidValue(what, cure="mount the runner on the device that has its tensors", argument=name)
        rows, shape = letters.rstrip("1"), view.shape  # [n, 1] and [n] have the same rows
        while len(shape) > len(rows) and shape[-1] == 1:
            shape = shape[:-1]
        wanted = tuple(self.sizes.setdefault(letter, found) for letter, found in zip(rows, shape, strict=False))
        if view.dtype.name != dtype or shape != wanted or len(shape) != len(rows):
            raise InvalidValue(
                f"{self.what}[{name!r}] is {view.dtype} {list(view.shape)}, not {dtype} [{', '.join(letters)}]",
                cure="mount a runner of a FastDeploy that was compared",
                argument=name,
            )
        return Place(tensor, view, memory_of(tensor))
