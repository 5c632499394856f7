"""The byte-level BPE tokenizer of the default checkpoint, trained by ``tokenizers`` on the training half."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, END_OF_TEXT_ID = "<|endoftext|>", 0  # special tokens get the first ids
# Words and numbers keep one leading space; a line break keeps the indentation that follows it, because in Python the
# two mean something only together; other punctuation goes in runs.
SPLIT = r"\n[\n ]*|[ ]?[A-Za-z_]+|[ ]?[0-9]{1,3}|[ ]?[^\sA-Za-z_0-9]+|[ ]+(?! )|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train on ``texts``; any text round-trips, because all 256 bytes are in the alphabet. Id 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer
