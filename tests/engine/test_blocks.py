"""The pool of KV blocks: no block has two owners, none is lost, none is freed twice."""

import pytest
from hal_core.errors import HalError, InvalidValue, OutOfMemory
from hal_engine.engine import BlockPool
from hypothesis import given
from hypothesis import strategies as st


@given(data=st.data(), size=st.integers(1, 20))
def test_blocks_are_held_once_and_come_back(data, size):
    pool, held = BlockPool(size), []
    for _ in range(data.draw(st.integers(0, 25), label="operations")):
        if held and data.draw(st.booleans(), label="release"):
            pool.release(held.pop(data.draw(st.integers(0, len(held) - 1), label="which")))
        else:
            count = data.draw(st.integers(0, size + 1), label="count")
            free = size - sum(map(len, held))
            if count > free:
                with pytest.raises(OutOfMemory, match=f"{free} of {size} free"):
                    pool.allocate(count)
            else:
                taken = pool.allocate(count)
                assert len(taken) == count
                held.append(taken)
        blocks = [block for taken in held for block in taken]
        assert len(set(blocks)) == len(blocks)
        assert set(blocks) <= set(range(size))
        assert pool.free == size - len(blocks)


@pytest.mark.parametrize("wrong", [[0], [3], [1, 1], [-1], [1, 4]])
def test_a_wrong_release_changes_nothing(wrong):
    pool = BlockPool(4)
    taken = pool.allocate(3)  # 0, 1, 2
    pool.release([taken[0]])
    with pytest.raises(HalError, match="free each block once"):
        pool.release(wrong)
    assert pool.free == 2
    pool.release(taken[1:])
    assert pool.free == 4


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_a_pool_has_at_least_one_block(size):
    with pytest.raises(InvalidValue, match="at least 1"):
        BlockPool(size)
