"""The account of an episode (``episodes.py``): each token is where it may be, and nowhere else."""

from collections import Counter, defaultdict

from episode_roles import facts


class Account:
    """What workers saved, what readers read, and how sessions ended, session by session."""

    def __init__(self, works, reads):
        self.lives, self.saved, self.named, self.closed = {}, defaultdict(list), {}, set()
        for fact in facts(works):
            session = fact["session"]
            self.lives[session] = fact["life"]
            if fact["event"] == "saved":
                self.saved[session].append(rows_of(fact))
            elif fact["event"] == "undelivered":
                self.named[session] = [tuple(record) for record in fact["records"]]
            elif fact["event"] == "closed":
                self.closed.add(session)
            elif fact["event"] == "refused":  # a reported loss, or its thread had no descriptor for a new connection
                assert any(words in fact["why"] for words in ("declared this session lost", "Too many open files")), (
                    fact
                )
        self.read, self.ended, self.lost = defaultdict(list), Counter(), defaultdict(list)
        self.totals = Counter()
        for fact in facts(reads):
            if fact["event"] == "gap":
                assert fact["session"] not in self.lives, fact  # it is a stranger's
            elif fact["event"] == "record":
                self.read[fact["session"]].append(fact)
            elif fact["event"] == "ended":
                self.ended[fact["session"]] += 1
            elif fact["event"] == "lost":
                self.lost[fact["session"]].append(fact)
            elif fact["event"] == "left":
                self.totals["stretches skipped"] += fact["skipped"]

    def check(self, killed_lives):
        """Return the counts. ``killed_lives``: the workers that were killed. Raises AssertionError."""
        assert set(self.read) <= set(self.lives), "a record of no worker"
        for session, life in self.lives.items():
            self.check_session(session, life, was_killed=life in killed_lives and session not in self.closed)
        return self.totals

    def check_session(self, session, life, *, was_killed):
        saved, read, totals = self.saved[session], self.read[session], self.totals
        check_order(life, session, saved, read)
        ends = self.ended[session] + len(self.lost[session])
        assert ends <= 1, f"{life} is over {ends} times"
        for lost in self.lost[session]:
            assert lost["last"] == len(read), f"{life} lost after {lost['last']}, but {len(read)} were read"
            check_requests(life, lost, read)
        missing = saved[len(read) :]
        totals["sessions"] += 1
        totals["sessions lost"] += bool(self.lost[session])
        totals["tokens saved"] += sum(map(tokens_of, saved))
        totals["records read"] += len(read)
        totals["tokens read"] += sum(tokens_of(rows_of(fact)) for fact in read)
        totals["preemptions read"] += sum(row[1] == "PREEMPTED" for fact in read for row in fact["rows"])
        if was_killed:
            assert len(read) <= len(saved) + 1, f"{life}: {len(read) - len(saved)} more read than saved"
            assert not read or ends, f"{life} was killed after {len(read)} records, and nobody was told"
            totals["tokens of killed workers"] += sum(map(tokens_of, missing))
            return
        assert len(read) <= len(saved), f"{life}: more read than saved"
        named = self.named.get(session, [])
        check_named(life, saved, len(read), named)
        totals["tokens named undelivered"] += sum(max(1, count) for _, _, count in named)
        assert ends or missing or not saved, f"{life} closed, and nobody was told"


def rows_of(fact):
    """A record's rows, sorted: request, status, position, tokens. Worker and reader have them in different orders."""
    return sorted((row[0], row[1], row[2], tuple(row[3])) for row in fact["rows"])


def tokens_of(rows):
    return sum(len(tokens) for *_, tokens in rows)


def deliveries(rows):
    """As :meth:`hal_core.OutputRecord.deliveries`."""
    return Counter((name, position, len(tokens)) for name, status, position, tokens in rows if status != "NONE")


def check_order(life, session, saved, read):
    """Once each, in order, and as it was saved."""
    sequences = [fact["sequence"] for fact in read]
    assert sequences == list(range(1, len(read) + 1)), f"{life} {session:016x}: sequences {sequences}"
    steps = [fact["step"] for fact in read]
    assert steps == list(range(len(steps))), f"{life}: a step twice, or left out: {steps}"
    for step, (should, fact) in enumerate(zip(saved, read, strict=False)):
        assert rows_of(fact) == should, f"{life}, step {step}: {rows_of(fact)} instead of {should}"


def check_requests(life, lost, read):
    """The reader reports a lost session with the requests that it has seen and that have not finished."""
    if (requests := lost.get("requests")) is None:
        return
    seen = {row[0] for fact in read if fact["reader"] == lost["reader"] for row in fact["rows"]}
    finished = {row[0] for fact in read for row in fact["rows"] if row[4]}
    assert set(requests) == seen - finished, f"{life}: {sorted({*requests} ^ (seen - finished))}"


def check_named(life, saved, read, named):
    """A closed worker names all unread deliveries; of the read ones only those of its last, unacknowledged records."""
    known = Counter(one for one in named if one[1] >= 0)
    vague = Counter(name for name, position, _ in named if position < 0)  # its record was not made yet when it closed
    missing = sum(map(deliveries, saved[read:]), Counter())
    nowhere = Counter(name for name, *_ in (missing - known).elements()) - vague
    assert not nowhere, f"{life}: {nowhere} neither read nor named; {named} named"
    again = known - missing
    for rows in reversed(saved[:read]):
        if not again:
            break
        assert deliveries(rows) <= again, f"{life}: {again} named although it was read, of {len(saved)} steps"
        again -= deliveries(rows)
    assert not again, f"{life}: {again} named twice, or never saved"
