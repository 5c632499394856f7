"""An answer's text as its tokens arrive: piece by piece, up to its first stop text. Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from .stops import StopSearch, search_of

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_WINDOW = 6  # ids that are decoded again before the window is cut


class Decodes(Protocol):
    """The part of a tokenizer that a stream uses; :class:`hal_engine.model.tokenizer.Tokenizer` has it."""

    @property
    def byte_token_ids(self) -> frozenset[int]:
        """Ids of one byte each, in a run that is decoded as a whole (byte fallback)."""

    @property
    def own_texts(self) -> Mapping[int, str] | None:
        """Of each id the text that it adds behind any complete character; "" where that depends on more, None if it
        always does."""

    def visible(self, ids: Sequence[int]) -> list[int]:
        """Return the ids that ``decode`` turns into text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``; bytes that are not UTF-8 give U+FFFD."""


class StreamDecoder:
    """Incremental decoder of one answer: the pieces of all ``push`` calls and of ``finish`` are ``decode(prompt +
    answer)`` without its common beginning with ``decode(prompt)``.

    Returned text is never taken back, so ``held`` is the text that later ids may still change: a character with missing
    bytes, and with byte fallback a whole run of byte tokens, because one broken byte turns all of its run into U+FFFD.
    Only a window of the last ids is decoded again at each call. It begins early enough that the decoder's treatment of
    a text's first token (a space dropped or added) does not affect the answer. Ids that have texts of their own are not
    decoded at all behind a complete character.
    """

    def __init__(self, tokenizer: Decodes, prompt: Sequence[int] = ()) -> None:
        self._tokenizer, self._own = tokenizer, tokenizer.own_texts
        self._window = self._context(tokenizer.visible(prompt))
        self._prompt = tokenizer.decode(self._window)
        self._begun = False  # whether a piece was returned, so that the text shared with the prompt is known
        self._out: int | None = len(self._prompt)  # returned characters of the window's text; None: all that there are
        self.held = ""
        """The result of ``finish`` if it were called now."""

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that these further ids complete, perhaps none."""
        ids = list(ids)
        if self._own is not None and self._begun and not self.held and ids:
            if len(ids) == 1 and (text := self._own[ids[0]]):  # the usual case
                self._window, self._out = ids, None
                return text
            if "" not in (texts := [self._own[token] for token in ids]):
                self._window, self._out = ids[-1:], None
                return "".join(texts)
        if self._out is None:
            self._out = len(self._tokenizer.decode(self._window))
        self._window += self._tokenizer.visible(ids)
        decoded = self._tokenizer.decode(self._window)
        if (run := self._byte_run()) > 0:
            settled = self._tokenizer.decode(self._window[:-run])
        else:
            settled = decoded.removesuffix(_BROKEN)  # the beginning of a character is one U+FFFD
        if not self._begun:
            self._out = _shared(self._prompt, settled)
        piece = settled[self._out :]
        self._begun = self._begun or bool(piece)
        self._out = max(self._out, len(settled))
        self.held = decoded[self._out if self._begun else _shared(self._prompt, decoded) :]
        if piece and len(settled) == len(decoded) and len(self._window) > _WINDOW:
            self._window = self._context(self._window)
            self._out = len(self._tokenizer.decode(self._window))
        return piece

    def finish(self) -> str:
        """Return the held text; call it once, after the last ids."""
        piece, self.held = self.held, ""
        return piece

    def _byte_run(self) -> int:
        """Return how many ids at the window's end are single bytes."""
        run, bytes_ = 0, self._tokenizer.byte_token_ids
        while run < len(self._window) and self._window[-1 - run] in bytes_:
            run += 1
        return run

    def _context(self, ids: list[int]) -> list[int]:
        """Return a short end of ``ids`` after which further ids decode as after all of them. It begins outside a run of
        bytes, and has a valid character, to which the treatment of a first token applies. Ends are tried in doubling
        lengths, because a client may send any number of ids without a valid character."""
        size = 1
        while size < len(ids):
            begin = len(ids) - size
            while begin and ids[begin] in self._tokenizer.byte_token_ids:
                begin -= 1
            if begin and self._tokenizer.decode(ids[begin:]).strip(_BROKEN):
                return ids[begin:]
            size = 2 * (len(ids) - begin)
        return list(ids)


def _shared(one: str, other: str) -> int:
    """Return how many characters both texts have in common at the beginning."""
    if other.startswith(one):
        return len(one)
    pairs = zip(one, other, strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


class AnswerText:
    """The text of one answer, which ends with the first of the ``stops`` in it, independent of the borders of tokens.

    A stop text that is complete before there are ``min_tokens`` tokens is ignored. A push takes no longer for a longer
    answer, or for more or longer stop texts.
    """

    def __init__(self, decoder: StreamDecoder, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._decoder, self._min_tokens = decoder, min_tokens
        self._search = search_of(tuple(stops)) if stops else None
        self._tokens = self._length = 0
        self._ended = False
        self._seen = 0  # characters without a stop text, or with an ignored one
        self._state = 0  # of the search, behind the text
        self._held, self._held_state = "", 0  # the held text that was read, and the state behind it
        self._parts: list[str] = []  # the text
        self._fresh: list[str] = []  # the text that was not taken

    @property
    def text(self) -> str:
        """The known text of the answer."""
        self._parts = ["".join(self._parts)]
        return self._parts[0]

    def push(self, token: int) -> bool:
        """Add the next token; return True when a stop text is complete: then ``text`` ends with it, and is final."""
        piece = self._decoder.push([token])
        if self._search is not None:
            self._tokens += 1
            held = self._decoder.held.rstrip(_BROKEN)
            if (end := self._find(self._search, piece, held)) is not None:
                self._add((piece + held)[:end])
                self._ended = True
                return True
        if piece:
            self._add(piece)
        return False

    @property
    def has_stops(self) -> bool:
        """Whether a stop text may end it. If none may, :meth:`add` serves in place of :meth:`push` and :meth:`take`."""
        return self._search is not None

    def add(self, tokens: Iterable[int]) -> str:
        """Add tokens at once; return the text that can be shown, which ``text`` does not have."""
        return self._decoder.push(tokens)

    def finish(self) -> None:
        """Release the held text after the last token."""
        if not self._ended:
            self._add(self._decoder.finish())
        self._search = None

    def take(self) -> str:
        """Return the text that can be shown and was not taken."""
        fresh, waits = "".join(self._fresh), self._waits
        cut = len(fresh) - waits
        self._fresh = [fresh[cut:]] if waits else []
        return fresh[:cut]

    @property
    def settled(self) -> int:
        """Return how many characters of ``text`` can be shown: a possible beginning of a stop text cannot."""
        return self._length - self._waits

    @property
    def _waits(self) -> int:
        return 0 if self._search is None or self._ended else self._search.begun[self._state]

    def _add(self, piece: str) -> None:
        self._parts.append(piece)
        self._fresh.append(piece)
        self._length += len(piece)

    def _find(self, search: StopSearch, piece: str, held: str) -> int | None:
        """Return the end of the first new stop text in ``piece`` and ``held``, which follow the text: in characters
        behind the text. A stop text that was seen in held text does not count again."""
        heeds = self._tokens >= self._min_tokens
        seen, size = self._seen - self._length, len(piece)
        self._seen = max(self._seen, self._length + size + len(held))
        self._state, end = search.advance(self._state, piece, seen if heeds else size)
        if end is not None:
            return end
        read, state = len(self._held), self._held_state
        if piece or not held.startswith(self._held):
            read, state = 0, self._state
        new = held[read:]
        self._held_state, end = search.advance(state, new, seen - size - read if heeds else len(new))
        self._held = held
        return None if end is None else size + read + end
