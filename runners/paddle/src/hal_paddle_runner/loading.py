"""A checkpoint as the form of the decoder that suits its place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from hal.local_rank import HOST_PLACE

from .host import HostModel
from .onednn import Unsuitable

if TYPE_CHECKING:
    from .model import Model
    from .ranks import TensorRanks

Loading = Callable[[], AbstractContextManager[object]]


def load_model(
    directory: Path,
    *,
    place: str = HOST_PLACE,
    ranks: TensorRanks | None = None,
    everywhere: bool = False,
    loading: Loading = nullcontext,
) -> Model:
    """Load ``directory`` in the form for ``place`` (Paddle's name); ``loading`` is entered while Paddle is imported.

    In host memory where no prepared calls can be, the operators run, with a note. Raises as :meth:`Model.load`.
    """
    note = ""
    if place == HOST_PLACE:
        try:
            return HostModel.load(directory, ranks=ranks, everywhere=everywhere)
        except Unsuitable as why:
            note = f"Paddle's operators, about half as fast as prepared calls: {why}"
    with loading():
        from .llama import LlamaModel
    return LlamaModel.load(directory, place=place, ranks=ranks, everywhere=everywhere, note=note)
