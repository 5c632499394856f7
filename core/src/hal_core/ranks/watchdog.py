"""The watchdog of one group: ends a collective that waits for a lost or hung rank (G16).

The collective itself runs in the caller's thread, as handing it to another thread costs 40 us a call. The watchdog's
thread sleeps on the connections with the other members (:mod:`hal_core.ranks.peers`), and wakes

- when a connection ends without a goodbye: that process is gone;
- when a member reports that it has given the group up;
- when a call has lasted half of the timeout: it asks which members are alive. At the full timeout it gives up and names
  the ranks that did not answer or that have not come to the call. If calls overlap, as they do on devices, the oldest
  counts;
- when a call has ended here and some rank has not come to it within the timeout. A library may have buffered the data
  (NCCL between hosts does), so that a source would continue although a rank takes no data.

Giving up is final: the other members are notified, ``abort`` ends the waiting call, and every later call raises.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from time import monotonic

from ..errors import GroupLost
from ..timeouts import TIMEOUTS
from .peers import MESSAGE, Kind


class Watchdog:
    """Watchdog of one group on rank ``me``; ``peers`` are its connections, ``abort`` ends a waiting collective.

    ``timeout`` (seconds) bounds every call from its :meth:`begin`. ``calls`` counts them and is equal on all ranks.
    """

    def __init__(self, me: int, peers: Mapping[int, socket.socket], timeout: float, abort: Callable[[], None]) -> None:
        self.me, self.timeout, self.calls = me, timeout, 0
        self.reason = ""
        self.rank_at_fault = -1  # the rank that caused the group to be given up
        self._abort, self._peers = abort, dict(peers)
        self._since = 0.0  # when the oldest running call began; 0: no call is running
        self._ended = 0  # the last call that ended
        # Begin and number of the oldest call that some rank may not have reached, and when it was last probed for.
        self._unreached, self._unreached_call, self._unreached_probed = 0.0, 0, 0.0
        self._late = max(TIMEOUTS.loss_reason, timeout / 8)  # seconds in which the last answers may come
        self._reached = dict.fromkeys(peers, 0)  # the last call that each rank is known to have reached
        self._left: dict[int, int] = {}
        self._partial = dict.fromkeys(peers, b"")
        self._answers: dict[int, int] = {}
        self._probed = 0.0  # the ``_since`` of the call for which the other members were probed
        self._failed = ""
        self._give_up_at = 0.0
        self._closing = False
        self._over = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, -1)
        for rank, link in self._peers.items():
            self._selector.register(link, selectors.EVENT_READ, rank)
        self._thread = threading.Thread(target=self._run, name=f"hal-watchdog-{me}", daemon=True)
        self._thread.start()

    # -- the caller's thread ------------------------------------------------------------------------------------

    def begin(self) -> int:
        """Begin a collective and return its number. Raise :class:`GroupLost` if it could no longer succeed."""
        self.calls += 1
        if not self._since:
            self._since = monotonic()
        if self.reason or self._failed or self._left:
            early = [rank for rank, calls in self._left.items() if calls < self.calls]
            if self.reason or self._failed or early:
                self.calls -= 1  # this call never begins; earlier running calls may still end
                if self._ended == self.calls:
                    self._since = 0.0
                # A failed collective is reason enough, whether or not the thread has found the cause yet.
                failed = self._failed and f"a collective failed: {self._failed}"
                raise self.error(self.reason or failed or f"rank {early[0]} has closed the group")
        if not self._unreached:
            self._unreached_call, self._unreached = self.calls, monotonic()
        return self.calls

    def end(self, number: int = -1) -> None:
        """End a collective: the one with this number, and all before it; by default the last."""
        number = self.calls if number < 0 else number
        if number > self._ended:
            self._ended = number
            self._since = 0.0 if number == self.calls else monotonic()  # the next had to wait for this one

    def failed(self, error: BaseException) -> GroupLost:
        """Give the group up because a collective raised, and return the error with the reason."""
        self._failed = self._failed or (str(error).strip().splitlines() or [type(error).__name__])[-1]
        self._wake_thread()
        self._over.wait(TIMEOUTS.loss_reason + TIMEOUTS.group_end)
        self._since = 0.0
        return self.error(self.reason or f"a collective failed: {self._failed}")

    def error(self, reason: str) -> GroupLost:
        """Return the error of every call on a lost group."""
        error = GroupLost(
            f"the group of rank {self.me} is lost: {reason}",
            cure="its ranks no longer agree: end all of them and start them again",
            argument="group",
        )
        error.rank = self.rank_at_fault
        return error

    def close(self) -> None:
        """Send a goodbye, end the thread, close the connections. Idempotent."""
        self._closing = True
        self._wake_thread()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for link in (*self._peers.values(), self._wake, self._woken):
            link.close()
        self._selector.close()
        self.reason = self.reason or "it was closed here"

    def _wake_thread(self) -> None:
        with contextlib.suppress(OSError):  # The thread has ended and its sockets are closed.
            self._wake.send(b"!")

    # -- the watchdog's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # A group without a watchdog must not continue.
            self._give_up(f"its watchdog failed: {error!r}", -1)
            raise

    def _watch(self) -> None:
        while not self._over.is_set():
            ready = self._selector.select(self._seconds_to_deadline())
            for key, _ in ready:
                if key.data == -1:
                    self._woken.recv(4096)
                else:
                    self._read_messages(key.data)
            if self._closing:
                self._notify(Kind.LEFT, self.me, self.calls)
                return
            if not self._over.is_set():
                self._check_deadlines(monotonic())

    def _seconds_to_deadline(self) -> float:
        """Return the seconds until the next deadline. A call that begins meanwhile is seen before half of its time has
        passed."""
        now = monotonic()
        if self._give_up_at:
            return max(0.0, self._give_up_at - now)
        half, ends = self.timeout / 2, [now + self.timeout / 2]
        if since := self._since:
            ends.append(since + (2 * half if self._probed == since else half))
        if unreached := self._unreached:
            probed = self._unreached_probed
            last = probed + self._late if probed >= unreached + 2 * half else unreached + 2 * half
            ends.append(last if probed >= unreached + half else unreached + half)
        return max(0.0, min(ends) - now)

    def _check_deadlines(self, now: float) -> None:
        if self._failed:
            self._give_up_at = self._give_up_at or now + TIMEOUTS.loss_reason
            if now >= self._give_up_at:
                self._give_up(f"a collective failed: {self._failed}", -1)
            return
        since, calls = self._since, self.calls
        if since and self._probed != since:
            if now >= since + self.timeout / 2:
                self._probed = since
                self._probe(calls)
        elif since and now >= since + self.timeout:
            self._give_up(*self._at_fault(calls, self._peers))
        if self._unreached and not self._over.is_set():
            self._check_arrivals(now)

    def _check_arrivals(self, now: float) -> None:
        """Probe the oldest call that some rank may not have reached: at half of its time, and once more at its end."""
        began, call = self._unreached, self._unreached_call
        if all(reached >= call for reached in self._reached.values()):
            self._unreached = 0.0
        elif (probed := self._unreached_probed) >= began + self.timeout:
            if now >= probed + self._late:
                missing = [rank for rank, reached in self._reached.items() if reached < call]
                self._give_up(*self._at_fault(call, missing))
        elif now >= began + self.timeout or now >= began + self.timeout / 2 > probed:
            self._unreached_probed = now
            self._probe(self.calls)

    def _probe(self, calls: int) -> None:
        """Ask all members for their progress."""
        self._answers = {}
        self._notify(Kind.PROBE, self.me, calls)

    def _at_fault(self, calls: int, missing: Collection[int]) -> tuple[str, int]:
        """After a deadline, return a reason and the rank at fault among the ``missing``."""
        silent = sorted(rank for rank in missing if rank not in self._answers)
        if silent:
            reason = f"no answer from rank(s) {silent} within {self.timeout:g} s (stopped, or the host is lost)"
            return reason, silent[0]
        behind = sorted(rank for rank, count in self._answers.items() if count < calls)
        if behind:
            return f"rank(s) {behind} did not come to the collective within {self.timeout:g} s", behind[0]
        return f"the collective did not end within {self.timeout:g} s, though every rank is in it", -1

    def _read_messages(self, rank: int) -> None:
        """Read one member's messages; a connection that ends without a goodbye means that its process has ended."""
        link = self._peers[rank]
        try:
            data = link.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(link)
            if rank not in self._left:
                self._give_up(f"the process of rank {rank} has ended", rank)
            return
        data = self._partial[rank] + data
        complete = len(data) // MESSAGE.size * MESSAGE.size
        self._partial[rank] = data[complete:]
        for kind, about, calls in MESSAGE.iter_unpack(data[:complete]):
            self._handle(rank, kind, about, calls)

    def _handle(self, rank: int, kind: int, about: int, calls: int) -> None:
        """Act on one message."""
        if kind != Kind.LOST:
            self._reached[rank] = max(self._reached[rank], calls)
        if kind == Kind.PROBE:
            self._notify(Kind.ANSWER, self.me, self.calls, to=rank)
        elif kind == Kind.ANSWER:
            self._answers[rank] = calls
        elif kind == Kind.LEFT:
            self._left[rank] = calls
            if self._since and calls < self.calls:
                self._give_up(f"rank {rank} has closed the group", rank)
        elif kind == Kind.LOST:
            of = f" because of rank {about}" if about not in (-1, self.me) else ""
            self._give_up(f"rank {rank} gave it up{of}", about)

    def _notify(self, kind: Kind, about: int, calls: int, *, to: int | None = None) -> None:
        message = MESSAGE.pack(kind, about, calls)
        for rank, link in self._peers.items():
            if to in (None, rank):
                with contextlib.suppress(OSError):  # That rank is gone, or so far behind that it counts as lost.
                    link.send(message)

    def _give_up(self, reason: str, about: int) -> None:
        """Give the group up for good. The connections stay open until :meth:`close`, so that the message arrives."""
        if self._over.is_set():
            return
        self.rank_at_fault, self.reason = about, reason
        try:
            self._notify(Kind.LOST, about, self.calls)
            self._abort()
        finally:
            self._over.set()
