"""Draws depend only on seed and position, are uniform, and are the same in any batch and with any NumPy."""

import zlib

import numpy as np
import pytest
from hal_engine.sampling import sample
from hal_engine.sampling.philox import philox4x32, uniform
from hal_engine.sampling.weights import unit_bits, weights
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import share

from .builders import many, one, pack
from .oracle import distribution

# Random123 1.14, tests/kat_vectors, philox4x32 10: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(texts):
    return np.array([[int(word, 16) for word in text.split()] for text in texts], np.uint64).T


def test_philox_gives_the_known_answers():
    counters, keys, results = zip(*KNOWN, strict=True)
    assert philox4x32(words(counters), words(keys)).tolist() == words(results).tolist()


def test_u_is_made_of_the_first_53_bits():
    assert uniform(np.array([0]), np.array([0]))[0] == ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53


def test_seed_and_position_are_used_to_their_last_bit():
    numbers = [0, 1, 2**31, 2**32, 2**33 + 1, 2**62, 2**63 - 1]
    seeds, positions = np.array([(s, p) for s in numbers for p in numbers]).T
    assert len(set(uniform(seeds, positions).tolist())) == len(numbers) ** 2


@pytest.mark.parametrize("along", ["position", "seed"])
def test_u_is_uniform_alone_and_in_pairs(along):
    count = 40_000
    run, still = np.arange(count), np.full(count, 12345)
    u = uniform(still, run) if along == "position" else uniform(run, still)
    assert u.min() >= 0.0
    assert u.max() < 1.0
    ones = np.bincount((u * 100).astype(int), minlength=100)
    pairs = np.bincount((u[:-1] * 10).astype(int) * 10 + (u[1:] * 10).astype(int), minlength=100)
    for cells in (ones, pairs):  # 99 degrees of freedom: 149 is passed by 1 in 1,000
        expected = cells.sum() / 100
        assert ((cells - expected) ** 2 / expected).sum() < 149


@pytest.mark.parametrize(
    "shape", [{}, {"temperature": 2.0}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 7, "top_p": 0.9}]
)
def test_tokens_are_drawn_as_often_as_their_probabilities_say(shape):
    logits, count = [0.5, -1.0, 2.0, 0.0, 1.5, -2.0, 1.0, 0.75], 20_000
    row = one(**{"temperature": 1.0, "seed": 99, **shape})
    rows = pack([{**row, "position": at} for at in range(count)])
    drawn = sample(np.tile(np.array(logits, np.float32), (count, 1)), rows, logprobs=None).tokens
    probabilities, _ = distribution(logits, row)
    seen = np.bincount(drawn, minlength=8)
    expected = np.array(probabilities) * count
    assert not seen[expected == 0].any()
    kept = expected > 0
    chi_square = ((seen[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    assert chi_square < 24.3  # 7 degrees of freedom, 1 in 1,000; fewer degrees pass it more seldom


@st.composite
def batches(draw):
    """Rows of every kind side by side, some of them in error."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count, vocab = draw(st.integers(1, 9)), draw(st.sampled_from([3, 64, 200, 700]))
    logits = (random.standard_normal((count, vocab)) * random.choice([0.1, 1, 8], (count, 1))).astype(np.float32)
    rows = []
    for at in range(count):
        rows.append(
            one(
                temperature=float(random.choice([0, 0.5, 1, 3])),
                top_k=int(random.choice([0, 0, 1, 5, 100])),
                top_p=float(random.choice([1, 1, 0.3, 0.99])),
                min_p=float(random.choice([0, 0, 0.1])),
                seed=int(random.integers(2**63)),
                position=int(random.integers(100)),
                min_tokens=50,
                eos_token_ids=[1],
                bad_words=random.integers(0, vocab, 3).tolist(),
                presence_penalty=float(random.choice([0, 0.5])),
                prompt=[0],
                output=random.integers(0, vocab, 20).tolist(),
            )
        )
        if random.random() < 0.15:
            logits[at, random.integers(vocab)] = random.choice([np.nan, np.inf, -np.inf])
    return logits, rows, draw(st.permutations(range(count))), draw(st.integers(1, count))


def parts(sampled, row):
    columns = (sampled.tokens, sampled.token_ids, sampled.logprobs, sampled.ranks, sampled.margins)
    return [column[row].tobytes() for column in columns] + [sampled.errors.get(row)]


@settings(max_examples=share.of(120), deadline=None)
@given(batches())
def test_a_row_is_equal_bit_for_bit_in_any_batch_without_masked_tokens(batch):
    logits, rows, order, size = batch
    batch = sample(logits, pack(rows), logprobs=4)
    order = order[:size]
    part = sample(logits[order], pack([rows[at] for at in order]), logprobs=4)
    for place, at in enumerate(order):
        assert parts(part, place) == parts(batch, at)
    for at, token in enumerate(batch.tokens.tolist()):
        assert (token == -1) == (at in batch.errors)
        assert token not in rows[at]["bad_words"]
        assert token != 1 or rows[at]["position"] >= 50


def test_the_same_bits_with_every_numpy():
    """Pinned results, so that a NumPy or processor with different arithmetic is noticed."""
    numbers = np.arange(64 * 2048, dtype=np.int64)
    logits = ((numbers * 2654435761 % 2**32).reshape(64, 2048) / 2**28).astype(np.float32)
    shapes = [{}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.5}, {"min_p": 0.05}]
    rows = pack([one(temperature=0.5 + at / 64, seed=at, position=at, **shapes[at % 4]) for at in range(64)])
    got = sample(logits, rows, logprobs=3)
    assert zlib.crc32(got.tokens.astype("<i8").tobytes()) == 2497508397
    assert zlib.crc32(got.margins.astype("<f8").tobytes()) == 1534963951


@pytest.mark.parametrize("vocab", [3, 2048, 300_000])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 1e6])
def test_weights_are_exponentials(vocab, temperature):
    logits = np.linspace(-40, 5, vocab, dtype=np.float32)[None]
    bits = unit_bits(vocab)
    got = weights(logits, logits.max(axis=1), np.array([temperature]), bits)
    expected = np.ldexp(np.exp((logits.astype(np.float64) - 5) / temperature), bits)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=0.51)
    assert got.max() == 2**bits
    assert got.max() * vocab < 2**62


def test_masked_tokens_weigh_nothing_even_at_the_highest_temperature():
    logits = np.full((300, 70), -np.inf, np.float32)
    logits[:, 13] = -3e38
    logits[:, 66] = -3e38
    rows = pack([one(temperature=1e6, seed=at) for at in range(300)])
    assert set(sample(logits, rows, logprobs=None).tokens.tolist()) == {13, 66}
    assert sample(logits[:1], many(1), logprobs=None).tokens.tolist() == [13]
