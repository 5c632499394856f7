"""Functions that ranks run in tests of groups made by a device's own library."""

from types import SimpleNamespace

from hal_core import Group
from hal_core.devices import open_groups, opened
from hal_core.ranks import groups as groups_module
from hal_engine.distributed.job_groups import open_job

LIBRARY = "a library of the device's"


class Made:
    """A group of such a library: the bytes shared by its first rank, and whether it was closed or aborted."""

    def __init__(self, ranks, me, share):
        self.ranks, self.calls = tuple(ranks), []
        self.shared = share(bytes([me]) * 5)

    def abort(self):
        self.calls.append("abort")

    def close(self):
        self.calls.append("close")


def make(ranks, me, share, timeout):
    return Made(ranks, me, share)


def of(rank, groups):
    """Return the group that contains this rank."""
    return Group(next(ranks for ranks in groups if rank.rank in ranks), rank.rank)


def open_by_device(rank, groups, timeout):
    """Open the groups; return the bytes that this rank received, and whether a second opening gives the same group."""
    open_groups(groups, backend=LIBRARY, timeout=timeout, make=make)
    found = opened(of(rank, groups), backend=LIBRARY, make=make).process_group
    open_groups(groups, backend=LIBRARY, timeout=timeout, make=make)
    rank.kept["made"] = found
    return found.ranks, found.shared, opened(of(rank, groups), backend=LIBRARY, make=make).process_group is found


def refuse(rank, groups, who):
    """One rank cannot make its group; return each rank's error."""

    def unable(ranks, me, share, timeout):
        if me == who:
            raise LookupError("no such library here")
        return make(ranks, me, share, timeout)

    try:
        open_groups(groups, backend=f"{LIBRARY}, not everywhere", timeout=5.0, make=unable)
    except Exception as error:  # noqa: BLE001 (it is the answer)
        return type(error).__name__
    return ""


def give_up(rank, groups):
    """The watchdog aborts the group, and another is made; return the fate of both."""
    first = opened(of(rank, groups), backend=LIBRARY, make=make)
    first.watchdog.failed(RuntimeError("for the test"))
    open_groups(groups, backend=LIBRARY, timeout=2.0, make=make)
    second = opened(of(rank, groups), backend=LIBRARY, make=make)
    second.close()
    groups_module._open.pop((LIBRARY, second.ranks))
    return first.process_group.calls, second.process_group.calls, first is second


def job(rank, groups):
    """Return the groups that ``open_job`` opens for a device with such a library."""
    device = SimpleNamespace(
        groups_by=f"{LIBRARY}, of a job",
        make_group=make,
        index=0,
        capabilities=SimpleNamespace(collective="nccl"),
    )
    open_job(SimpleNamespace(device=device), groups, timeout=2.0)
    mine = of(rank, groups).ranks
    return sorted(library for library, ranks in groups_module._open if ranks == tuple(sorted(mine)))
