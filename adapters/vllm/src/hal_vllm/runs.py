"""Runs of places: which request a token or a logits row belongs to, in operations of fixed shapes."""

from __future__ import annotations

import torch


class Runs:
    """The first ``most`` places, cut into runs by ``starts`` ``[runs + 1]``.

    ``of``: the number of a place's run, int64 ``[most]``; ``local``: its distance from the run's start; ``inside``:
    whether it lies in a run at all (then ``of`` is a run's number all the same).
    """

    def __init__(self, starts: torch.Tensor, most: int) -> None:
        if starts.device.type == "cpu":  # reading it waits for nothing there
            most = min(most, int(starts[-1]))
        self.count = most
        places = torch.arange(most, dtype=starts.dtype, device=starts.device)
        of = torch.searchsorted(starts[1:].contiguous(), places, right=True)
        self.inside = of < starts.shape[0] - 1
        self.of = of.clamp(max=starts.shape[0] - 2)
        self.local = places - starts[self.of]

    def fill(self, target: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Set the places of ``target`` that lie in a run, or those of ``mask``."""
        part = target[: self.count]
        part.copy_(torch.where(self.inside if mask is None else mask, values.to(part.dtype), part))


def put(target: torch.Tensor, places: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> None:
    """Write ``values`` to the flat ``places`` of a contiguous integer tensor where ``mask``; no two of these places are
    the same.

    The difference is added, so that what is masked out may point anywhere.
    """
    flat, at = target.view(-1), torch.where(mask, places, 0).reshape(-1).long()
    change = torch.where(mask.reshape(-1), values.reshape(-1).to(target.dtype) - flat[at], 0)
    flat.index_add_(0, at, change.to(target.dtype))


def most_of(values: torch.Tensor, otherwise: int) -> int:
    """Return the greatest of some counts where reading them waits for nothing, else ``otherwise``."""
    if values.device.type != "cpu" or values.numel() == 0:
        return otherwise
    return min(otherwise, int(values.max()))
