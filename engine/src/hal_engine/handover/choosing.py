"""The transfer of a rank: hal's own, or a vendor's, as ``--transfer MODULE:NAME`` gives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from hal_core import PluginError

from hal_engine.handover.socket_wire import open_transfer
from hal_engine.object_loader import check_maker, make

if TYPE_CHECKING:
    from hal_core import BoundDevice
    from hal_core.handover import BlockCache, KvTransfer

    from hal_engine.transport.curve import CurveKeys

_OPTION = "--transfer"
_METHODS = ("describe", "reserve", "send", "seal", "receive", "cancel", "close")


@dataclass(frozen=True, slots=True)
class TransferSetup:
    """The arguments of a rank's transfer.

    - ``device``: the rank's, open as long as the transfer is; ``cache``: its blocks of keys and values.
    - ``host``: this host's address for other workers, "" if all of them are on one host.
    - ``curve``: the job's keys, if there is a ``host``; else None.
    - ``rank``: the number of the rank in its worker.
    """

    device: BoundDevice
    cache: BlockCache
    host: str
    curve: CurveKeys | None
    rank: int


def make_transfer(name: str, setup: TransferSetup) -> KvTransfer:
    """Return hal's own transfer for an empty name, else the one that ``name`` makes of the setup; the import also
    searches the working directory.

    :raises InvalidValue: for a missing module or name, and for refusals of its maker or hal's own.
    :raises PluginError: for one that fails, or does not return a transfer.
    """
    if not name:
        return open_transfer(setup.cache, f"tcp://{setup.host}:*" if setup.host else None, setup.curve)
    check_maker(name, _OPTION, "my_transfers:MyTransfer")
    made = make(name, _OPTION, "transfer", setup)
    lacks = [method for method in _METHODS if not callable(getattr(made, method, None))]
    lacks += [] if hasattr(made, "sockets") else ["sockets"]
    if lacks:
        what = f"{name} made {type(made).__name__}, which has no {', '.join(lacks)}"
        raise PluginError(
            what, cure="see hal_core.handover.KvTransfer for the protocol of a transfer", argument=_OPTION
        )
    return cast("KvTransfer", made)
