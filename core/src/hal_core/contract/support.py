"""Optional parts of a device for the conformance kit: :class:`Support`.

A plugin's distribution names its own in the entry-point group ``hal.conformance``, under the device's name::

    [project.entry-points."hal.conformance"]
    mychip = "hal_mychip.conformance:MyChipSupport"

Without one the default below is used. Tests that need more are skipped with the missing part as the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from ..handover.protocol import BlockCache, KvTransfer
    from .device import Device


OPTIONAL_MEMBERS = ("probe_counts", "staging", "primitives")
"""Members by which an opened device offers more.

- ``probe_counts()``: the driver's calls since it was opened, counted below the plugin (a trace, a proxy around the
  driver), as :class:`hal_core.contract.counters.Counters`.
- ``staging``: its staging ring, which the kit makes small and its deadline short (G3).
- ``primitives``: those it was made over.
"""


class Support:
    """A plugin's support for the kit. Derive from it, and override the parts that your device can offer.

    ``expected_failures``: name of a test of the kit to the reason why it fails on this device. An entry is an error if
    it has no reason, names no test, or its test passes.
    """

    expected_failures: ClassVar[Mapping[str, str]] = {}
    tensors: ClassVar[bool] = False
    """True if :meth:`tensor` and :meth:`values_of` are implemented."""
    reversed_views: ClassVar[bool] = True
    """False if tensors of the framework cannot be sliced with negative steps (torch's)."""
    ranks: bool = False
    """True if :meth:`rank_environment` is implemented, so that the kit can start several ranks (G13, G14, G16, G17)."""
    four_ranks: bool = False
    """True if all four ranks of the kit can be one group that :meth:`join` need not open."""
    loss_ends_ranks: bool = False
    """True if a process that lost a group must end, as its library cannot abort the waiting call. The kit then starts
    new ranks after each test of a loss. Otherwise :meth:`join` opens the group again."""
    keeps: ClassVar[int] = 0
    """Small memory blocks that a library below the plugin leaks per call; the kit forgives at most 8, with a line."""
    transfers: ClassVar[bool] = False
    """True if :meth:`transfer` is implemented: the kit then checks the vendor's own (G29 to G32), else hal's."""
    update_waits: ClassVar[bool] = False
    """True if the device's ``update_inputs`` waits for the device, as DeviceBase's default does. Tests that need a
    pending step (G28) cannot run then, and ``overlapped_update`` is not offered. A device with the capability
    ``async_update`` cannot set it."""

    def offers(self, device: Device) -> set[str]:
        """Return the names, usable in ``requires=``, of the parts offered for an opened device."""
        found = {"tensors"} if self.tensors else set()
        if not self.transfers:
            found.add("messages")
        if self.ranks:
            found.add("several_ranks")
        if self.four_ranks or getattr(self, "whole_group", False):  # the name of release 1.1, for one release more
            found.add("four_ranks")
        if not self.update_waits or device.capabilities.async_update:
            found.add("overlapped_update")
        found.update(name for name in OPTIONAL_MEMBERS if hasattr(device, name))
        if type(self).is_locked is not Support.is_locked:
            found.add("is_locked")
        if type(self).native_objects is not Support.native_objects:
            found.add("native_objects")
        return found

    def why_not(self, need: str) -> str:
        """Return why a part that :meth:`offers` leaves out is not offered, if that is not obvious; else ""."""
        if need == "overlapped_update" and self.update_waits:
            return (
                "update_inputs waits for the device, so a step cannot be held; a kernel for it would make this "
                "checkable"
            )
        if need == "messages":
            return "messages between two of the vendor's own transfers cannot be held or changed on their way"
        return ""

    def versions(self, device: Device) -> Mapping[str, str]:
        """Return the versions of what lies below the plugin, for the kit's report: driver, runtime, firmware."""
        return {}

    def transfer(self, device: Device, cache: BlockCache, silence: float) -> KvTransfer:
        """Return a vendor's own transfer for blocks in the device's memory; the kit opens two and hands over.

        Block ``b`` is the ``cache.block_bytes`` bytes of ``cache.memory`` (from ``device.allocate``) starting at ``b *
        cache.block_bytes``. The transfer may write through ``cache.write`` or directly. It listens on any address, its
        description has ``cache.facts()``, and a peer is lost after ``silence`` seconds.
        """
        raise NotImplementedError("transfers is true, but transfer() is not implemented")

    def tensor(self, device: Device, values: np.ndarray[Any, Any]) -> object:
        """Return a framework's tensor on the device, with these values and strides as close to theirs as possible."""
        raise NotImplementedError("tensors is true, but tensor() is not implemented")

    def values_of(self, device: Device, tensor: Any) -> np.ndarray[Any, Any]:  # noqa: ANN401 (the framework's)
        """Return the values of such a tensor, read in the framework's own way."""
        raise NotImplementedError("tensors is true, but values_of() is not implemented")

    def is_locked(self, device: Device, address: int) -> bool | None:
        """Whether the driver knows host memory at ``address`` as page-locked; None where it cannot be asked.

        Overriding it offers ``is_locked``: the kit then asks of all that ``allocate_host`` gives (G7).
        """
        return None

    def native_objects(self, device: Device) -> Mapping[str, int]:
        """Kind to count of the driver's objects (events, buffers) that the device has made and not given back.

        Overriding it offers ``native_objects``: the kit then checks that calls keep none, which Python's own counts of
        objects cannot show.
        """
        raise NotImplementedError("native_objects() is not offered")

    def rank_environment(self, rank: int, endpoints: Sequence[str]) -> Mapping[str, str]:
        """Return the environment variables for the process of a rank; ``endpoints`` are free ports of this host.

        The process lives for all tests of a session. It opens the device by its name, as this process does.
        """
        raise NotImplementedError("ranks is true, but rank_environment() is not implemented")

    def join(self, groups: Sequence[Sequence[int]], timeout: float, epoch: str) -> None:
        """Open groups in each rank, before the device is opened for a test; no call on them may last beyond
        ``timeout``.

        Every rank calls it with the same arguments. A group lost in an earlier test must work again. ``epoch`` names
        the test, for devices whose groups find each other by a name. The default returns at once.
        """
