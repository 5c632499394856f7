"""Rows for tests: parameters that are not given have no effect."""

import numpy as np
from hal_engine.sampling import SamplingRows

_INT64, _INT32 = ("seed", "position", "min_tokens"), ("top_k", "eos_num", "stop_seqs_num", "bad_words_num")
_SCALARS = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": 0,
    "position": 0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_tokens": 0,
}


def one(
    *,
    eos_token_ids=(),
    stop_sequences=(),
    bad_words=(),
    prompt=None,
    output=None,
    **scalars,
):
    """One row as a plain dictionary; lists as they are in a request."""
    unknown = set(scalars) - set(_SCALARS)
    assert not unknown, unknown
    lists = {"eos_token_ids": eos_token_ids, "stop_sequences": stop_sequences, "bad_words": bad_words}
    return {**_SCALARS, **scalars, **lists, "prompt": prompt, "output": output}


def pack(rows):
    """The rows as columns, padded with the token 0, which must not be read."""
    count = len(rows)
    columns = {}
    for name in _SCALARS:
        dtype = np.int64 if name in _INT64 else np.int32 if name in _INT32 else np.float32
        columns[name] = np.array([row[name] for row in rows], dtype).reshape(count)
    for name, number in (("eos_token_ids", "eos_num"), ("bad_words", "bad_words_num")):
        columns[name] = np.zeros((count, 4), np.int64)
        columns[number] = np.array([len(row[name]) for row in rows], np.int32).reshape(count)
        for at, row in enumerate(rows):
            columns[name][at, : len(row[name])] = row[name]
    columns["stop_seqs"] = np.zeros((count, 3 * 2), np.int64)
    columns["stop_seqs_len"] = np.ones((count, 3), np.int32)
    columns["stop_seqs_num"] = np.array([len(row["stop_sequences"]) for row in rows], np.int32).reshape(count)
    for at, row in enumerate(rows):
        for place, sequence in enumerate(row["stop_sequences"]):
            columns["stop_seqs_len"][at, place] = len(sequence)
            columns["stop_seqs"][at, 2 * place : 2 * place + len(sequence)] = sequence
    for name in ("prompt", "output"):
        columns[name] = [None if row[name] is None else np.array(row[name], np.int64) for row in rows]
    return SamplingRows(**columns)


def many(count, **scalars):
    return pack([one(**scalars)] * count)
