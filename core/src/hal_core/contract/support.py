"""What a plugin may tell the kit about its device, besides the contract: :class:`Support`.

A plugin's distribution names its own in the entry-point group ``hal.conformance``, under the device's name::

    [project.entry-points."hal.conformance"]
    mychip = "hal_mychip.conformance:MyChipSupport"

Without one the default below is used, and the tests that need more are skipped and say what was missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from ..handover.protocol import BlockCache, KvTransfer
    from .counters import Counters
    from .device import Device


@runtime_checkable
class SubmissionProbe(Protocol):
    """A device whose driver's calls can be counted below the plugin (a trace, or a proxy around the driver)."""

    def probe_counts(self) -> Counters:
        """What really reached the device since it was opened; ``counters()`` must say the same of submissions."""


class Ring(Protocol):
    """A ring of fenced staging blocks, as :class:`hal_core.devices.StagingRing`: bytes at most, seconds to wait."""

    limit: int
    deadline: float


@runtime_checkable
class Staged(Protocol):
    """A device that shows its staging ring, so that the kit can make it small and impatient (G3)."""

    staging: Ring


class Support:
    """What the kit asks of a plugin. Derive from it, and override what your device can offer.

    ``expected_failures``: name of a test of the kit to the reason why it fails on this device. An entry without a
    reason, that no test bears, or whose test passes, is an error.
    """

    expected_failures: ClassVar[Mapping[str, str]] = {}
    tensors: ClassVar[bool] = False
    """True when :meth:`tensor` and :meth:`values_of` are offered."""
    ranks: bool = False
    """True when :meth:`rank_environment` is offered, so that the kit can start several ranks (G13, G14, G16, G17)."""
    whole_group: bool = False
    """True when all four ranks of the kit can be one group, which :meth:`join` need not open."""
    loss_ends_ranks: bool = False
    """True when a process that lost a group has to end, as it cannot make its library give up the call that waits: the
    kit then starts new ranks after each test of a loss. Otherwise :meth:`join` opens the group again."""
    keeps: ClassVar[int] = 0
    """Small blocks of memory that a library below the plugin keeps of each call, as it leaks: forgiven by the kit."""
    transfers: ClassVar[bool] = False
    """True when :meth:`transfer` is offered: the kit then checks the vendor's own (G29 to G32), else hal's."""
    update_waits: ClassVar[bool] = False
    """True when the device's ``update_inputs`` waits for the device, as the default of DeviceBase does; then what needs
    a step that has not run yet (G28) cannot be shown, and ``overlapped_update`` is not offered. A device whose
    capabilities say ``async_update`` cannot be excused."""

    def offers(self, device: Device) -> set[str]:
        """The names, usable in ``requires=``, of what is offered for an opened device."""
        found = {"tensors"} if self.tensors else set()
        if not self.transfers:
            found.add("messages")
        if self.ranks:
            found.add("several_ranks")
        if self.whole_group:
            found.add("whole_group")
        if not self.update_waits or device.capabilities.async_update:
            found.add("overlapped_update")
        if isinstance(device, SubmissionProbe):
            found.add("probe_counts")
        if isinstance(device, Staged):
            found.add("staging")
        return found

    def why_not(self, need: str) -> str:
        """Why something that :meth:`offers` leaves out is not offered here, where the reader may wonder; else ""."""
        if need == "overlapped_update" and self.update_waits:
            return "update_inputs waits for the device, so a step cannot be held; with a kernel for it this is checked"
        if need == "messages":
            return "what goes between two of the vendor's own transfers cannot be held or changed on its way"
        return ""

    def transfer(self, device: Device, cache: BlockCache, silence: float) -> KvTransfer:
        """A vendor's own way for keys and values, for blocks in the device's memory; the kit opens two and hands over.

        Block ``b`` is the ``cache.block_bytes`` bytes of ``cache.memory`` (what ``device.allocate`` gave) from
        ``b * cache.block_bytes`` on; to write by ``cache.write`` or past it is the transfer's choice. It listens
        where it likes, its description has ``cache.facts()``, and a peer is lost after ``silence`` seconds.
        """
        raise NotImplementedError("transfers is true, but transfer() is not implemented")

    def tensor(self, device: Device, values: np.ndarray[Any, Any]) -> object:
        """A framework's tensor on the device, with these values and strides as near to theirs as it can have."""
        raise NotImplementedError("tensors is true, but tensor() is not implemented")

    def values_of(self, device: Device, tensor: Any) -> np.ndarray[Any, Any]:  # noqa: ANN401 (the framework's)
        """The values of such a tensor, read in the framework's own way."""
        raise NotImplementedError("tensors is true, but values_of() is not implemented")

    def rank_environment(self, rank: int, endpoints: Sequence[str]) -> Mapping[str, str]:
        """The variables with which the process of a rank is started; ``endpoints`` are free ports of this host.

        The process lives for all tests of a session. It opens the device as this one does, by its name.
        """
        raise NotImplementedError("ranks is true, but rank_environment() is not implemented")

    def join(self, groups: Sequence[Sequence[int]], timeout: float, epoch: str) -> None:
        """In each rank, before the device is opened for a test: open groups, on which no call lasts beyond ``timeout``.

        Every rank calls it with the same arguments. A group that a test before has lost must be sound again; ``epoch``
        names the test, for devices whose groups find each other by a name. By default nothing needs to be done.
        """
