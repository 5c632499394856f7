"""The trained model is the shipped model: the training network, the exporter and the optimizer against plain NumPy."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from hal.model.config import parse_config
from hal.model.loading import expected_tensors
from training.adam import Adam, cosine_rate
from training.checkpoint import config, named_tensors
from training.corpus import held_out_names
from training.dense import DenseModel
from training.evaluate import file_loss, log_softmax, verdict
from training.network import Network, Shape, decay_mask, initial_vector
from training.train import windows

SHAPE = Shape(vocab=37, hidden=16, intermediate=24, layers=2, heads=4, kv_heads=2, context=64)


@pytest.fixture(scope="module")
def vector():
    """Weights far from their beginning, so that norms and branches matter."""
    return initial_vector(SHAPE, 3) + np.random.default_rng(4).normal(0, 0.2, SHAPE.count()).astype(np.float32)


@pytest.fixture(scope="module")
def dense(vector):
    return DenseModel(parse_config(config(SHAPE, 0)), named_tensors(SHAPE, vector))


def test_the_export_has_every_tensor_in_its_shape(vector):
    expected = dict(expected_tensors(parse_config(config(SHAPE, 0))))
    exported = {name: value.shape for name, value in named_tensors(SHAPE, vector).items()}
    assert exported == expected
    assert sum(int(np.prod(shape)) for shape in expected.values()) == SHAPE.count()


def test_training_losses_are_those_of_the_exported_model(vector, dense):
    window = np.random.default_rng(5).integers(0, SHAPE.vocab, (3, 22))
    main, extra = Network(SHAPE).losses(paddle.to_tensor(vector), paddle.to_tensor(window))
    rows = np.arange(20)
    expected = [-log_softmax(dense.logits(row[:20]))[rows, row[1:21]].mean() for row in window]
    assert main.item() == pytest.approx(np.mean(expected), abs=1e-4)
    expected = [-log_softmax(dense.mtp_logits(row[:21]))[rows, row[2:22]].mean() for row in window]
    assert extra.item() == pytest.approx(np.mean(expected), abs=1e-4)


def test_the_gradient_is_the_slope(vector):
    network = Network(SHAPE)
    window = paddle.to_tensor(np.random.default_rng(6).integers(0, SHAPE.vocab, (2, 14)))
    leaf = paddle.to_tensor(vector)
    leaf.stop_gradient = False
    (gradient,) = paddle.grad(sum(network.losses(leaf, window)), [leaf])
    direction = np.random.default_rng(7).normal(0, 1, SHAPE.count()).astype(np.float32)
    direction *= 3e-3 / np.linalg.norm(direction)
    ends = [sum(network.losses(paddle.to_tensor(vector + sign * direction), window)).item() for sign in (1, -1)]
    assert (ends[0] - ends[1]) / 2 == pytest.approx(float(gradient.numpy() @ direction), rel=0.05, abs=2e-6)


def test_adam_is_adam():
    rng = np.random.default_rng(0)
    value, mask = rng.normal(size=5).astype(np.float32), np.array([1, 1, 0, 0, 1], np.float32)
    adam, ours, mean, square = Adam(mask, clip=1.0), paddle.to_tensor(value), np.zeros(5), np.zeros(5)
    for step in range(1, 4):
        gradient = rng.normal(size=5).astype(np.float32) * 10**step
        ours = adam.step(ours, paddle.to_tensor(gradient), 0.01)
        clipped = gradient / max(1.0, float(np.linalg.norm(gradient)))
        mean, square = 0.9 * mean + 0.1 * clipped, 0.98 * square + 0.02 * clipped**2
        change = mean / (1 - 0.9**step) / (np.sqrt(square / (1 - 0.98**step)) + 1e-8)
        value = value - 0.01 * (change + 0.1 * mask * value)
    np.testing.assert_allclose(ours.numpy(), value, rtol=1e-4)
    assert not ours.stop_gradient


def test_decay_spares_the_norms():
    assert decay_mask(SHAPE).sum() == SHAPE.count() - sum(
        len(np.ones(s)) for s in SHAPE.weights().values() if len(s) == 1
    )


def test_the_rate_rises_and_falls():
    rates = [cosine_rate(step, 100, peak=1.0, warmup=10, floor=0.1) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert rates[100] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_windows_cover_an_epoch_once():
    batches = windows(np.arange(1000), 10, 3, np.random.default_rng(0))
    starts = [row[0] for _ in range(32) for row in next(batches)]
    assert len(set(starts)) == 96
    assert all(np.array_equal(row, np.arange(row[0], row[0] + 12)) for row in next(batches))


def test_one_file_in_twenty_is_held_out_whatever_the_order():
    names = [f"package/module_{index}.py" for index in range(400)]
    chosen = held_out_names(names)
    assert len(chosen) == 20
    assert held_out_names(names[::-1]) == chosen


def test_file_loss_scores_every_token_once_in_overlapping_windows():
    class Uniform:
        class config:
            max_position_embeddings = 512

        def logits(self, ids):
            assert len(ids) <= 512
            return np.zeros((len(ids), 10), np.float32)

        def mtp_logits(self, ids):
            return np.zeros((len(ids) - 1, 10), np.float32)

    for length in (0, 1, 300, 511, 512, 513, 2000):
        total, count = file_loss(Uniform(), [1] * length)
        assert count == length + 1
        assert total == pytest.approx(count * np.log(10))
        assert file_loss(Uniform(), [1] * length, mtp=True)[1] == length


@pytest.mark.parametrize(
    ("text", "ended", "expected"),
    [
        ("x = 1\n", True, "ok"),
        ("x = (1\ny = '", False, "open"),
        ("x = (1\n", True, "wrong"),
        ('"""text\nmore\nand', False, "open"),
        ("x = 'open\ny = 1\n", True, "wrong"),
        ("x = 'open", False, "ok"),
        ("if x:\n        y\n    z\n", False, "wrong"),
    ],
)
def test_the_verdict_on_a_sample(text, ended, expected):
    got = verdict(text, ended)
    assert (got if got in ("ok", "open") else "wrong") == expected
