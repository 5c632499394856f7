"""Durations of the engine: named, documented, and overridden by environment variables, as those of the core.

    from hal_engine.timeouts import TIMEOUTS

    channel.flush(TIMEOUTS.deadline)

docs/timeouts.md lists all of them; ``python -m hal_engine.timeouts`` prints the table of these.
"""

from __future__ import annotations

import os

from hal_core import Seconds

from hal import timeouts

MOST = 1e9
"""Upper bound of a duration: Python's locks take no wait beyond ``threading.TIMEOUT_MAX``."""
MOST_POLLED = 2e6
"""Upper bound of a wait for a socket: poll's milliseconds are a C int."""
UNBOUNDED = 3600.0
"""Length of one wait without any bound; the wait is repeated."""
LEAST_HEARTBEAT, MOST_HEARTBEAT = 0.001, 3600.0
"""Bounds of a sink's heartbeat: poll counts milliseconds."""


_NOTHING = (
    *("HEARTBEAT_ENGINE", "BROKEN", "PROCESS_BEAT", "PEER_HEARTBEAT", "PEER_IDLE", "CONNECTION", "STRANGERS"),
    *("STRANGERS_LOOK", "LOCK_NAME", "KEEPALIVE", "ASK_AGAIN", "READER_SLICE", "NOTE", "LAST_MESSAGE", "SINK_LAST"),
    *("READER_LEAVE", "LINGER", "PROCESS_LOOK", "READER_LOOK", "RECORDS"),
)
_NOW = {
    "beat": "LONGEST_LOOK",
    "deadline": "MESSAGE",
    "greeting": "RAY_ADDRESS",
    "group_end": "LOSS_END",
    "hold": "OFFER",
    "interpreter_end": "RANK_EXIT",
    "look": "POLL_NATIVE ENGINE_WAIT TRANSFER PROCESS_IDLE IDLE_LOOK QUEUE_IDLE",
    "loss_reason": "LOST_RANK RANK_FAILED",
    "parting": "LEAVE SINK_LEAVE SINK_CLOSE_SIGNAL",
    "pause": "LISTENING_LOOK LAST_STEP ACKNOWLEDGE RECONNECT LOCK_LOOK",
    "poll": "QUEUE_LOOK TORCH_POLL",
    "poll_background": "POLL_BESIDE",
    "poll_most": "CONNECTING_LOOK OUTPUT QUEUE_LOOK_MOST",
    "ranks_end": "RECORDS_END",
    "ranks_end_forced": "RANK_EXIT_LOST",
    "ring": "DEVICE_END RUNNER",
    "signal": "PROCESS_START_END",
    "silence": "PEER_SILENCE",
    "starting": "JOINING SERVE",
}
GONE: dict[str, str] = dict.fromkeys(_NOTHING, "") | {old: new for new, olds in _NOW.items() for old in olds.split()}
"""Former timeouts, each with the field that states the same now; "" if nothing does."""


class Timeouts(timeouts.Timeouts):
    """Seconds. A field may be set, as tests do; its variable takes precedence."""

    def check(self) -> None:
        """Raise :class:`hal_core.InvalidValue` for the first variable that holds no number above 0. Log a warning for
        variables of former timeouts."""
        super().check()
        for name, field in GONE.items():
            if (variable := f"HAL_SECONDS_{name}") in os.environ:
                import logging  # the help needs none

                now = f"is {getattr(type(self), field).variable} now" if field else "limits nothing any more"
                logging.getLogger("hal").warning("%s %s (docs/timeouts.md)", variable, now)

    shown: Seconds = Seconds(2.0, "showing what is left after a signal, where standard output takes nothing")
    sink_close: Seconds = Seconds(10.0, "sending what is left to the reader of `--sink` at the end of a run")
    tokenizer: Seconds = Seconds(5.0, "processor time of a tokenizer for a prompt, in a process of its own")
    tokenizer_mib: Seconds = Seconds(3.0, "the same, beside it, for each MiB of the prompt")
    last_event: Seconds = Seconds(
        1.0, "sending the error of a request that the end of `hal serve --drain` cuts, before its connection is closed"
    )
    ping: Seconds = Seconds(60.0, "between two comments that keep a stream of `hal serve` open")
    request_head: Seconds = Seconds(
        10.0, "a client's sending the head of a request to `hal serve`, and a connection without one"
    )
    request_body: Seconds = Seconds(60.0, "a client's sending the body of a request to `hal serve`")
    unread_answer: Seconds = Seconds(300.0, "a full connection, of whose answer a client of `hal serve` reads nothing")
    client_look: Seconds = Seconds(1.0, "between two looks of `hal serve` for connections that take longer than these")
    # ranks and their engine
    start_line: Seconds = Seconds(60.0, "ranks' start, between two lines of the log that name the missing ranks")
    step: Seconds = Seconds(
        600.0,
        "a step, from the end of the one before it; 256 prompt tokens (`--chunk`) through 7 B parameters take 360 at "
        "10 GFLOP/s",
        "HAL_RANKS_STEP",
    )
    parting: Seconds = Seconds(
        2.0, "the other side's reading what was sent, when an end closes: of a channel, a sink, a reader or a transfer"
    )
    raised: Seconds = Seconds(5.0, "the other ranks' raising too, after a runner raised on one rank of a group")
    ranks_end_forced: Seconds = Seconds(2.0, "the end of ranks that cannot end in order: a device may wait for ever")
    ranks_end: Seconds = Seconds(
        10.0, "the end of ranks in order; half of it for their records, half for those of `--sink`"
    )
    hold: Seconds = Seconds(
        30.0, "a decode worker's answer to an offer, the arrival of what is sealed, and finding a worker with room"
    )
    ray_last_line: Seconds = Seconds(5.0, "reading the last lines of dead ranks on their Ray nodes")
    stats: Seconds = Seconds(0.25, "between two messages of an engine process about how busy it is")
    # records and their readers
    deadline: Seconds = Seconds(10.0, "a wait for room, of a sink (`open_sink`) or to send a message")
    heartbeat: Seconds = Seconds(0.25, "between two heartbeats of a sink (`open_sink`)")
    process_silence: Seconds = Seconds(
        8.0, "an engine process without a beat, after which it counts as stopped: its requests end with an error"
    )
    lost_after: Seconds = Seconds(30.0, "silence of a session, after which it is lost (`OutputReader`)")
    grace: Seconds = Seconds(2.0, "a broken connection of a session, after which it is lost (`OutputReader`)")
    retry: Seconds = Seconds(
        1.0, "until a client of `hal serve` tries again, whose request found a full queue (`Retry-After`)"
    )
    # connections
    beat: Seconds = Seconds(1.0, "between two signs of life on a channel")
    greeting: Seconds = Seconds(10.0, "a new connection's showing what it is, and one to a Ray cluster")
    lock: Seconds = Seconds(1.0, "another process's taking or giving back an address in the same folder")
    reconnect_most: Seconds = Seconds(0.2, "between two looks for a reader that is not there, at most")


TIMEOUTS = Timeouts()


if __name__ == "__main__":
    Timeouts.print_table()
