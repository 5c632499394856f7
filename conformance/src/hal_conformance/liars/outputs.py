"""Liars between the copied output fields and the record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.memory.copies import CopyTicket, HostCopy
from hal_core.output.records import OutputRecord, SlotStatus

from . import Lie, Patch, liar

if TYPE_CHECKING:
    from hal_core.memory.views import ByteRange, Memory
    from hal_core.streams import Stream


class Told(Patch):
    """Base of liars that report another record than the step's."""

    seam = "record of an output"

    @classmethod
    def change(cls, record: OutputRecord) -> OutputRecord:
        """Return the record to report instead."""
        return record

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Change each record."""
        return lambda ticket, timeout=None: cls.change(true(ticket, timeout))


@liar(24, "a count is one too small where there are several tokens", seen="FastDeploy 7442")
class CountOffByOne(Told):
    """The last token of a row with several is lost."""

    @classmethod
    def change(cls, record: OutputRecord) -> OutputRecord:
        """Drop the last token of the first row that has more than one."""
        rows = np.flatnonzero(record.counts > 1)
        if not len(rows) or record.logprobs is not None:
            return record
        counts = record.counts.copy()
        counts[rows[0]] -= 1
        end = int(record.counts[: rows[0] + 1].sum()) - 1
        return replace(record, counts=counts, tokens=np.delete(record.tokens, end))


@liar(24, "log-probabilities are shifted by one token", seen="FastDeploy 7442")
class LogprobsShifted(Told):
    """Row i has the log-probabilities of row i - 1."""

    @classmethod
    def change(cls, record: OutputRecord) -> OutputRecord:
        """Roll them."""
        if record.logprobs is None:
            return record
        return replace(record, logprobs=np.ascontiguousarray(np.roll(record.logprobs, 1, axis=0)))


@liar(24, "the drafts of a prefill node are cut off", seen="SGLang 31466")
class FirstDraftsCutOff(Told):
    """Drafts for the decode node's first step that are not sent."""

    @classmethod
    def change(cls, record: OutputRecord) -> OutputRecord:
        """Leave the drafts out of a record with first tokens."""
        return replace(record, drafts=None, draft_counts=None) if record.first_token.any() else record


@liar(24, "the last draft of a first token is cut off where all drafts are used")
class LastDraftCutOff(Told):
    """A bound that is one too low, for the first slot that meets it."""

    @classmethod
    def change(cls, record: OutputRecord) -> OutputRecord:
        """Drop the last draft of the record."""
        if record.drafts is None or record.draft_counts is None or not record.draft_counts.max(initial=0) > 1:
            return record
        counts, at = record.draft_counts.copy(), int(record.draft_counts.argmax())
        counts[at] -= 1
        end = int(record.draft_counts[: at + 1].sum())
        return replace(record, drafts=np.delete(record.drafts, end - 1), draft_counts=counts)


@liar(24, "drafts are told of the row before theirs", seen="FastDeploy: rows of two lists in two orders")
class DraftsOfTheNextRow(Told):
    """The counts are in another order than the rows."""

    @classmethod
    def change(cls, record: OutputRecord) -> OutputRecord:
        """Shift the counts by a row."""
        return record if record.draft_counts is None else replace(record, draft_counts=np.roll(record.draft_counts, -1))


@liar(24, "the log-probabilities of a prefill node are cut off", seen="vLLM 51919")
class FirstLogprobsCutOff(Told):
    """A first token without log-probabilities."""

    @classmethod
    def change(cls, record: OutputRecord) -> OutputRecord:
        """Leave them out of a record with first tokens."""
        if not record.first_token.any():
            return record
        return replace(record, logprobs=None, logprob_token_ids=None, ranks=None)


@liar(19, "the position of a token is one too high after the first")
class PositionOffByOne(Told):
    """Positions count from one."""

    @classmethod
    def change(cls, record: OutputRecord) -> OutputRecord:
        """Shift all positions but 0."""
        return replace(record, positions=record.positions + (record.positions > 0))


@liar(19, "an aborted request is reported as preempted", seen="FastDeploy 5796: one sentinel for two things")
class OneWordForTwo(Told):
    """One status for two ways of leaving."""

    @classmethod
    def change(cls, record: OutputRecord) -> OutputRecord:
        """Report PREEMPTED for both."""
        aborted = record.status == SlotStatus.ABORTED
        status, finish = record.status.copy(), record.finish.copy()
        status[aborted], finish[aborted] = SlotStatus.PREEMPTED, 0
        return replace(record, status=status, finish=finish)


@liar(21, "a count out of bounds is clipped without an error")
class ClipsCounts(Patch):
    """A check that finds no violation."""

    seam = "build of a record"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Clip before the checks."""

        def build(columns: Any, snapshot: Any) -> Any:  # noqa: ANN401 (as the true one)
            most = snapshot.max_accept if snapshot.step.speculative else 1
            return true(columns | {"accept_num": np.clip(columns["accept_num"], 0, most)}, snapshot)

        return build


@liar(21, "a token outside the vocabulary is reported as valid")
class TakesAnyToken(Patch):
    """A vocabulary as large as int64, into which negative ids are wrapped."""

    seam = "build of a record"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Make every id valid."""

        def build(columns: Any, snapshot: Any) -> Any:  # noqa: ANN401 (as the true one)
            names = ("sampled_token_ids", "accept_tokens", "draft_tokens", "topk_token_ids")
            changed = {name: columns[name] & (2**63 - 1) for name in names if name in columns}
            return true(columns | changed, snapshot._replace(token_limit=2**63))

        return build


@liar(25, "without a proposer there are no tokens", seen="FastDeploy 7172: the naive path")
class NeedsAProposer(Patch):
    """A plain step on a state sized for drafts that reports no tokens."""

    seam = "build of a record"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Zero the tokens of plain steps."""

        def build(columns: Any, snapshot: Any) -> Any:  # noqa: ANN401 (as the true one)
            record, batch_ids, violation = true(columns, snapshot)
            if snapshot.max_draft_tokens and not snapshot.step.speculative:
                changes = {"tokens": np.zeros_like(record.tokens)}
                if record.logprob_token_ids is not None:
                    changes["logprob_token_ids"] = record.logprob_token_ids.copy()
                    changes["logprob_token_ids"][:, 0] = 0
                record = replace(record, **changes)
            return record, batch_ids, violation

        return build


@liar(22, "outputs share one static buffer", seen="FastDeploy's static message structures")
class StaticBuffer(Lie):
    """One buffer for the copies of two steps, the first of which is still unread."""

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Reuse the array of the same size."""
        copied = super().copy_out(memory, parts, stream)  # type: ignore[misc]
        copied.wait()
        buffers = self.__dict__.setdefault("buffers", {})
        kept = []
        for at, data in enumerate(copied.data):
            buffer = buffers.setdefault((at, data.nbytes), np.empty_like(data))
            buffer[...] = data
            kept.append(buffer)
        return HostCopy(kept)


@liar(23, "saved output is read late, after later work has changed it", seen="FastDeploy 7221, vLLM 29623")
class ReadsLate(Lie):
    """A copy that is made when it is read."""

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Copy at the first read."""
        return LateCopy(lambda: super(ReadsLate, self).copy_out(memory, parts, stream))  # type: ignore[misc]


class LateCopy(HostCopy):
    """A copy that is made when its data is read."""

    def __init__(self, make: Callable[[], CopyTicket]) -> None:
        super().__init__([])
        self.make = make

    @property
    def data(self) -> Sequence[np.ndarray[Any, np.dtype[np.uint8]]]:
        """Return the bytes as they are now."""
        copied = self.make()
        copied.wait()
        return copied.data


@liar(12, "the host mirror shows the device as it is now, not as of the output that was taken")
class MirrorRunsAhead(Patch):
    """A mirror that is refreshed from the device."""

    seam = "host mirror"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Read the fields again."""

        def take(state: Any, ticket: Any) -> Any:  # noqa: ANN401 (as the true one)
            record = true(state, ticket)
            part = state.output_range(topk=False)
            copied = state.device.copy_out(state.memory, [part], state.device.default_stream)
            copied.wait()
            state.mirror = {name: state.columns(copied.data[0], part)[name] for name in state.mirror}
            return record

        return take


# -- the slots when a record is built ----------------------------------------------------------------------------------


class SlotsNow(Patch):
    """Base: a record is built with the requests that hold the slots then, not those of the step."""

    seam = "record of an output"

    @classmethod
    def changed(cls, snapshot: Any, requests: Sequence[Any]) -> Any:  # noqa: ANN401 (the core's)
        """Return the snapshot with them. ``requests``: of each slot of its order, None if free."""
        raise NotImplementedError

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Look at the table again."""

        def resolve(ticket: Any, timeout: float | None = None) -> Any:  # noqa: ANN401 (the core's)
            if ticket._record is None:
                requests = [ticket._state.host_table.requests[slot] for slot in ticket._snapshot.order.tolist()]
                ticket._snapshot = cls.changed(ticket._snapshot, requests)
            return true(ticket, timeout)

        return resolve


@liar(19, "a record has the names of the requests that hold the slots when it is built")
class NamesOfNow(SlotsNow):
    """A free slot's is kept."""

    @classmethod
    def changed(cls, snapshot: Any, requests: Sequence[Any]) -> Any:  # noqa: ANN401 (the core's)
        """Replace the names."""
        pairs = zip(snapshot.names, requests, strict=True)
        return snapshot._replace(names=tuple(one.request_id if one and name else name for name, one in pairs))


@liar(19, "a record leaves out the requests whose slot is free when it is built")
class GoneAreLeftOut(SlotsNow):
    """Nobody waits for their tokens, it is thought."""

    @classmethod
    def changed(cls, snapshot: Any, requests: Sequence[Any]) -> Any:  # noqa: ANN401 (the core's)
        """Empty their names."""
        held = np.array([one is not None for one in requests])
        names = tuple(name if one else "" for name, one in zip(snapshot.names, requests, strict=True))
        ids = np.where(held, snapshot.admission_ids, 0)
        return snapshot._replace(names=names, admission_ids=ids, plain=False)
