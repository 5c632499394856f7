"""Records of the simulator: operations, reports of the checker, counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from hal_sim._native import Native, Record

ReportKind = Literal["race", "lifetime", "address", "collective"]
_REPORT_KINDS: tuple[ReportKind, ...] = ("race", "lifetime", "address", "collective")


@dataclass(frozen=True)
class Operation:
    """One operation. ``stream`` -1: done by the host itself. ``ran`` 0: not yet; else its place in the order of
    execution over all streams."""

    sequence: int
    kind: str
    device: int
    stream: int
    dst: int
    src: int
    nbytes: int
    ran: int
    label: str

    def __str__(self) -> str:
        where = f"on stream {self.stream}" if self.stream >= 0 else "by the host"
        label = f" [{self.label}]" if self.label else ""
        return f"{self.kind} #{self.sequence}{label} {where}, dst {self.dst:#x} src {self.src:#x} {self.nbytes} bytes"


@dataclass(frozen=True)
class Report:
    """A finding of the checker. ``first`` was issued before ``second``; a fault of one operation has no second."""

    kind: ReportKind
    what: str
    begin: int
    nbytes: int
    first: Operation
    second: Operation | None

    @property
    def missing_edge(self) -> str:
        """Return what would have ordered the two operations."""
        if self.second is None:
            return ""
        first, second = self.first, self.second
        if self.kind == "lifetime":
            return f"the host must wait for {first.kind} #{first.sequence} before {second.kind} #{second.sequence}"
        if first.stream < 0:
            return f"{first.kind} #{first.sequence} is not ordered with any work on stream {second.stream}"
        if second.stream < 0:
            return (
                f"the host does not wait for {first.kind} #{first.sequence} (stream {first.stream}) "
                f"before {second.kind} #{second.sequence}"
            )
        return (
            f"no event recorded on stream {first.stream} after {first.kind} #{first.sequence} is waited for "
            f"on stream {second.stream} before {second.kind} #{second.sequence}"
        )

    def __str__(self) -> str:
        head = f"{self.kind}: {self.what} at {self.begin:#x}, {self.nbytes} bytes"
        if self.second is None:
            return f"{head}\n  {self.first}"
        return f"{head}\n  {self.first}\n  {self.second}\n  missing: {self.missing_edge}"


class Reader:
    """Reads the native records, with the names of their kinds."""

    def __init__(self, native: Native) -> None:
        self._native = native
        self.kinds = _names(native.kind_name)
        flags = _names(native.kind_flags)
        self._with_flag = {f: [i for i, have in enumerate(flags) if f in have] for f in "DCLW"}

    def operation(self, record: Record) -> Operation:
        return Operation(
            sequence=record.sequence,
            kind=self.kinds[record.kind],
            device=record.device,
            stream=record.stream,
            dst=record.dst,
            src=record.src,
            nbytes=record.bytes,
            ran=record.ran,
            label=record.label.decode(errors="replace"),
        )

    def trace(self, after: int) -> list[Operation]:
        from hal_sim._native import Record

        room = self._native.trace(None, 0, after) + 64  # other threads may add some meanwhile
        records = (Record * room)()
        n = min(room, self._native.trace(records, room, after))
        return [self.operation(records[i]) for i in range(n)]

    def reports(self) -> list[Report]:
        from hal_sim._native import Report as NativeReport

        room = self._native.reports(None, 0) + 16
        found = (NativeReport * room)()
        n = min(room, self._native.reports(found, room))
        return [
            Report(
                kind=_REPORT_KINDS[r.kind],
                what=r.text.decode(errors="replace"),
                begin=r.begin,
                nbytes=r.bytes,
                first=self.operation(r.first),
                second=self.operation(r.second) if r.has_second else None,
            )
            for r in found[:n]
        ]

    def counters(self) -> dict[str, int]:
        import ctypes

        values = (ctypes.c_long * len(self.kinds))()
        self._native.counters(values)
        counted = {name: values[i] for i, name in enumerate(self.kinds)}

        def total(flag: str) -> int:
            return sum(values[i] for i in self._with_flag[flag])

        return counted | {
            "submissions": total("D"),  # copies, launches and collectives queued on a stream
            "copies": total("C"),
            "launches": total("L"),
            "host_waits": total("W"),  # calls that may block the host; blocked_wait counts those that did
        }


def _names(function: Callable[[int], bytes | None]) -> Sequence[str]:
    names: list[str] = []
    while (name := function(len(names))) is not None:
        names.append(name.decode())
    return names
