"""FastDeploy's batches of tensors, where they are: an InputBatch's ``share_inputs`` and an MTP proposer's inputs.

Each tensor is resolved once. Captured graphs hold the addresses, so a tensor that was replaced since is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from hal_core import BoundDevice, InvalidValue, SlotRuns, View, Writes

from .values import Array, Ragged, scalars

#: Name to dtype and shape of the tensors that an insertion writes; letters are sizes (:class:`Sizes`).
TARGET: Mapping[str, tuple[str, str]] = {
    "token_ids_all": ("int64", "nL"),
    "input_ids": ("int64", "nC"),
    "prompt_lens": ("int64", "n1"),
    "step_idx": ("int64", "n1"),
    "seq_lens_encoder": ("int32", "n"),
    "seq_lens_decoder": ("int32", "n"),
    "seq_lens_this_time_buffer": ("int32", "n"),
    "step_seq_lens_decoder": ("int32", "n1"),
    "is_block_step": ("bool", "n"),
    "stop_flags": ("bool", "n1"),
    "eos_token_id": ("int64", "E1"),
    "top_p": ("float32", "n1"),
    "top_k": ("int64", "n1"),
    "min_p": ("float32", "n1"),
    "temperature": ("float32", "n1"),
    "penalty_score": ("float32", "n1"),
    "frequency_score": ("float32", "n1"),
    "presence_score": ("float32", "n1"),
    "temp_scaled_logprobs": ("bool", "n1"),
    "top_p_normalized_logprobs": ("bool", "n1"),
    "generated_modality": ("int32", "n"),
    "min_dec_len": ("int64", "n1"),
    "max_dec_len": ("int64", "n1"),
    "infer_seed": ("int64", "n1"),
    "bad_tokens": ("int64", "nV"),
    "bad_tokens_len": ("int64", "n"),
    "stop_seqs_len": ("int32", "nQ"),
    "stop_seqs": ("int64", "nQq"),
    "block_tables": ("int32", "nB"),
    "encoder_block_lens": ("int32", "n"),
}
#: The XPU's runner, which needs ``token_ids_all`` only for the row's length.
XPU_TARGET: Mapping[str, tuple[str, str]] = {
    **{name: kind for name, kind in TARGET.items() if name not in ("seq_lens_this_time_buffer", "generated_modality")},
    "seq_lens_this_time": ("int32", "n"),
    "first_token_ids": ("int64", "n1"),
    "ori_seq_lens_encoder": ("int32", "n1"),
    "max_think_lens": ("int32", "n1"),
    "limit_think_status": ("int32", "n1"),
}
DRAFTED: Mapping[str, tuple[str, str]] = {"draft_tokens": ("int64", "nD")}
PROPOSER: Mapping[str, tuple[str, str]] = {
    "pre_ids": ("int64", "nL"),
    "input_ids": ("int64", "nC"),
    "encoder_block_lens": ("int32", "n"),
    "block_tables": ("int32", "nB"),
    "stop_flags": ("bool", "n1"),
    "batch_drop": ("bool", "n1"),
    "is_block_step": ("bool", "n1"),
    "seq_lens_encoder": ("int32", "n"),
    "seq_lens_decoder": ("int32", "n"),
    "seq_lens_this_time_buffer": ("int32", "n"),
    "step_idx": ("int64", "n1"),
    "recompute_token_num": ("int32", "n1"),
    "mask_rollback": ("int32", "n1"),
}


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor and its view. ``shape``: the tensor's own, of its type. ``address``: a framework's tensor's, which may
    get other memory."""

    tensor: Any
    view: View
    shape: Any
    address: int | None

    def change(self, found: Any) -> str:  # noqa: ANN401
        """Return how ``found``, under the tensor's name now, differs from the tensor when it was mounted, or ""."""
        tensor = self.tensor
        if found is not tensor:
            return "was replaced"
        if self.address is not None and tensor.data_ptr() != self.address:
            return "got other memory"
        return "" if tensor.shape == self.shape else f"became {list(tensor.shape)}"


class Places:
    """The tensors of one batch, resolved. ``sizes``: letter of the tables above to number, as the tensors have them."""

    def __init__(self, device: BoundDevice, batch: Any, table: Mapping[str, tuple[str, str]], what: str) -> None:  # noqa: ANN401
        self.batch, self.what = batch, what
        self.sizes: dict[str, int] = {"1": 1}
        self.found = {name: self._place(device, name, *kind) for name, kind in table.items()}

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

    def check(self) -> None:
        """Raise :class:`InvalidValue` for a tensor that was replaced or reshaped, or got other memory, since it was
        mounted."""
        for name, place in self.found.items():
            if change := place.change(self.batch[name]):
                what = f"{self.what}[{name!r}] {change} since it was mounted"
                raise InvalidValue(what, cure="write into the tensor, or mount the runner again", argument=name)

    def _place(self, device: BoundDevice, name: str, dtype: str, shape: str) -> Place:
        try:
            tensor = self.batch[name]
        except (KeyError, AttributeError):
            what = f"{self.what} has no {name!r}"
            raise InvalidValue(what, cure="mount a runner of a FastDeploy that was compared", argument=name) from None
        try:
            view = device.device.resolve(tensor)
        except InvalidValue as error:
            what = f"{self.what}[{name!r}]: {error.what}"
            raise InvalidValue(what, cure=error.cure, argument=name) from error
        if view.memory.device is not device.device:
            what = f"{self.what}[{name!r}] is memory of another opened device"
            raise InvalidValue(what, cure="mount the runner on the device that has its tensors", argument=name)
        wanted = tuple(self.sizes.setdefault(letter, found) for letter, found in zip(shape, view.shape, strict=False))
        if view.dtype.name != dtype or view.shape != wanted or len(view.shape) != len(shape):
            raise InvalidValue(
                f"{self.what}[{name!r}] is {view.dtype} {list(view.shape)}, not {dtype} [{', '.join(shape)}]",
                cure="mount a runner of a FastDeploy that was compared",
                argument=name,
            )
        return Place(tensor, view, tensor.shape, tensor.data_ptr() if hasattr(tensor, "data_ptr") else None)
