"""The shared base of Paddle-backed devices on Paddle's CPU place: plans of any kind against plain bytes."""

import numpy as np
import paddle
import pytest
from hal_core.contract.capabilities import Capabilities
from hal_core.errors import DeviceClosed, InvalidValue, OutOfMemory, Unavailable
from hal_core.memory import elements as elements_of_plans
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.elements import FEW, elements, in_pieces
from hal_core.memory.plan import SCATTER_MAP, WRITE, PlanBuilder, Records, WritePlan, apply_to_host, runs_of
from hal_core.memory.views import ByteRange, View
from hal_paddle import scatter_probe
from hal_paddle.device_copy import gather
from hal_paddle.paddle_memory import PaddleMemory
from hal_paddle.sync_place import PaddleDevice
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import share

NBYTES = 256
SYNCHRONOUS = Capabilities(
    async_h2d=False,
    async_d2h=False,
    fused_scatter=False,
    pinned_host=False,
    can_hold_stream=False,
    collective="",
    fallbacks={"async_set_value": "it is a test"},
)


@settings(max_examples=share.of(60), deadline=None)
@given(st.data())
def test_the_values_of_many_writes_are_those_of_each_of_them(data):
    """Gathered by NumPy, in the three ways there are, or one by one."""
    count = data.draw(st.sampled_from([FEW - 1, FEW + 1, 3 * FEW]))
    kinds = data.draw(st.sampled_from([(0,), (1, 2, 4, 8), (0, 4)]))
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=count, max_size=count))
    writes = np.zeros(count, WRITE)
    writes["nbytes"] = 8 * np.array(sizes if data.draw(st.booleans()) else sizes[:1] * count)
    writes["pattern_bytes"] = np.array(kinds)[np.arange(count) % len(kinds)]
    ends = writes["nbytes"].cumsum()
    writes["source"] = ends - writes["nbytes"] + data.draw(st.sampled_from([0, 8]))
    if data.draw(st.booleans()):
        writes["source"] = writes["source"][::-1]
    payload = np.random.default_rng(count).integers(0, 256, int(ends[-1]) + 64, np.uint8)
    together = b"".join(bytes(part) for part in elements_of_plans._values(writes, payload))
    assert together == b"".join(bytes(part) for _, part in runs_of(writes, payload))


WAYS = {
    "every width": scatter_probe.COMMON,
    "words and halves": {8: (("scatter_", "int64"),), 4: (("scatter_", "float32"),)},
    "words only": {8: (("scatter_", "int64"),)},
    "the wide ones by index_put": {8: (("scatter_", "int64"),), 4: (("index_put_", "int32"),)},
}


def opened(candidates=scatter_probe.COMMON, **options):
    class Tested(PaddleDevice):
        name = "tested"

    Tested.candidates = candidates
    return Tested(0, paddle.CPUPlace(), options, SYNCHRONOUS)


@pytest.fixture(scope="module", params=WAYS)
def device(request):
    with_small_ring = {"ring_start": 1 << 10, "ring_limit": 1 << 12}
    made = opened(WAYS[request.param], **with_small_ring)
    yield made
    made.close()


@st.composite
def plans(draw, memory):
    builder = PlanBuilder(memory)
    if draw(st.booleans(), "no writes"):
        return with_records(builder, draw_records(draw))
    for _ in range(draw(st.integers(1, 6), "writes")):
        offset = draw(st.integers(128, NBYTES - 40), "offset")
        data = np.frombuffer(draw(st.binary(min_size=1, max_size=40), "bytes"), np.uint8)
        if draw(st.booleans(), "a fill"):
            element = np.frombuffer(data[:1].tobytes() * 8, draw(st.sampled_from(["u1", "u2", "u4", "u8"]), "of"))[0]
            builder.fill(np.array([offset]), draw(st.integers(1, 5), "elements") * element.itemsize, element)
        else:
            builder.copy(np.array([offset]), len(data), data)
    return with_records(builder, draw_records(draw)) if draw(st.booleans(), "with records") else builder.build()


def with_records(builder, records):
    plan = builder.build()
    return WritePlan(plan.memory, plan.writes, plan.pieces, records)


def draw_records(draw):
    widths = draw(st.lists(st.sampled_from([1, 2, 4, 8, 12]), min_size=1, max_size=3), "widths")
    slots = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True), "slots")
    base, source, scatter_map = 0, 0, []
    for width in widths:
        scatter_map.append((base, width, source, width))
        base, source = base + -(-3 * width // 8) * 8, source + width
    data = draw(st.binary(min_size=len(slots) * source, max_size=len(slots) * source), "records")
    rows = np.frombuffer(data, np.uint8).reshape(len(slots), source)
    return Records(np.array(slots, np.int32), rows, np.array(scatter_map, SCATTER_MAP))


@settings(max_examples=share.of(60), deadline=None)
@given(st.data())
def test_a_plan_writes_what_it_says_and_nothing_else(device, data):
    memory = device.allocate(NBYTES)
    should = np.arange(NBYTES, dtype=np.uint8)
    device.writer.put(memory, 0, should, device.default_stream)
    plan = data.draw(plans(memory), "plan")
    apply_to_host(plan, should)
    before = device.counters()
    device.submit(plan, device.default_stream).wait()
    cost = device.counters() - before
    got = device.copy_out(memory, [ByteRange(0, NBYTES)], device.default_stream).data[0]
    assert (got == should).all()
    assert cost.launches <= 4 * cost.uploads


@settings(max_examples=share.of(60), deadline=None)
@given(st.data())
def test_no_element_is_wider_than_asked_or_crosses_its_place(data):
    memory = opened().allocate(NBYTES)
    plan = data.draw(plans(memory), "plan")
    widest, shift = data.draw(st.sampled_from([1, 2, 4, 8]), "widest"), 8 * data.draw(st.integers(0, 3), "shift")
    flat = plan.flat()
    written = np.zeros(NBYTES + 64, bool)
    for width, found in elements(flat, shift, widest, None).items():
        assert width <= widest
        at = np.concatenate(found.indices) * width - shift
        for begin in at.tolist():
            assert not written[begin : begin + width].any(), "a byte is written twice"
            written[begin : begin + width] = True
    should = np.zeros(NBYTES + 64, bool)
    for dst, _, nbytes, _ in flat.writes.tolist():
        should[dst : dst + nbytes] = True
    assert (written == should).all()


def test_the_pieces_of_a_plan_are_the_plan():
    class Block:
        nbytes = 1 << 17

    builder = PlanBuilder(Block())
    data = np.random.default_rng(0).integers(0, 256, 50_000, dtype=np.uint8)
    builder.copy(np.array([3]), len(data), data)
    builder.fill(np.array([60_001]), 30_000, np.uint16(0x1234))
    plan = builder.build()
    at_once, parts = np.zeros(Block.nbytes, np.uint8), np.zeros(Block.nbytes, np.uint8)
    apply_to_host(plan, at_once)
    pieces = list(in_pieces(plan, 20_000))
    for piece in pieces:
        apply_to_host(piece, parts)
    assert len(pieces) > 3
    assert max(int(piece.writes["nbytes"].sum()) for piece in pieces) <= 20_000
    assert (at_once == parts).all()


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "int32", "int64", "float32", "bfloat16"])
def test_slices_of_tensors_of_every_width_are_written_where_they_are(device, dtype):
    tensor = paddle.zeros([5, 7], "float32").astype(dtype)
    part = tensor[1:4, 2:6]
    view = device.resolve(part)
    assert view.shape == (3, 4)
    data = np.arange(12 * view.dtype.itemsize, dtype=np.uint8) % 2
    builder = PlanBuilder(view.memory)
    builder.copy(*view.runs(), data)
    device.submit(builder.build(), device.default_stream).wait()
    should = np.zeros((5, 7), view.dtype.storage)
    should[1:4, 2:6] = data.view(view.dtype.storage).reshape(3, 4)
    stored = tensor.view("uint8").numpy().reshape(-1).view(view.dtype.storage).reshape(5, 7)
    assert (stored == should).all()


def test_what_is_no_tensor_of_this_place_is_refused():
    device = opened()
    for target in (np.zeros(3), [1], 3, None):
        with pytest.raises(InvalidValue, match="must be a Paddle tensor on"):
            device.resolve(target)


def test_tensors_over_its_memory_are_paddles_alone():
    device = opened()
    memory = device.allocate(64)
    view = View.contiguous(memory, 8, (2, 3), dtype_of("int64"))
    tensor = device.tensor(view)
    assert (tensor.shape, tensor.data_ptr()) == ([2, 3], memory.address + 8)
    for other in ("torch", "cupy", "numpy", "nothing"):
        with pytest.raises(Unavailable, match=f"its memory is Paddle's, so {other} can have no tensor of it"):
            device.tensor(view, other)
    device.close()
    with pytest.raises(DeviceClosed):
        device.tensor(view)


def test_a_place_without_a_scatter_of_words_is_refused_with_what_was_tried():
    with pytest.raises(Unavailable, match=r"no working in-place scatter of int64.*tried scatter_ of no such type"):
        opened({8: (("scatter_", "no such type"),)})


def test_a_place_whose_slices_are_copies_is_refused(monkeypatch):
    monkeypatch.setattr(PaddleMemory, "bytes", lambda self, offset, nbytes: paddle.zeros([nbytes], "uint8"))
    with pytest.raises(Unavailable, match=r"copies, not views.*FLAGS_use_stride_kernel"):
        opened()


def test_a_scatter_that_gives_wrong_bytes_is_not_used(monkeypatch):
    real = scatter_probe.Scatter.put

    def put(self, tensor, indices, values):
        real(self, tensor, indices, values + 1 if self.dtype == "int32" else values)

    monkeypatch.setattr(scatter_probe.Scatter, "put", put)
    assert opened().scatters[4].dtype == "float32"


def test_the_fallback_flag_is_as_it_was():
    before = paddle.get_flags([scatter_probe.FALLBACK])
    opened().close()
    assert paddle.get_flags([scatter_probe.FALLBACK]) == before


def test_unknown_options_and_use_after_close():
    with pytest.raises(InvalidValue, match="ring_start"):
        opened(colour="red")
    device = opened()
    memory = device.allocate(8)
    device.close()
    device.close()
    for call in (
        lambda: device.allocate(8),
        lambda: device.submit(PlanBuilder(memory).build(), device.default_stream),
        lambda: device.copy_out(memory, [], device.default_stream),
    ):
        with pytest.raises(DeviceClosed):
            call()


def test_an_empty_plan_costs_nothing():
    device = opened()
    memory = device.allocate(8)
    before = device.counters()
    device.submit(WritePlan(memory, PlanBuilder(memory).build().writes, ()), device.default_stream).wait()
    assert device.counters() - before == before - before


class FullRing(OutOfMemory):
    pass


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("refused", [1, 2, 3, 0])
def test_what_goes_in_pieces_is_written_whole_or_not_at_all(monkeypatch, contiguous, refused):
    device = opened(ring_start=1 << 10, ring_limit=1 << 12)
    memory, stream = device.allocate(20_000), device.default_stream
    should = np.full(20_000, 0xA5, np.uint8)
    for at in range(0, 20_000, 4000):
        device.writer.put(memory, at, should[at : at + 4000], stream)
    value = np.arange(9001, dtype=np.uint32).astype(np.uint8)
    step = 1 if contiguous else 2
    takes, true = [], device.staging.take

    def take(nbytes):
        takes.append(nbytes)
        if len(takes) == refused:
            raise FullRing("the ring is full")
        return true(nbytes)

    monkeypatch.setattr(device.staging, "take", take)
    target = View(memory, 8, (9001,), (step,), dtype_of("uint8"))
    if refused:
        with pytest.raises(FullRing):
            device.submit_value(target, value, stream)
    else:
        device.submit_value(target, value, stream).wait()
        should[8 : 8 + 9001 * step : step] = value
    assert len(takes) >= 3 or refused
    assert (device.copy_out(memory, [ByteRange(0, 20_000)], stream).data[0] == should).all()


def test_a_device_value_of_many_axes_is_gathered_or_refused_by_name():
    device = opened()
    memory = device.allocate(8 << 12)
    view = View.contiguous(memory, 0, (2,) * 9 + (1,) * 8, dtype_of("int64"))
    assert gather(view, "int64").shape == [512]
    with pytest.raises(InvalidValue, match="the device value has 10 axes"):
        gather(View.contiguous(memory, 0, (2,) * 10, dtype_of("int64")), "int64")
