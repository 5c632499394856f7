"""The chaos test's reader: an engine that keeps its own cursor.

    python chaos_reader.py URL JOURNAL STOPFILE

It writes down each record, then acknowledges it; after a restart it continues where its journal ends.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from hal_engine.reading import Gap, OutputReader, SessionEnded, SessionLost


def cursors_of(journal):
    """Map each running session to its last recorded sequence."""
    found = {}
    for line in Path(journal).read_text().splitlines() if Path(journal).exists() else ():
        fact = json.loads(line)
        if fact["event"] == "record":
            found[fact["session"]] = fact["sequence"]
        elif fact["event"] in ("ended", "lost"):
            found.pop(fact["session"], None)
    return found


def main(url, journal, stop):
    after = cursors_of(journal)
    out = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(**facts):
        os.write(out, (json.dumps({"reader": os.getpid()} | facts) + "\n").encode())

    def on_event(event):
        if isinstance(event, SessionLost):
            note(event="lost", session=event.session, last=event.last_sequence, requests=event.requests)
        elif isinstance(event, SessionEnded):
            note(event="ended", session=event.session, last=event.last_sequence)
        elif isinstance(event, Gap):
            note(event="gap", session=event.session, first=event.first, last=event.last)

    reader = OutputReader(url, after=after, auto_ack=False, lost_after=4, grace=0.3, on_event=on_event)
    note(event="opened")
    with reader:
        while not (Path(stop).exists() and not reader.cursors):
            frame = reader.read(0.2)
            if frame is None:
                continue
            rows = [
                [row.request_id, row.status.name, row.position, row.tokens.tolist(), int(row.finish)]
                for row in frame.record.rows()
            ]
            header = frame.header
            where = {"session": header.session, "sequence": header.sequence, "step": frame.record.step}
            note(event="record", **where, rows=rows)
            reader.acknowledge(header.session, header.sequence)
    note(event="left", **reader.counters())


if __name__ == "__main__":
    main(*sys.argv[1:])
