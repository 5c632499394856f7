"""The account of an episode (``episodes.py``): each token is where it may be, and nowhere else."""

from __future__ import annotations

from collections import Counter

from episode_roles import facts


def account(episode):
    """Return the counts. Raises AssertionError."""
    lives, saved, named, closed = {}, Counter(), {}, set()
    for fact in facts(episode.works):
        session = fact["session"]
        lives[session] = fact["life"]
        saved[session] += fact["event"] == "saved"
        if fact["event"] == "refused":  # a reported loss, or its thread had no descriptor for a new connection
            assert any(words in fact["why"] for words in ("declared this session lost", "Too many open files")), fact
        if fact["event"] == "undelivered":
            named[session] = fact["steps"]
        elif fact["event"] == "closed":
            closed.add(session)
    read, ended, lost = {}, Counter(), {}
    for fact in facts(episode.reads):
        assert fact["event"] != "gap" or fact["session"] not in lives, fact  # else it is a stranger's
        if fact["event"] == "record":
            read.setdefault(fact["session"], []).append(fact)
        elif fact["event"] == "ended":
            ended[fact["session"]] += 1
        elif fact["event"] == "lost":
            lost.setdefault(fact["session"], []).append(fact["last"])
    assert set(read) <= set(lives), "a record of no worker"
    totals = Counter()
    for session, life in lives.items():
        got = read.get(session, [])
        check_order(life, session, got)
        ends = ended[session] + len(lost.get(session, []))
        assert ends <= 1, f"{life} is over {ends} times"
        for last in lost.get(session, []):
            assert last == len(got), f"{life} lost after {last}, but {len(got)} were read"
        totals["sessions"] += 1
        totals["tokens saved"] += saved[session]
        totals["tokens read"] += len(got)
        totals["sessions lost"] += session in lost
        missing = saved[session] - len(got)
        if life in episode.killed_lives and session not in closed:
            assert missing >= -1, f"{life}: {-missing} more read than saved"
            assert not got or ends, f"{life} was killed after {len(got)} records, and nobody was told"
            totals["tokens of killed workers"] += max(0, missing)
            continue
        check_named(life, saved[session], len(got), named.get(session, []))
        totals["tokens named undelivered"] += len(named.get(session, []))
        assert ends or missing or not saved[session], f"{life} closed, and nobody was told"
    return totals


def check_order(life, session, got):
    """Once each, in order, and whole."""
    sequences = [fact["sequence"] for fact in got]
    assert sequences == list(range(1, len(got) + 1)), f"{life} {session:016x}: sequences {sequences}"
    for step, fact in enumerate(got):
        assert (fact["life"], fact["step"], fact["tokens"]) == (life, step, [step]), f"{life}, step {step}: {fact}"


def check_named(life, saved, got, named):
    """A closed worker names all unread records; of the read ones only the last, unacknowledged ones."""
    known = [step for step in named if step >= 0]  # -1: its record was not made yet when the sink closed
    expected = set(range(saved - len(named), saved))
    assert got <= saved, f"{life}: more read than saved"
    assert got >= saved - len(named), f"{life}: {got} of {saved} read, {named} named"
    assert len(known) == len(set(known)), f"{life} names one twice: {named}"
    assert set(known) <= expected, f"{life}: {named} named of {saved}"
