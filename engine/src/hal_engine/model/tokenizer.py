"""Conversion of text to token ids and back. Imports no framework."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from hal_core import InvalidValue
from tokenizers import Tokenizer as _Backend

from hal_engine.model.config import TextConfig
from hal_engine.model.decoder import check_steps, is_by_token, steps_of
from hal_engine.model.encoder import Encoder
from hal_engine.model.files import check_regular, read_file
from hal_engine.model.least import longest_token
from hal_engine.model.own_bytes import OwnBytes, OwnTexts
from hal_engine.model.patterns import is_known
from hal_engine.model.streaming import StreamDecoder

SHORT, HERE = 1 << 13, 1 << 18
"""Characters: of a text that the process for short ones encodes, and of one that this process encodes if its tokenizer
has known patterns alone; a longer one may take seconds, in which nothing could end it here."""
_BATCH = 64  # texts of a native call: their encodings hold far more than ids
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")  # the spelling of a byte in byte fallback


class TooLong(InvalidValue):
    """A prompt with the tokens that it asks for is longer than the engine takes."""


class Tokenizer:
    """``tokenizer.json`` of a checkpoint, checked against its configuration."""

    def __init__(
        self,
        backend: _Backend,
        config: TextConfig,
        *,
        source: str = "tokenizer.json",
        content: bytes | None = None,
    ) -> None:
        """``content``: the file that ``backend`` was read from. Raises ``InvalidValue`` if the tokenizer can produce
        ids without an embedding in the model, and if its decoder is unbounded (:mod:`hal_engine.model.decoder`)."""
        vocab = backend.get_vocab(with_added_tokens=True)
        largest = max(vocab.values(), default=-1)
        if largest >= config.vocab_size:
            raise InvalidValue(
                f"has token id {largest}, but config.json has vocab_size={config.vocab_size}",
                cure="use the tokenizer that belongs to the checkpoint",
                argument=source,
            )
        steps = steps_of(backend)
        check_steps(steps, source)
        # A tokenizer.json may contain its training's truncation and padding; a prompt is neither cut nor padded.
        backend.no_truncation()
        backend.no_padding()
        self._backend, self._source = backend, source
        self._is_known = is_known(backend)
        self._longest = longest_token(backend)
        content = backend.to_str().encode() if content is None else content
        # A text that takes long keeps no short one waiting.
        self._encoders = [Encoder(content, source, trusted=self._is_known) for _ in ("short", "long")]
        special = [token for token, added in backend.get_added_tokens_decoder().items() if added.special]
        self._visible = frozenset(vocab.values()).difference(special)
        by_bytes = any(step["type"] == "ByteFallback" for step in steps.values())
        self.byte_token_ids = frozenset(token for text, token in vocab.items() if by_bytes and _BYTE.fullmatch(text))
        """Ids of one byte each, in a run that the decoder turns into text as a whole."""
        self._steps = [*steps.values()]
        by_token = is_by_token(self._steps)
        self.own_texts: Mapping[int, str] | None = OwnTexts(self._bytes_alone, self.decode) if by_token else None
        """See :class:`hal_engine.model.streaming.Decodes`."""

    @classmethod
    def load(cls, directory: Path, config: TextConfig) -> Tokenizer:
        """Read ``tokenizer.json`` of ``directory``; ``InvalidValue`` names the path when it is missing or malformed."""
        path = Path(directory) / "tokenizer.json"
        check_regular(path)
        try:
            content = read_file(path)
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
        return cls(backend, config, source=str(path), content=content)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included. The model's own vocabulary may be larger (padding)."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. ``InvalidValue`` for text that is not encodable as UTF-8 (lone surrogates), and for a
        tokenizer whose own patterns take too much time or memory.

        ``add_special_tokens``: whether ``text`` is raw, and gets the special tokens that the tokenizer itself puts
        around a text (the default checkpoint's puts none). A rendered chat template has its own.
        """
        return self.encode_all([text], add_special_tokens=add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text, as :meth:`encode` gives them. Any thread may call it; the interpreter's lock is free
        meanwhile."""
        encoders = [self._encoder(text) for text in texts]
        found: dict[Encoder | None, Iterator[list[int]]] = {}
        for encoder in dict.fromkeys(encoders):
            some = [text for text, its in zip(texts, encoders, strict=True) if its is encoder]
            parts = (some[begin : begin + _BATCH] for begin in range(0, len(some), _BATCH))
            found[encoder] = iter([ids for part in parts for ids in self._encode(encoder, part, add_special_tokens)])
        return [next(found[encoder]) for encoder in encoders]

    def _encoder(self, text: str) -> Encoder | None:
        """Return what encodes a text; None: this process."""
        if self._is_known and len(text) <= HERE:
            return None
        return self._encoders[len(text) > SHORT]

    def _encode(self, encoder: Encoder | None, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        if encoder is not None:
            return encoder.encode([_utf8(text) for text in texts], add_special_tokens)
        try:
            found = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            return [list(one.ids) for one in found]
        except TypeError:
            for text in texts:
                _utf8(text)
            raise
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust's; no Exception
                raise
            cure = "shorten the prompt, or use another checkpoint"
            raise InvalidValue(f"fails: {error}", cure=cure, argument=self._source) from None

    def check_length(self, text: str, longest: int) -> None:
        """Raise :class:`TooLong` for a text whose bytes alone are too many for ``longest`` tokens with its answer: so
        none of these is encoded. Where a tokenizer may shorten texts, none is refused."""
        least = -(-len(text.encode(errors="surrogatepass")) // self._longest) if self._longest else 0
        if least >= longest:
            what = f"{len(text)} characters are at least {least} tokens, and {longest} fit with the answer's"
            raise TooLong(what, cure="shorten the prompt", argument="prompt")

    def close(self) -> None:
        """End the processes that encode, and the calls that wait for them; a later call starts them again."""
        for encoder in self._encoders:
            encoder.close()

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; special tokens give none if they are skipped, and bytes that are no UTF-8 give U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes that a token adds to a text; None for a special token, and for an id without a token. Bytes of
        several tokens together may be a character."""
        return self._own_bytes.of(token, self.spelled(token)) if token in self._visible else None

    def _bytes_alone(self, token: int) -> bytes | None:
        return None if token in self.byte_token_ids else self.bytes_of(token)

    def spelled(self, token: int) -> str:
        """The token as the vocabulary spells it; "" for an id without a token."""
        return self._backend.id_to_token(token) or ""

    @cached_property
    def _own_bytes(self) -> OwnBytes:
        return OwnBytes(self.decode, self._steps, self.byte_token_ids, self._visible)

    def visible(self, ids: Sequence[int]) -> list[int]:
        """The ids that ``decode`` makes text of: neither special nor unknown."""
        return [token for token in ids if token in self._visible]

    def stream(self, prompt: Sequence[int] = ()) -> StreamDecoder:
        """A decoder for the tokens that follow ``prompt`` as they arrive."""
        return StreamDecoder(self, prompt)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidValue(f"is no UTF-8 text: {error}", cure="mend the text", argument="prompt") from None
