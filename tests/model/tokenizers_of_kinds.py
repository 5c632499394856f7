"""Small tokenizers of the kinds that checkpoints have, made with the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
WORDS = ("▁", "a", "b", "l", "▁a", "▁ab", "ll", "▁▁", "!", "é", "中", "文", "\n", "\ufffd", "▁stop", "st", "op")


def _finished(backend: Backend, *, bos: bool = True) -> Backend:
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL if backend.token_to_id(text)])
    if bos:
        start = backend.token_to_id("<s>")
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", start)]
        )
    return backend


def byte_level(*, bos: bool = False, prefix_space: bool = False) -> Backend:
    """GPT-2 and Llama-3 style: every byte is a character of the vocabulary, some pairs are merged."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("s", "t"), ("o", "p"), ("st", "op"), ("Ġ", "a"), ("ð", "Ł"), ("Ã", "©"), ("Ċ", "Ċ")]
    words = [*SPECIAL, *letters, *("".join(pair) for pair in merges)]
    backend = Backend(models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    return _finished(backend, bos=bos)


def llama2() -> Backend:
    """Llama-2 style: the normalizer makes word marks, bytes are the fallback, a text's first space is stripped."""
    vocab = {word: at for at, word in enumerate([*SPECIAL, *BYTES, *WORDS])}
    merges = [("▁", "a"), ("▁a", "b"), ("l", "l"), ("▁", "▁")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finished(backend)


def gemma() -> Backend:
    """Gemma style: word marks and bytes, and no space is added or stripped."""
    vocab = {word: at for at, word in enumerate([*SPECIAL, *BYTES, *WORDS])}
    backend = Backend(models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _finished(backend)


def unigram(scheme: str = "always") -> Backend:
    """T5 and Mistral style: Metaspace, which drops the marks of a text's first token."""
    pieces = [(word, -1.0 - at / 100) for at, word in enumerate([*SPECIAL, *BYTES, *WORDS])]
    backend = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme), decoders.Fuse()]
    )
    return _finished(backend)


def word_piece() -> Backend:
    """BERT style: pieces inside a word are marked, words are joined with spaces."""
    letters = ["s", "t", "o", "p", "a", "l", "!", ".", "'", "中", "é", "🐍", "🏽", "\u0301"]
    words = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters), "stop", "##st", "##op", "n't"]
    model = models.WordPiece({word: at for at, word in enumerate(words)}, unk_token="<unk>")
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"[.!]"), "isolated"), pre_tokenizers.WhitespaceSplit()]
    )
    backend.decoder = decoders.WordPiece(cleanup=True)
    return _finished(backend)


def word_ends() -> Backend:
    """GPT-1 style: the last piece of a word is marked, and loses its space at a text's end."""
    letters = ["s", "t", "o", "p", "a", "é", "中", "🐍", "!"]
    vocab = {word: at for at, word in enumerate([*SPECIAL, *letters, *(f"{letter}</w>" for letter in letters)])}
    backend = Backend(models.BPE(vocab=vocab, merges=[], end_of_word_suffix="</w>", unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    return _finished(backend)


def no_decoder() -> Backend:
    """No decoder at all: tokens are joined with spaces."""
    backend = Backend(models.WordLevel({word: at for at, word in enumerate([*SPECIAL, "a", "b", "st"])}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _finished(backend)


KINDS: dict[str, Callable[[], Backend]] = {
    "byte level": byte_level,
    "byte level, start token, leading space": lambda: byte_level(bos=True, prefix_space=True),
    "llama-2": llama2,
    "gemma": gemma,
    "unigram, metaspace": unigram,
    "unigram, metaspace first": lambda: unigram("first"),
    "unigram, metaspace never": lambda: unigram("never"),
    "word pieces": word_piece,
    "word ends": word_ends,
    "no decoder": no_decoder,
}
