"""Text to token ids and back, also piece by piece while tokens arrive. Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from hal_core.errors import InvalidValue
from tokenizers import Tokenizer as _Backend

from hal.model.config import LlamaConfig

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """``tokenizer.json`` of a checkpoint, checked against its configuration."""

    def __init__(self, backend: _Backend, config: LlamaConfig, *, source: str = "tokenizer.json") -> None:
        """Raises ``InvalidValue`` when the tokenizer can give ids that the model has no embedding for."""
        largest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        if largest >= config.vocab_size:
            raise InvalidValue(
                f"has token id {largest}, but config.json says vocab_size={config.vocab_size}",
                cure="use the tokenizer that belongs to the checkpoint",
                argument=source,
            )
        # A tokenizer.json may carry its training's truncation and padding; a prompt is neither cut nor padded.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.eos_token_ids = frozenset(config.eos_token_ids)
        """Ids that end a text."""
        self.bos_token_id = config.bos_token_id

    @classmethod
    def load(cls, directory: Path, config: LlamaConfig) -> Tokenizer:
        """Read ``tokenizer.json`` of ``directory``; ``InvalidValue`` names the path when it is missing or malformed."""
        path = Path(directory) / "tokenizer.json"
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise InvalidValue("no such file", cure="a checkpoint directory needs it", argument=str(path)) from None
        except OSError as error:
            raise InvalidValue(f"cannot be read: {error}", cure="restore the file", argument=str(path)) from None
        try:
            backend = _Backend.from_buffer(content)
        except Exception as error:  # noqa: BLE001 - the library raises plain Exception (and ValueError) for bad content
            raise InvalidValue(
                f"is no tokenizer: {str(error)[:200]}", cure="restore the file", argument=str(path)
            ) from None
        return cls(backend, config, source=str(path))

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included. The model's own vocabulary may be larger (padding)."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, with the special tokens that the tokenizer itself puts around a text (the default
        checkpoint's puts none). ``InvalidValue`` for text that is not encodable as UTF-8 (lone surrogates)."""
        try:
            return list(self._backend.encode(text).ids)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidValue(f"is no UTF-8 text: {error}", cure="mend the text", argument="prompt") from None

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; special tokens give none, and bytes that are no UTF-8 give U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))

    def stream(self) -> StreamDecoder:
        """A decoder for one request's tokens as they arrive."""
        return StreamDecoder(self)


class StreamDecoder:
    """Decodes one sequence incrementally: the pieces of all ``push`` calls and of ``finish`` are ``decode`` of all ids.

    A character whose bytes are split over tokens comes out whole, with the token that completes it. Only a window of
    the last ids is decoded again at each call. The window begins with ids that were already emitted, because some
    decoders treat the first token of a text differently (a leading space).

    Exact for byte-level tokenizers, whatever the ids, and for those with word-boundary marks. With byte fallback it is
    exact where the bytes end up as UTF-8: that decoder turns a whole run of byte tokens into U+FFFD when the end of the
    run is broken, characters that are already out included.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._settled = 0  # ids at the window's start whose text is out
        self._emitted = 0  # characters of the window's text that are out

    def push(self, ids: Iterable[int]) -> str:
        """The text that these further ids complete, perhaps none."""
        self._window.extend(ids)
        text = self._tokenizer.decode(self._window)
        # A run of U+FFFD at the end may be the beginning of a character.
        complete = text.rstrip(_INCOMPLETE)
        piece = complete[self._emitted :]
        self._emitted = max(self._emitted, len(complete))
        if piece and len(complete) == len(text):
            del self._window[: self._settled]
            self._settled = len(self._window)
            self._emitted = len(self._tokenizer.decode(self._window))
        return piece

    def finish(self) -> str:
        """What was held back; call it once, when no more ids come."""
        text = self._tokenizer.decode(self._window)
        piece = text[self._emitted :]
        self._window, self._settled, self._emitted = [], 0, 0
        return piece
