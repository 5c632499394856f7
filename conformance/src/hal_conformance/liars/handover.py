"""Liars about a handover of keys and values: late or missing checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import Patch, liar


@liar(
    29,
    "a seal is taken at its word",
    seen="FastDeploy (a decode node trusts the message that all was written)",
)
class SealUnchecked(Patch):
    """A seal whose count and digest are not compared with the received blocks."""

    seam = "check of a seal"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Report no difference."""
        return lambda promise, handover, digest: ""


@liar(29, "blocks have arrived although their checksums are wrong")
class ChecksumsIgnored(Patch):
    """Received blocks with the checksums that the sender named."""

    seam = "contents of a promise"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Take the contents, and trust the sender's checksums."""

        def take(promises: Any, key: Any, message: Any, data: memoryview) -> None:  # noqa: ANN401
            told, promise = list(message.crcs), promises.open[key]
            size = len(data) // max(1, len(told))
            message.crcs = [cls.crc(data[row * size : (row + 1) * size]) for row in range(len(told))]
            true(promises, key, message, data)
            for row, crc in enumerate(told):
                if message.first + row in promise.crcs:
                    promise.crcs[message.first + row] = crc

        return take

    @staticmethod
    def crc(data: memoryview) -> int:
        """Compute the checksum as the receiver does."""
        from hal_core.handover.messages import crc_of

        return crc_of(data)


@liar(30, "a handover has ended while its blocks are being written", requires=("async_h2d", "can_hold_stream"))
class EndsBeforeItsWrites(Patch):
    """An end that does not wait for running writes."""

    seam = "writes of a promise"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Report the writes as finished."""
        return lambda promise: False


@liar(30, "blocks in transit are written after the handover was cancelled", seen="SGLang 35049")
class CancelledStillWritten(Patch):
    """A promise that is reported as ended but stays open."""

    seam = "end of a promise"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Report the end of a promise that continues."""

        def end(promises: Any, key: Any, event: Any) -> None:  # noqa: ANN401
            promise = promises.open[key]
            true(promises, key, event)
            if type(event).__name__ == "Cancelled":
                promises.open[key] = promise

        return end


@liar(31, "the fingerprints of two workers are not compared", seen="vLLM 42895")
class AnyLayout(Patch):
    """Blocks that are written without comparing fingerprints."""

    seam = "comparison of fingerprints"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Accept all fingerprints."""
        return lambda own, theirs, peer, argument: None


@liar(32, "a wait for a peer never ends", seen="SGLang 36033")
class PatientForEver(Patch):
    """A wait without a limit."""

    seam = "end of patience"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Never let the time end."""
        return lambda since, now, seconds: False


@liar(29, "blocks go to the handover that was reserved last")
class LastReservationTakesAll(Patch):
    """One table of destinations for all handovers."""

    seam = "contents of a promise"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Write to the last promise's blocks where it has as many."""

        def take(promises: Any, key: Any, message: Any, data: memoryview) -> None:  # noqa: ANN401
            promise, last = promises.open[key], list(promises.open.values())[-1]
            own = promise.blocks
            if message.first + len(message.crcs) <= len(last.blocks):
                promise.blocks = last.blocks + own[len(last.blocks) :]
            true(promises, key, message, data)
            promise.blocks = own

        return take


@liar(30, "the end of one handover ends those of its sender that began before it")
class OlderHandoversEndToo(Patch):
    """A list of handovers that is cut at the one that ended."""

    seam = "end of a promise"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """End older ones by the same event's kind."""

        def end(promises: Any, key: Any, event: Any) -> None:  # noqa: ANN401
            older = list(promises.open)[: list(promises.open).index(key)]
            true(promises, key, event)
            for other in older:
                if type(event).__name__ == "Cancelled":
                    true(promises, other, type(event)(other))

        return end
