"""Liars about a handover of keys and values: late or missing checks."""

from __future__ import annotations

from hal_core.handover.messages import crc_of

from .proxies import HELD
from .rows import Call, register, row


def trust_checksums(call: Call) -> None:
    message, promise, data = call.message, call.self.open[call.key], call.data
    sent = list(message.crcs)
    size = len(data) // max(1, len(sent))
    message.crcs = [crc_of(data[at * size : (at + 1) * size]) for at in range(len(sent))]
    call()
    for at, crc in enumerate(sent):
        if message.first + at in promise.crcs:
            promise.crcs[message.first + at] = crc


def into_the_last(call: Call) -> None:
    promise, last = call.self.open[call.key], list(call.self.open.values())[-1]
    own = promise.blocks
    if call.message.first + len(call.message.crcs) <= len(last.blocks):
        promise.blocks = last.blocks + own[len(last.blocks) :]
    call()
    promise.blocks = own


def stay_open(call: Call) -> None:
    promise = call.self.open[call.key]
    call()
    if type(call.event).__name__ == "Cancelled":
        call.self.open[call.key] = promise


def end_older(call: Call) -> None:
    older = list(call.self.open)[: list(call.self.open).index(call.key)]
    call()
    for other in older:
        if type(call.event).__name__ == "Cancelled":
            call(key=other, event=type(call.event)(other))


TABLE = {
    "a seal is taken at its word": row(
        "SealUnchecked",
        29,
        "check of a seal",
        lambda call: "",
        seen="FastDeploy (a decode node trusts the message that all was written)",
    ),  # a seal whose count and digest are not compared with the received blocks
    "blocks have arrived although their checksums are wrong": row(
        "ChecksumsIgnored", 29, "contents of a promise", trust_checksums
    ),  # received blocks with the checksums that the sender named
    "blocks go to the handover that was reserved last": row(
        "LastReservationTakesAll", 29, "contents of a promise", into_the_last
    ),  # one table of destinations for all handovers
    "a handover has ended while its blocks are being written": row(
        "EndsBeforeItsWrites", 30, "writes of a promise", lambda call: False, HELD
    ),  # an end that does not wait for running writes
    "blocks in transit are written after the handover was cancelled": row(
        "CancelledStillWritten", 30, "end of a promise", stay_open, seen="SGLang 35049"
    ),  # a promise that is reported as ended but stays open
    "the end of one handover ends those of its sender that began before it": row(
        "OlderHandoversEndToo", 30, "end of a promise", end_older
    ),  # a list of handovers that is cut at the one that ended
    "the fingerprints of two workers are not compared": row(
        "AnyLayout", 31, "comparison of fingerprints", lambda call: None, seen="vLLM 42895"
    ),  # blocks that are written without comparing fingerprints
    "a wait for a peer never ends": row(
        "PatientForEver", 32, "end of patience", lambda call: False, seen="SGLang 36033"
    ),  # a wait without a limit
}
register(__name__, TABLE)
