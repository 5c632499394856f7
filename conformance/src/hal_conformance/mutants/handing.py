"""Liars about a handover of keys and values: what is checked too late, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import Patch, liar


@liar(
    29,
    "a seal is taken at its word",
    seen="FastDeploy (a decode node is told that all was written, and looks no further)",
)
class SealUnchecked(Patch):
    """Neither the count nor the digest is compared with what has come."""

    seam = "check of a seal"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Nothing is ever missing."""
        return lambda promise, handover, digest: ""


@liar(29, "blocks have arrived although their checksums are wrong")
class ChecksumsIgnored(Patch):
    """What has come is given the checksums that the sender named."""

    seam = "contents of a promise"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Take the contents, and believe the sender about their checksums."""

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
        """As the receiver computes it."""
        from hal_core.handover.messages import crc_of

        return crc_of(data)


@liar(30, "a handover has ended while its blocks are being written", requires=("async_h2d", "can_hold_stream"))
class EndsBeforeItsWrites(Patch):
    """Nobody waits for the writes that were begun."""

    seam = "writes of a promise"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """They are over."""
        return lambda promise: False


@liar(30, "what is on its way is written after the handover was cancelled", seen="SGLang 35049")
class CancelledStillWritten(Patch):
    """The promise is told to have ended, and stays in the book."""

    seam = "end of a promise"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Tell the end of a promise that goes on."""

        def end(promises: Any, key: Any, event: Any) -> None:  # noqa: ANN401
            promise = promises.open[key]
            true(promises, key, event)
            if type(event).__name__ == "Cancelled":
                promises.open[key] = promise

        return end


@liar(31, "the fingerprints of two workers are not compared", seen="vLLM 42895")
class AnyLayout(Patch):
    """Blocks go wherever they are promised room."""

    seam = "comparison of fingerprints"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """All are alike."""
        return lambda own, theirs, peer, argument: None


@liar(32, "who waits for a peer waits for ever", seen="SGLang 36033")
class PatientForEver(Patch):
    """No time is long enough."""

    seam = "end of patience"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """It is never over."""
        return lambda since, now, seconds: False
