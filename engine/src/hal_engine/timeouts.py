"""Durations of the engine: named, documented, and overridden by environment variables, as those of the core.

    from hal_engine.timeouts import TIMEOUTS

    channel.flush(TIMEOUTS.message)

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


GONE = (
    *("HEARTBEAT_ENGINE", "BROKEN", "PROCESS_BEAT", "PEER_HEARTBEAT", "PEER_IDLE", "CONNECTION", "STRANGERS"),
    *("STRANGERS_LOOK", "LOCK_NAME", "KEEPALIVE", "ASK_AGAIN", "READER_SLICE", "NOTE", "LAST_MESSAGE", "SINK_LAST"),
    *("READER_LEAVE", "LINGER", "PROCESS_LOOK", "READER_LOOK", "RECORDS"),
)
"""Former timeouts, whose variables limit nothing any more."""


class Timeouts(timeouts.Timeouts):
    """Seconds. A field may be set, as tests do; its variable takes precedence."""

    def check(self) -> None:
        """Raise :class:`hal_core.InvalidValue` for the first variable that holds no number above 0. Log a warning for
        variables of former timeouts."""
        super().check()
        if gone := [name for name in map("HAL_SECONDS_{}".format, GONE) if name in os.environ]:
            import logging  # the help needs none

            logging.getLogger("hal").warning("%s: nothing has this limit any more (docs/timeouts.md)", ", ".join(gone))

    shown: Seconds = Seconds(2.0, "showing what is left after a signal, where standard output takes nothing")
    sink_close: Seconds = Seconds(10.0, "sending what is left to the reader of `--sink` at the end of a run")
    sink_close_signal: Seconds = Seconds(2.0, "the same after a signal")
    tokenizer: Seconds = Seconds(5.0, "processor time of a tokenizer for a prompt, in a process of its own")
    tokenizer_mib: Seconds = Seconds(3.0, "the same, beside it, for each MiB of the prompt")
    last_event: Seconds = Seconds(
        1.0, "sending the error of a request that the end of `hal serve --drain` cuts, before its connection is closed"
    )
    request_head: Seconds = Seconds(
        10.0, "a client's sending the head of a request to `hal serve`, and a connection without one"
    )
    request_body: Seconds = Seconds(60.0, "a client's sending the body of a request to `hal serve`")
    unread_answer: Seconds = Seconds(300.0, "a full connection, of whose answer a client of `hal serve` reads nothing")
    client_look: Seconds = Seconds(1.0, "between two looks of `hal serve` for connections that take longer than these")
    # ranks and their engine
    starting: Seconds = Seconds(
        300.0, "the start of all ranks: each imports its framework, perhaps on a busy machine", "HAL_RANKS_STARTING"
    )
    start_line: Seconds = Seconds(60.0, "ranks' start, between two lines of the log that name the missing ranks")
    step: Seconds = Seconds(
        600.0,
        "a step, from the end of the one before it; 256 prompt tokens (`--chunk`) through 7 B parameters take 360 at "
        "10 GFLOP/s",
        "HAL_RANKS_STEP",
    )
    longest_look: Seconds = Seconds(1.0, "a pause of the engine that counts for `step`; in a longer one it was stopped")
    engine_wait: Seconds = Seconds(0.1, "a wait of the engine for its workers in one turn")
    silence: Seconds = Seconds(
        30.0, "a channel of the engine without a sign of life, after which the other side counts as lost"
    )
    parting: Seconds = Seconds(
        2.0, "the other side's reading what was sent, when an end between engine and rank closes"
    )
    message: Seconds = Seconds(10.0, "a rank's wait for a connection to send a message")
    lost_rank: Seconds = Seconds(1.0, "ranks' naming the one that is lost, after a collective failed")
    raised: Seconds = Seconds(5.0, "the other ranks' raising too, after a runner raised on one rank of a group")
    ranks_end_forced: Seconds = Seconds(1.0, "the end of ranks that cannot end in order")
    rank_failed: Seconds = Seconds(1.0, "the other ranks' naming the reason, after a rank's process failed")
    ranks_end: Seconds = Seconds(10.0, "the end of ranks in order")
    records_end: Seconds = Seconds(5.0, "the acknowledgement of the records of a rank or engine process that ends")
    rank_exit: Seconds = Seconds(60.0, "a rank's exit after a run that went well")
    rank_exit_lost: Seconds = Seconds(5.0, "a rank's exit after a loss: a device may wait for ever")
    last_step: Seconds = Seconds(0.02, "without a new step, before a rank waits for its last one")
    output: Seconds = Seconds(0.001, "between two looks for the output of a running step whose blocks are to be sent")
    transfer: Seconds = Seconds(0.2, "between two calls of a transfer that has blocks under way, at most")
    process_silence: Seconds = Seconds(
        8.0, "an engine process without a beat, after which it counts as stopped: its requests end with an error"
    )
    process_start_end: Seconds = Seconds(6.0, "the end of an engine process that is still loading, after SIGTERM")
    process_idle: Seconds = Seconds(0.5, "without a request, before the engine process looks after its ranks")
    serve: Seconds = Seconds(60.0, "the engine process's wait for what it is to serve")
    offer: Seconds = Seconds(10.0, "a decode worker's answer to an offer, and the arrival of what is sealed")
    hold: Seconds = Seconds(30.0, "finding a decode worker with room for a request that has its first token")
    pause: Seconds = Seconds(0.05, "between two attempts at what needs another process first")
    ray_address: Seconds = Seconds(5.0, "a connection to the address of a Ray cluster")
    ray_last_line: Seconds = Seconds(5.0, "reading the last lines of dead ranks on their Ray nodes")
    runner: Seconds = Seconds(10.0, "the device's work that was on its stream when a runner raised")
    stats: Seconds = Seconds(0.25, "between two messages of an engine process about how busy it is")
    # records and their readers
    deadline: Seconds = Seconds(10.0, "a sink's wait for room (`open_sink`)")
    heartbeat: Seconds = Seconds(0.25, "between two heartbeats of a sink (`open_sink`)")
    leave: Seconds = Seconds(0.5, "the other side's reading what was sent, when a sink, a reader or a transfer closes")
    sink_leave: Seconds = Seconds(1.0, "the end of a sink's thread")
    lost_after: Seconds = Seconds(30.0, "silence of a session, after which it is lost (`OutputReader`)")
    grace: Seconds = Seconds(2.0, "a broken connection of a session, after which it is lost (`OutputReader`)")
    idle_look: Seconds = Seconds(0.25, "between two looks for a peer that is silent or has gone, while nothing comes")
    acknowledge: Seconds = Seconds(0.02, "a reader's wait for more records before it acknowledges")
    retry: Seconds = Seconds(
        1.0, "until a client of `hal serve` tries again, whose request found a full queue (`Retry-After`)"
    )
    queue_look: Seconds = Seconds(0.0002, "between two looks of a System V sink at a full queue, at first")
    queue_look_most: Seconds = Seconds(0.005, "the same, at most")
    queue_idle: Seconds = Seconds(0.1, "between its looks at unread messages, without anything to send")
    torch_poll: Seconds = Seconds(0.0002, "between two queries of torch's event in a wait with a limit")
    # connections
    beat: Seconds = Seconds(1.0, "between two signs of life on a channel of the engine")
    greeting: Seconds = Seconds(10.0, "a new connection's showing its key")
    lock: Seconds = Seconds(1.0, "another process's taking or giving back an address in the same folder")
    reconnect: Seconds = Seconds(0.01, "between two looks for a reader that is not there, at first")
    reconnect_most: Seconds = Seconds(0.2, "the same, at most")
    lock_look: Seconds = Seconds(0.01, "between two looks for that name")


TIMEOUTS = Timeouts()


if __name__ == "__main__":
    Timeouts.print_table()
