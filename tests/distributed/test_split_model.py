"""A model split over two ranks gives the logits of the whole one; each rank reads its part of the file alone."""

import numpy as np
import pytest
from hal_core.errors import InvalidValue
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.model.config import parse_config, read_config
from hal_engine.model.loading import expected_tensors, read_tensors
from hal_engine.model.split import Shard, check_split, part_of
from hal_paddle_runner.loading import load_model

from tests.distributed.rank_work import logits_of, split_logits
from tests.model.conftest import LLAMA, VARIANTS, tensors, write

from .conftest import PATIENCE

SPLIT = {name: changes for name, changes in VARIANTS.items() if changes.get("num_key_value_heads", 2) > 1}
TOLERANCE = 1e-4


@pytest.mark.parametrize("everywhere", [False, True])
def test_two_ranks_have_the_logits_of_one(worlds, subtests, everywhere, tmp_path):
    """Every sum and every part counts; both ranks have the logits if all are requested, else only the first."""
    folders = []
    for number, changes in enumerate(SPLIT.values()):
        fields = LLAMA | changes
        folders.append(write(tmp_path / str(number), fields, tensors(parse_config(fields))))
    first, second = worlds.of(2).run(split_logits, folders, everywhere, timeout=PATIENCE).values()
    for variant, folder, ours, theirs in zip(SPLIT, folders, first, second, strict=True):
        with subtests.test(variant):
            unsplit = logits_of(load_model(folder))
            for step, (expected, here, there) in enumerate(zip(unsplit, ours, theirs, strict=True)):
                np.testing.assert_allclose(here, expected, atol=TOLERANCE, rtol=0, err_msg=f"step {step}")
                assert np.array_equal(here, there) if everywhere else there is None


def test_the_parts_of_all_ranks_are_the_whole_checkpoint_once(subtests):
    """Split tensors are in one rank's part only; every rank has all remaining tensors."""
    config = read_config(DEFAULT_CHECKPOINT)
    for size in (2, 3):
        for name, shape in expected_tensors(config):
            with subtests.test(name, ranks=size):
                count = np.zeros(shape, np.int64)
                for index in range(size):
                    count[part_of(name, shape, Shard(index, size))] += 1
                assert count.min() == count.max()
                assert count.max() in (1, size)


def test_a_rank_reads_its_part_alone():
    config = read_config(DEFAULT_CHECKPOINT)
    unsplit, part = read_tensors(DEFAULT_CHECKPOINT, config), read_tensors(DEFAULT_CHECKPOINT, config, Shard(1, 2))
    assert 0.45 < sum(a.size for a in part.values()) / sum(a.size for a in unsplit.values()) < 0.6
    for name, values in part.items():
        np.testing.assert_array_equal(values, unsplit[name][part_of(name, unsplit[name].shape, Shard(1, 2))])


@pytest.mark.parametrize(
    ("size", "field"), [(3, "num_attention_heads = 4"), (4, "num_key_value_heads = 2"), (8, "num_attention_heads = 4")]
)
def test_ranks_that_cannot_share_out_a_field_are_refused_by_its_name(size, field):
    with pytest.raises(InvalidValue, match=f"{size} ranks cannot share out {field}") as caught:
        check_split(read_config(DEFAULT_CHECKPOINT), size)
    assert caught.value.argument == "--tp"
    assert "as 2" in caught.value.cure
