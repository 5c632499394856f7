"""The paged cache as blocks of bytes: one model continues from blocks that another has computed."""

import sys

import numpy as np
import pytest
from hal_core import InvalidValue
from hal_core.handover import first_difference
from hal_engine.model.config import parse_config
from hal_paddle_runner import blocks as paged
from hal_paddle_runner.batch import ModelBatch
from hal_paddle_runner.host import HostModel
from hal_paddle_runner.llama import LlamaModel
from hal_paddle_runner.mtp import open_prediction

from tests.model.conftest import LLAMA, VARIANTS, tensors

PROMPT = np.arange(3, 14)
SIZE = 4


def model(form=HostModel, variant="llama", blocks=9, seed=0):
    config = parse_config(LLAMA | VARIANTS[variant])
    made = form(config, tensors(config, seed))
    made.allocate_cache(blocks, SIZE)
    return made


def fed(model, tokens, context, table):
    """Logits of the last of ``tokens``."""
    count = len(tokens)
    batch = ModelBatch(
        np.asarray(tokens, np.int64),
        np.arange(context, context + count),
        np.array([count], np.int32),
        np.array([context], np.int32),
        np.asarray([table], np.int32),
    )
    return model.forward(batch)


@pytest.fixture(params=[HostModel, LlamaModel])
def form(request):
    """The host's memory in place, or Paddle's tensors as for any other place."""
    return request.param


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_goes_on_from_the_blocks_of_another(variant, form):
    p, d = model(form, variant), model(form, variant)
    want = fed(p, PROMPT, 0, [0, 5, 2])
    ours, theirs = paged.PagedBlocks(p), paged.PagedBlocks(d)
    assert type(ours._parts[0]).__name__ == {HostModel: "HostPart", LlamaModel: "PlacedPart"}[form]
    assert first_difference(ours.facts(), theirs.facts()) == ""
    data = ours.read([0, 5, 2])
    assert data.shape == (3, ours.block_bytes)
    assert theirs.write([7, 1, 3], data).done()
    assert np.array_equal(theirs.read([7, 1, 3]), data)
    want = fed(p, [9], len(PROMPT), [0, 5, 2])
    np.testing.assert_array_equal(fed(d, [9], len(PROMPT), [7, 1, 3]), want)
    assert not theirs.read([0, 2, 4, 5, 6, 8]).any(), "blocks that were not written"


def test_what_was_read_is_the_callers(form):
    p = model(form)
    blocks = paged.PagedBlocks(p)
    fed(p, PROMPT, 0, [0, 5, 2])
    read = blocks.read([0, 5, 2])
    kept = read.copy()
    fed(p, PROMPT[::-1], 0, [0, 5, 2])
    assert np.array_equal(read, kept)
    data = bytearray(kept.tobytes() + b"1")  # as in a message: not aligned, and reused afterwards
    blocks.write([1], np.frombuffer(data, np.uint8)[1:].reshape(3, -1)[:1])
    data[:] = bytes(len(data))
    assert np.array_equal(blocks.read([1])[0], np.concatenate([kept[0][1:], kept[1][:1]]))


def test_a_prediction_layer_is_a_layer_more(form):
    variant = "with a prediction layer"
    p, d = model(form, variant), model(form, variant)
    layers = [open_prediction(one) for one in (p, d)]
    parts = [paged.PagedBlocks(one, layer) for one, layer in zip((p, d), layers, strict=True)]
    rng = np.random.default_rng(3)
    data = rng.normal(size=(2, parts[0].block_bytes // 4)).astype(np.float32).view(np.uint8)
    parts[0].write([4, 6], data)
    assert np.asarray(layers[0].cache.layers[0]).any()
    moved = parts[0].read([4, 6])
    assert np.array_equal(moved, data)
    parts[1].write([1, 2], moved)
    assert np.array_equal(parts[1].read([1, 2]), data)
    assert parts[0].facts()["layers"] == str(LLAMA["num_hidden_layers"] + 1)
    assert "layers" in first_difference(parts[0].facts(), paged.PagedBlocks(p).facts())
    other = model(LlamaModel if form is HostModel else HostModel, variant)
    other = paged.PagedBlocks(other, open_prediction(other))
    assert not first_difference(parts[0].facts(), other.facts())


def test_the_fingerprint_says_what_the_blocks_are():
    facts = paged.PagedBlocks(model()).facts()
    assert facts["byte order"] == sys.byteorder
    assert (facts["block size"], facts["layers"]) == ("4", "2")
    assert (facts["kv heads"], facts["head dim"], facts["dtype"]) == ("2", "4", "float32")


def test_a_model_without_a_cache_is_refused():
    config = parse_config(LLAMA)
    with pytest.raises(InvalidValue, match="allocate_cache"):
        paged.PagedBlocks(HostModel(config, tensors(config)))
