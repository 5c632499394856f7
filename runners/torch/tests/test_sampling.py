"""Sampling on the device against ``hal_engine.sampling``, on drawn rows: the same tokens, errors and
log-probabilities."""

import numpy as np
import pytest
from hal_engine.sampling import STATE_FIELDS, SamplingRows, sample
from hal_engine.sampling.philox import uniform

torch = pytest.importorskip("torch")
from hal_torch.sampling import GREEDY, TROUBLES, TRUNCATED, Want, choose, log_probabilities  # noqa: E402
from hal_torch.sampling import uniform as device_uniform  # noqa: E402

ROWS, LENGTH, ALTERNATIVES = 300, 24, 4


def drawn_rows(rng, vocab):
    """Fields of a state with every control drawn, and raw logits, equal ones among them."""
    n = ROWS
    logits = (rng.integers(-40, 40, (n, vocab)) / 8).astype(np.float32)
    logits[rng.random((n, vocab)) < 0.05] = -np.inf

    def one_of(values, dtype):
        return rng.choice(values, (n, 1)).astype(dtype)

    prompt = rng.integers(1, LENGTH // 2, (n, 1))
    fields = {
        "temperature": one_of([0, 0.3, 1, 2], np.float32),
        "top_k": one_of([0, 0, 1, 2, 5, 10**6], np.int32),
        "top_p": one_of([0.05, 0.5, 0.9, 1, 1], np.float32),
        "min_p": one_of([0, 0, 0.1, 0.9], np.float32),
        "seed": rng.integers(-(2**63), 2**63 - 1, (n, 1)),
        "step_idx": rng.integers(0, LENGTH // 2, (n, 1)),
        "repetition_penalty": one_of([1, 1, 0.7, 1.5], np.float32),
        "frequency_penalty": one_of([0, 0, -0.6, 0.3], np.float32),
        "presence_penalty": one_of([0, 0, -0.5, 0.4], np.float32),
        "min_dec_len": one_of([0, 0, 6, LENGTH], np.int64),
        "eos_token_ids": rng.integers(-1, vocab + 2, (n, 2)),
        "eos_num": rng.integers(0, 3, (n, 1)).astype(np.int32),
        "stop_seqs": rng.integers(0, vocab, (n, 6)),
        "stop_seqs_len": rng.integers(1, 4, (n, 2)).astype(np.int32),
        "stop_seqs_num": rng.integers(0, 3, (n, 1)).astype(np.int32),
        "bad_words": rng.integers(0, vocab + 2, (n, 3)),
        "bad_words_num": rng.integers(0, 4, (n, 1)).astype(np.int32),
        "prompt_lens": prompt,
        "token_ids": rng.integers(0, vocab + 1, (n, LENGTH)),
        "logprobs_num": one_of([-1, 0, 2, ALTERNATIVES], np.int32),
    }
    return logits, fields


def on_host(logits, fields, logprobs):
    history = [
        (row[:p], row[p : p + s])
        for row, (p,), (s,) in zip(fields["token_ids"], fields["prompt_lens"], fields["step_idx"], strict=True)
    ]
    columns = {name: fields[name] for name in STATE_FIELDS.values()}
    rows = SamplingRows.from_state(columns, prompt=[one for one, _ in history], output=[one for _, one in history])
    return sample(logits, rows, logprobs=logprobs)


def on_device(fields):
    wide = ("eos_token_ids", "stop_seqs", "stop_seqs_len", "bad_words", "token_ids")
    return {n: torch.from_numpy(v if n in wide else v[:, 0]) for n, v in fields.items()}


@pytest.mark.parametrize("vocab", [3, 64, 700])
def test_tokens_and_errors_are_the_hosts(vocab):
    rng = np.random.default_rng(vocab)
    logits, fields = drawn_rows(rng, vocab)
    for row, value in ((0, np.nan), (1, np.inf), (2, -np.inf)):
        logits[row, 1 if row < 2 else slice(None)] = value
    expected = on_host(logits, fields, None)
    given = choose(torch.from_numpy(logits), Want(TRUNCATED, True), on_device(fields))
    assert np.where(given.codes.numpy() == 0, given.tokens.numpy(), -1).tolist() == expected.tokens.tolist()
    codes = {row: int(code) for row, code in enumerate(given.codes) if code}
    assert codes.keys() == expected.errors.keys()
    for row, code in codes.items():
        message, ours = expected.errors[row], TROUBLES[code]
        assert ("NaN" in message, "all its" in message, message) == ("NaN" in ours, "all its" in ours, message)
        assert ("masked" in message) == ("masked" in ours)


def test_a_want_that_needs_less_gives_the_same():
    logits, fields = drawn_rows(np.random.default_rng(5), 50)
    plain = {"repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0, "min_dec_len": 0}
    fields = {
        n: np.full_like(v, plain.get(n, 0)) if n in plain or n == "bad_words_num" else v for n, v in fields.items()
    }
    logits, placed = torch.from_numpy(np.maximum(logits, -9)), on_device(fields)
    full = choose(logits, Want(TRUNCATED, True), placed)
    assert torch.equal(choose(logits, Want(TRUNCATED, False), placed).tokens, full.tokens)
    placed["temperature"] = torch.zeros_like(placed["temperature"])
    assert torch.equal(choose(logits, Want(GREEDY), placed).tokens, logits.argmax(1))


def test_uniform_numbers_are_the_hosts():
    rng = np.random.default_rng(1)
    seed, position = rng.integers(-(2**63), 2**63 - 1, 500), rng.integers(0, 2**40, 500)
    given = device_uniform(torch.from_numpy(seed), torch.from_numpy(position))
    assert given.tolist() == uniform(seed, position).tolist()


@pytest.mark.parametrize("vocab", [3, 700])
def test_log_probabilities_are_the_hosts(vocab):
    logits, fields = drawn_rows(np.random.default_rng(vocab), vocab)
    logits = np.maximum(logits, -9)
    expected = on_host(logits, fields, ALTERNATIVES)
    wanted = fields["logprobs_num"]
    tokens = torch.from_numpy(expected.tokens.copy())
    ids, values, ranks = log_probabilities(
        torch.from_numpy(logits), tokens, torch.from_numpy(wanted[:, 0]), ALTERNATIVES
    )
    used = (np.arange(ALTERNATIVES + 1) <= wanted) & (expected.token_ids >= 0) & (expected.tokens >= 0)[:, None]
    first = (np.arange(ALTERNATIVES + 1) == 0) | used
    assert ids.tolist() == np.where(first, expected.token_ids, -1).tolist()
    np.testing.assert_array_max_ulp(values.numpy()[used], expected.logprobs[used], 1)
    assert np.isneginf(values.numpy()[~used]).all()
    assert ranks.tolist() == expected.ranks.tolist()
