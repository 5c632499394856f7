"""The paged decoder against the dense oracle, under any schedule, and its refusals."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, replace

import numpy as np
import paddle
import pytest
from hal_core.errors import InvalidValue
from hal_paddle_runner import llama, weights
from hal_paddle_runner.batch import CacheShape, ModelBatch, plan_step
from hal_paddle_runner.host import HostModel
from hal_paddle_runner.llama import LlamaModel
from hal_paddle_runner.loading import load_model
from hal_paddle_runner.model import Model
from hal_paddle_runner.mtp import open_prediction
from hal_paddle_runner.prediction import PredictionLayer
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import share
from tests.model.reference import Reference

TOLERANCE = 1e-4
VARIANTS = [
    "llama",
    "one key/value head",
    "no grouping, own head width",
    "llama with bias, tied",
    "qwen2",
    "qwen3",
    "scaled positions",
    "with a prediction layer",
]


@dataclass(eq=False)
class Row:
    """One sequence: all its tokens, how many are in the cache, and its blocks."""

    ids: np.ndarray
    done: int = 0
    blocks: list[int] = field(default_factory=list)


def batch_of(rows: list[Row], lengths: list[int], width: int) -> ModelBatch:
    """The next ``lengths`` tokens of each row."""
    tables = np.full((len(rows), width), -1, np.int32)
    for index, row in enumerate(rows):
        tables[index, : len(row.blocks)] = row.blocks
    parts = [slice(row.done, row.done + length) for row, length in zip(rows, lengths, strict=True)]
    return ModelBatch(
        token_ids=np.concatenate([row.ids[part] for row, part in zip(rows, parts, strict=True)]).astype(np.int64),
        positions=np.concatenate([np.arange(part.start, part.stop) for part in parts]),
        row_lengths=np.array(lengths, np.int32),
        context_lengths=np.array([row.done for row in rows], np.int32),
        block_tables=tables,
    )


def poison(model: Model, blocks: list[int]) -> None:
    """Fill these blocks with NaN: a model that reads one and uses it returns NaN."""
    shape = model.cache.shape
    for layer in model.cache.layers:
        array = np.asarray(layer).reshape(2, shape.blocks + 1, -1)
        array[:, blocks] = np.nan
        if isinstance(layer, paddle.Tensor):
            layer.set_value(array.reshape(layer.shape))


@pytest.fixture(scope="session")
def directories(tmp_path_factory, checkpoints):
    """A small checkpoint of each variant."""
    make, variants = checkpoints.make, checkpoints.variants
    return {
        name: make(tmp_path_factory.mktemp("model"), seed=number, **variants[name])
        for number, name in enumerate(VARIANTS)
    }


@pytest.mark.parametrize("lengths", [[1, 1], [3, 1], [40, 17]])
def test_a_mask_has_the_shape_of_the_scores(directories, lengths):
    """Stretching a smaller one takes Paddle forty times as long on a CPU."""
    model = LlamaModel.load(directories["llama"])
    rows = [Row(np.arange(length), blocks=list(range(4 * i, 4 * i + 4))) for i, length in enumerate(lengths)]
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    plan = plan_step(batch_of(rows, lengths, 4), model.config, CacheShape(8, 16))
    for group in plan.groups:
        assert group.mask.shape == (group.rows, kv_heads, heads // kv_heads * group.queries, group.keys)


@pytest.fixture(scope="session", params=[HostModel, LlamaModel])
def models(directories, request):
    """One small model of each variant, by prepared calls and by Paddle's operators."""
    return {name: request.param.load(directory) for name, directory in directories.items()}


@pytest.fixture(scope="session")
def dense(directories):
    """The plain pass over each."""
    return {name: Reference(directory) for name, directory in directories.items()}


@pytest.fixture
def model(models):
    models["llama"].allocate_cache(8, 4)
    return models["llama"]


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 61, count)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_prefill_of_any_length_equals_the_dense_pass(models, dense, name):
    model = models[name]
    model.allocate_cache(8, 4)
    row = Row(tokens(30), blocks=[6, 0, 3, 7, 1, 5, 2, 4])
    expected = dense[name].logits(row.ids)
    assert np.abs(expected).max() > 1, "the random checkpoint says nothing"
    logits = np.concatenate([model.forward(batch_of([row], [length], 8)) for length in range(1, 31)])
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE)


@settings(max_examples=share.of(25))
@given(data=st.data())
def test_any_schedule_over_any_blocks_equals_the_dense_pass(models, dense, data):
    """Sequences come and go, prefill in chunks beside decoding rows, in scattered and reused blocks; every block that
    no running sequence owns is NaN. Of each sequence some of the chunk's last tokens are asked for, or none."""
    name = data.draw(st.sampled_from(VARIANTS), label="variant")
    model = models[name]
    size = data.draw(st.sampled_from([1, 3, 4, 16]), label="block size")
    most = data.draw(st.integers(1, 4), label="rows")
    width = -(-40 // size)
    model.allocate_cache(most * width, size)
    order = np.random.default_rng(data.draw(st.integers(0, 99), label="order of the free blocks"))
    free = order.permutation(most * width).tolist()
    running: list[Row] = []
    for _ in range(data.draw(st.integers(1, 6), label="steps")):
        while len(running) < most and (not running or data.draw(st.booleans(), label="admit")):
            running.append(Row(tokens(data.draw(st.integers(1, 40), label="length"), len(running))))
        lengths = [data.draw(st.integers(1, len(row.ids) - row.done), label="chunk") for row in running]
        for row, length in zip(running, lengths, strict=True):
            while len(row.blocks) * size < row.done + length:
                row.blocks.append(free.pop())
        started = [block for row in running for block in row.blocks[: -(-row.done // size)]]
        poison(model, sorted(set(range(most * width)) - set(started)))
        counts = [data.draw(st.integers(0, min(length, 9)), label="logits asked for") for length in lengths]
        ends = np.cumsum(lengths)
        outputs = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
        batch = dataclasses.replace(batch_of(running, lengths, width), outputs=outputs)
        logits = np.split(model.forward(batch), np.cumsum(counts)[:-1])
        for row, length, count, got in zip(running, lengths, counts, logits, strict=True):
            row.done += length
            expected = dense[name].logits(row.ids[: row.done])[row.done - count :]
            np.testing.assert_allclose(got, expected, atol=TOLERANCE)
        for row in [row for row in running if row.done == len(row.ids) or data.draw(st.booleans(), label="drop")]:
            running.remove(row)
            free.extend(row.blocks)


HASWELL = frozenset({"SSE2", "AVX", "FMA3", "AVX2"})
WIDER = HASWELL | {"AVX512F"}
ARM = frozenset({"NEON", "ASIMD"})


def never(*_: object) -> None:
    raise AssertionError("an operator was run to see whether it can be")


@pytest.mark.parametrize(
    ("place", "features", "kernels", "has"),
    [
        ("cpu", WIDER, ["float cpu"], True),
        ("cpu", HASWELL, ["float cpu"], False),  # there the operator ends the process with SIGILL
        ("cpu", ARM, [], False),
        ("gpu:1", HASWELL, ["float cpu", "float gpu:0"], True),
        ("xpu", WIDER, ["float cpu", "float16 xpu:0"], False),  # Paddle would use the CPU's
    ],
)
def test_the_norms_operator_is_chosen_untried(monkeypatch, place, features, kernels, has):
    written = [f"{{data_type[{kind}]; place[Place({where})]}}" for kind, where in map(str.split, kernels)]
    monkeypatch.setattr(weights, "registered_kernels", lambda operator: written)
    monkeypatch.setattr(paddle._C_ops, weights.norm_operator(), never)
    assert weights.has_fused_norm(place, features) is has


def test_paddle_has_the_norms_operator_on_the_cpu():
    assert weights.has_fused_norm("cpu", WIDER)
    assert not weights.has_fused_norm("cpu", HASWELL)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_cpu_without_avx512_gives_the_same(directories, models, monkeypatch, name):
    """On such a CPU both are the same model: every other test compares its output with the reference's."""
    batch = batch_of([Row(tokens(9), blocks=[0, 1, 2])], [9], 3)
    models[name].allocate_cache(8, 4)
    expected = models[name].forward(batch)
    monkeypatch.setattr(llama, "processor_features", lambda: HASWELL)
    monkeypatch.setattr(llama, "fused_rms_norm", never)
    narrow = LlamaModel.load(directories[name])
    narrow.allocate_cache(8, 4)
    np.testing.assert_allclose(narrow.forward(batch), expected, atol=TOLERANCE)


def test_a_row_does_not_depend_on_its_neighbours(model):
    alone, crowd = (
        Row(tokens(9), blocks=[0, 1, 2]),
        [Row(tokens(9), blocks=[3, 4, 5]), Row(tokens(5, 1), blocks=[6, 7])],
    )
    first = model.forward(batch_of([alone], [9], 3))[0]
    together = model.forward(batch_of(crowd, [9, 5], 3))[0]
    np.testing.assert_allclose(first, together, atol=TOLERANCE)


def test_prediction_layer_sees_only_the_past(dense):
    model = dense["with a prediction layer"]
    ids = tokens(12)
    changed = np.concatenate([ids[:-1], [(ids[-1] + 1) % 61]])
    # Entry i knows tokens 0 to i + 1, so the last token changes the last entry alone.
    difference = np.abs(model.mtp_logits(ids) - model.mtp_logits(changed)).max(axis=1)
    assert difference[:-1].max() == 0
    assert difference[-1] > 0


def test_prediction_layer_equals_dense_pass_for_any_chunking(models, dense):
    """Whole chunks write the layer's cache; runs of single entries continue from it, in the same blocks."""
    model, oracle = models["with a prediction layer"], dense["with a prediction layer"]
    model.allocate_cache(8, 4)
    ids, blocks = tokens(14), [6, 0, 3, 7]
    expected = oracle.mtp_logits(ids)
    layer = open_prediction(model)
    for begin, end in ((0, 3), (3, 8)):
        fed = batch_of([Row(ids, begin, blocks)], [end - begin], 4)
        _, hidden = model.forward_with_hidden(fed)
        rows = replace(fed, token_ids=ids[begin + 1 : end + 1], outputs=np.arange(end - begin))
        given = layer.feed([(layer.kept(hidden), 0, end - begin)], rows)
        np.testing.assert_allclose(layer.logits(given), expected[begin:end], atol=TOLERANCE)
    _, hidden = model.forward_with_hidden(batch_of([Row(ids, 8, blocks)], [5], 4))
    steps = layer.run(np.array([blocks], np.int32), np.array([8]), np.array([5]), 5)
    for number, step in enumerate(steps):
        given = layer.follow(step, ids[9 + number : 10 + number], layer.kept(hidden)[number : number + 1])
        np.testing.assert_allclose(layer.logits(given)[0], expected[8 + number], atol=TOLERANCE)


@pytest.mark.parametrize("name", ["qwen3", "llama with bias, tied", "no grouping, own head width"])
def test_both_prediction_layers_give_the_same_for_rows_of_any_length(checkpoints, tmp_path, name):
    """Rows side by side, of which some give no token: biases, normed queries and keys, any width of a head."""
    directory = checkpoints.make(tmp_path, **(checkpoints.variants[name] | {"num_nextn_predict_layers": 1}))
    models = [form.load(directory) for form in (LlamaModel, HostModel)]
    for model in models:
        model.allocate_cache(12, 4)
    layers, rng = [open_prediction(model) for model in models], np.random.default_rng(3)
    rows = [Row(tokens(16, n), 0, blocks) for n, blocks in enumerate([[6, 0, 3, 7], [1, 5, 9, 2], [4, 8, 10, 11]])]
    for lengths, outputs in (([3, 9, 1], [2, 12]), ([2, 1, 5], [1, 2, 7]), ([1, 1, 1], [])):
        hidden = rng.normal(size=(sum(lengths), model.config.hidden_size)).astype(np.float32)
        batch = replace(batch_of(rows, lengths, 4), outputs=np.array(outputs, np.int64))
        given = [
            np.array(layer.feed([(part, 0, len(hidden))], batch))
            for layer, part in zip(layers, (paddle.to_tensor(hidden), hidden), strict=True)
        ]
        np.testing.assert_allclose(*given, atol=TOLERANCE)
        for row, length in zip(rows, lengths, strict=True):
            row.done += length
    at = np.array([row.done for row in rows])
    runs = [layer.run(batch.block_tables, at, np.array([3, 3, 1]), 3) for layer in layers]
    given = [paddle.to_tensor(hidden), hidden]
    for steps in zip(*runs, strict=True):
        ids = rng.integers(0, 61, 3)
        given = [layer.follow(step, ids, last) for layer, step, last in zip(layers, steps, given, strict=True)]
        np.testing.assert_allclose(given[0].numpy(), given[1], atol=TOLERANCE)
        np.testing.assert_allclose(*[layer.logits(last) for layer, last in zip(layers, given, strict=True)], atol=1e-3)


def test_a_shorter_row_writes_nothing_past_its_end(directories):
    model = LlamaModel.load(directories["with a prediction layer"])
    model.allocate_cache(4, 4)
    layer = PredictionLayer(model)
    cache = layer.cache
    tables = np.array([[0, -1], [1, 2]], np.int32)
    hidden = paddle.to_tensor(np.ones((2, 16), np.float32))
    for step in layer.run(tables, np.array([2, 2]), np.array([2, 4]), 4):
        layer.follow(step, np.array([3, 4]), hidden)
    written = cache.layers[0].numpy().reshape(2, 5, -1, 4, cache.layers[0].shape[-1])[0].any(axis=(1, 3))
    assert written.tolist() == [
        [False, False, True, True],
        [False, False, True, True],
        [True, True, False, False],
        [False] * 4,
        [False] * 4,
    ]


GOOD = Row(tokens(6), blocks=[2, 0])


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"token_ids": np.array([1, 2, 3, 4, 5, 61])}, "token_ids"),
        ({"token_ids": np.array([1, 2, 3, 4, 5, -1])}, "token_ids"),
        ({"token_ids": np.array([1, 2, 3])}, "token_ids"),
        ({"positions": np.arange(1, 7)}, "positions"),
        ({"positions": np.arange(5)}, "positions"),
        ({"row_lengths": np.array([0], np.int32)}, "row_lengths"),
        ({"row_lengths": np.array([], np.int32)}, "row_lengths"),
        ({"context_lengths": np.array([-1], np.int32)}, "context_lengths"),
        ({"context_lengths": np.array([0, 0], np.int32)}, "context_lengths"),
        ({"block_tables": np.array([[2]], np.int32)}, "block_tables"),
        ({"block_tables": np.array([[2, -1]], np.int32)}, "block_tables"),
        ({"block_tables": np.array([[2, 8]], np.int32)}, "block_tables"),
        ({"block_tables": np.array([2, 0], np.int32)}, "block_tables"),
        ({"context_lengths": np.array([60], np.int32), "positions": np.arange(60, 66)}, "positions"),
        ({"outputs": np.array([-1, 5])}, "outputs"),
        ({"outputs": np.array([5, 6])}, "outputs"),
        ({"outputs": np.array([3, 3])}, "outputs"),
    ],
)
def test_a_batch_that_cannot_be_computed_is_refused_and_writes_nothing(model, change, argument):
    good = batch_of([GOOD], [6], 2)
    before = model.forward(good)
    kept = [np.array(layer) for layer in model.cache.layers]
    with pytest.raises(InvalidValue, match=rf"batch\.{argument}"):
        model.forward(dataclasses.replace(good, **change))
    for layer, array in zip(model.cache.layers, kept, strict=True):
        np.testing.assert_array_equal(layer, array)
    np.testing.assert_array_equal(model.forward(good), before)


def test_a_missing_cache_is_named_and_its_sizes_are_checked(tmp_path, checkpoints):
    for form in (HostModel, LlamaModel):
        fresh = form.load(checkpoints.make(tmp_path))
        with pytest.raises(InvalidValue, match="allocate_cache"):
            fresh.forward(batch_of([GOOD], [6], 2))
        for blocks, size in ((0, 4), (4, 0), (-1, 4)):
            with pytest.raises(InvalidValue, match="below 1"):
                fresh.allocate_cache(blocks, size)


def test_an_unknown_place_is_refused(tmp_path, checkpoints):
    with pytest.raises(InvalidValue, match=r"--model-place.*'nowhere'"):
        load_model(checkpoints.make(tmp_path), place="nowhere")


def test_no_gradients_are_recorded(directories):
    model = LlamaModel.load(directories["llama"])
    model.allocate_cache(8, 4)
    model.forward(batch_of([GOOD], [6], 2))
    assert all(tensor.stop_gradient for tensor in model.cache.layers)
    assert paddle.is_grad_enabled(), "the caller's own gradient mode is left alone"
