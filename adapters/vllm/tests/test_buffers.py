"""vLLM's buffer classes over hal's devices, without vLLM: against NumPy, and what they refuse."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")

from hal_core import DeviceClosed, InvalidValue  # noqa: E402 (torch first: where it is missing, nothing runs)
from hal_core.devices import Packed  # noqa: E402
from hal_vllm.buffers import classes_over  # noqa: E402
from hal_vllm.installing import open_stage  # noqa: E402
from hal_vllm.stage import CHUNK, Stage  # noqa: E402

CPU = torch.device("cpu")
DTYPES = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}


@pytest.fixture(params=["cpu", "torch_cpu", "packed"])
def stage(request, monkeypatch):
    """``packed``: the device lays each plan out in a block first, as those do that write with one kernel."""
    stage = open_stage("cpu" if request.param == "packed" else request.param, CPU)
    submit = stage.device.device.submit_all

    def submit_packed(plans, stream):
        for plan in plans:
            packed = Packed.of(plan)
            packed.fill(np.zeros(packed.nbytes, np.uint8), plan)
        return submit(plans, stream)

    if request.param == "packed":
        monkeypatch.setattr(stage.device.device, "submit_all", submit_packed)
    yield stage
    stage.device.close()


@pytest.fixture
def made(stage):
    """The three classes."""
    return classes_over(stage)


def table(made, rows=4, width=6, dtype=torch.int32):
    return made["StagedWriteTensor"]((rows, width), dtype, CPU)


def test_what_a_step_applies_is_one_submission(stage, made):
    first, second, lens = table(made), table(made), made["UvaBackedTensor"](4, torch.int32)
    before = stage.counts["submissions"]
    first.stage_write(1, 2, [7, 8])
    second.stage_write(3, 0, {5: 0, 6: 0}.keys())
    lens.np[2] = 9
    first.apply_write()
    second.apply_write()
    lens.copy_to_uva()
    stage.flush()
    assert stage.counts["submissions"] == before + 1
    assert first.gpu.tolist() == [[0] * 6, [0, 0, 7, 8, 0, 0], [0] * 6, [0] * 6]
    assert second.gpu[3].tolist() == [5, 6, 0, 0, 0, 0]
    assert lens.gpu.tolist() == [0, 0, 9, 0]
    assert stage.counts["submissions"] == before + 1


def test_a_step_in_which_nothing_changed_submits_nothing(stage, made):
    lens, one = made["UvaBackedTensor"](4, torch.float32), table(made)
    lens.np[1] = np.nan
    lens.copy_to_uva()
    stage.flush()
    before = stage.counts["submissions"]
    lens.copy_to_uva()
    one.apply_write()
    stage.flush()
    assert stage.counts["submissions"] == before


def test_a_read_submits_what_was_applied_and_nothing_else(made):
    one = table(made)
    one.stage_write(0, 0, [1])
    one.apply_write()
    one.stage_write(0, 1, [2])
    assert one.gpu[0].tolist() == [1, 0, 0, 0, 0, 0]
    one.apply_write()
    assert one.gpu[0].tolist() == [1, 2, 0, 0, 0, 0]


def test_addresses_never_move(stage, made):
    one, lens, large = table(made), made["UvaBackedTensor"]((2, 3), torch.int64), table(made, 64, CHUNK // 64)
    places = [each.gpu.data_ptr() for each in (one, lens, large)]
    for step in range(5):
        one.stage_write(step % 4, 0, [step])
        large.stage_write(step, 5, [step])
        lens.np[1, 2] = step
        for act in (one.apply_write, large.apply_write, lens.copy_to_uva, stage.flush):
            act()
    assert [each.gpu.data_ptr() for each in (one, lens, large)] == places
    assert not [place for place in places if place % 16]
    assert lens.gpu.tolist() == [[0, 0, 0], [0, 0, 4]]
    assert large.gpu[:5, 5].tolist() == [0, 1, 2, 3, 4]


def test_of_two_writes_to_one_place_the_last_wins(made):
    one = table(made)
    one.stage_write(2, 0, [1, 1, 1, 1])
    one.stage_write(2, 1, [2, 2])
    one.apply_write()
    one.stage_write(2, 2, [3])
    one.apply_write()
    assert one.gpu[2].tolist() == [1, 2, 3, 1, 0, 0]


@pytest.mark.parametrize(("row", "start", "values"), [(0, 4, [1, 2, 3]), (4, 0, [1]), (-1, 0, [1]), (0, -1, [1])])
def test_a_write_outside_its_row_is_refused(made, row, start, values):
    one = table(made)
    one.stage_write(1, 0, [9])
    with pytest.raises(InvalidValue, match=r"there are 4 rows of 6 .*belongs to another request"):
        one.stage_write(row, start, values)
    one.apply_write()
    assert one.gpu.sum() == 9


@pytest.mark.parametrize("values", [[1, 2**31], [1, "2"], [1, None], [1, 2.5]])
def test_a_number_out_of_the_dtype_is_refused_and_stages_nothing(made, values):
    one = table(made)
    with pytest.raises(InvalidValue, match=r"row 0: .*give numbers of torch.int32"):
        one.stage_write(0, 0, values)
    one.stage_write(0, 0, [4])
    one.apply_write()
    assert one.gpu[0].tolist() == [4, 0, 0, 0, 0, 0]


def test_a_dtype_that_cannot_be_staged_is_refused(made):
    with pytest.raises(InvalidValue, match=r"torch.bool cannot be staged \(give one of torch.int32"):
        table(made, dtype=torch.bool)


def test_cleared_writes_are_forgotten_and_empty_ones_are_none(made):
    one = table(made)
    one.stage_write(0, 0, [1])
    one.clear_staged_writes()
    one.stage_write(0, 9, [])
    one.apply_write()
    assert one.gpu.sum() == 0


def test_the_first_rows_alone(made):
    lens = made["UvaBackedTensor"](4, torch.int32)
    lens.np[:] = [1, 2, 3, 4]
    assert lens.copy_to_uva(2) is None
    assert lens.gpu.tolist() == [1, 2]
    lens.copy_to_uva()
    assert lens.gpu.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.uint8])
def test_rows_of_few_bytes(made, dtype):
    flags = made["UvaBackedTensor"](3, dtype)
    flags.np[2] = 1
    flags.copy_to_uva()
    assert flags.gpu.tolist() == [0, 0, 1]


def test_several_applies_before_a_submission(made):
    lens = made["UvaBackedTensor"](4, torch.int32)
    for at in (3, 0):
        lens.np[at] = at + 5
        lens.copy_to_uva()
    lens.np[1] = 77  # not applied
    assert lens.gpu.tolist() == [5, 0, 0, 8]


def test_a_fused_writer_is_the_tensors_own_writes(made):
    tables = [table(made), table(made, 3, 2)]
    writer = made["FusedStagedWriter"](CPU, 8)
    tables[0].stage_write_elem(1, 5)
    tables[1].stage_write(2, 1, [6])
    writer.apply(tables, None, None)
    assert tables[0].gpu[1, 0] == 5
    assert tables[1].gpu.tolist() == [[0, 0], [0, 0], [0, 6]]


@pytest.mark.parametrize("seed", range(12))
def test_drawn_writes_are_those_of_numpy(stage, made, seed):
    draw = random.Random(seed)
    tables, wanted = [], []
    for dtype, held in DTYPES.items():
        rows, width = draw.randint(1, 9), draw.choice([1, 5, 3000, 200_000])
        tables.append(table(made, rows, width, dtype))
        wanted.append(np.zeros((rows, width), held))
    lens = made["UvaBackedTensor"]((3, 5), torch.uint64)
    for _ in range(15):
        for one, array in zip(tables, wanted, strict=True):
            for _ in range(draw.randint(0, 4)):
                row, start = draw.randrange(array.shape[0]), draw.randrange(array.shape[1])
                values = [draw.randrange(100) for _ in range(draw.randint(0, min(9, array.shape[1] - start)))]
                one.stage_write(row, start, values)
                array[row, start : start + len(values)] = values
            one.apply_write()
        if draw.random() < 0.5:
            lens.np[draw.randrange(3), draw.randrange(5)] = draw.randrange(2**64)
        lens.copy_to_uva()
        if draw.random() < 0.7:
            stage.flush()
    for one, array in zip(tables, wanted, strict=True):
        assert one.gpu.numpy().tobytes() == array.tobytes()
    assert lens.gpu.numpy().tobytes() == lens.np.tobytes()


def test_a_device_whose_memory_torch_cannot_hold_is_refused():
    pytest.importorskip("hal_sim")
    with pytest.raises(InvalidValue, match=r"^sim.*does not lie in its memory.*give in HAL_VLLM_DEVICE a hal device"):
        open_stage("sim", CPU)


def test_a_device_that_was_refused_is_closed_and_refused_again(stage, monkeypatch):
    opened = []

    def opener(where):
        opened.append(stage.opener(where))
        return opened[-1]

    late = Stage(opener, torch.device("meta"))
    late.tensors = CPU
    for error in (InvalidValue("other memory", cure="another device"), RuntimeError("it hangs")):

        def refuse(place, rows, error=error):
            raise error

        monkeypatch.setattr(late, "add", refuse)
        with pytest.raises(type(error), match=r"other memory|it hangs"):
            late.allocate((4,), torch.int32)
        with pytest.raises(DeviceClosed):
            opened[-1].device.allocate(64)
    monkeypatch.undo()
    assert late.allocate((4,), torch.int32)[0].tolist() == [0] * 4
    late.device.close()


def test_a_chips_device_is_opened_with_the_first_tensor(stage):
    """A worker's chip is not known when its classes are replaced."""
    late = Stage(stage.opener, torch.device("meta"))
    late.tensors = CPU
    first, place = late.allocate((4,), torch.int32)
    second, other = late.allocate((4,), torch.int32)
    assert place.memory is other.memory
    assert first.data_ptr() != second.data_ptr()
    late.device.close()


def test_a_step_is_not_read_by_the_one_before_it(monkeypatch):
    """The stream is held: the host goes on for many steps, and each copy is that of its step."""
    monkeypatch.setenv("HAL_TORCH_CPU_PLACE", "queue")
    stage = open_stage("torch_cpu", CPU)
    made = classes_over(stage)
    one, lens = table(made), made["UvaBackedTensor"](4, torch.int32)
    stream = stage.device.default_stream
    seen = []
    with stage.device.device.hold_stream(stream):
        for step in range(1, 9):
            one.stage_write(0, 0, [step] * 6)
            lens.np[:] = step
            one.apply_write()
            lens.copy_to_uva()
            ticket = stage.flush()
            queued = stage.device.device.own_stream(stream).raw
            queued.put(lambda: seen.append((one._gpu[0].tolist(), lens._gpu.tolist())))
        assert not ticket.done()
    passed = threading.Event()
    stage.device.device.own_stream(stream).raw.put(passed.set)
    assert passed.wait(60)
    assert seen == [([step] * 6, [step] * 4) for step in range(1, 9)]
    stage.device.close()


def test_nothing_is_submitted_into_a_graph(stage, made, monkeypatch):
    one = table(made)
    one.stage_write(0, 0, [1])
    one.apply_write()
    monkeypatch.setattr(stage, "tensors", torch.device("cuda", 0))
    monkeypatch.setattr("hal_vllm.stage._capturing", lambda _: True)
    with pytest.raises(InvalidValue, match=r"pending while a graph is captured .*before the capture"):
        stage.flush()
    monkeypatch.undo()
    assert one.gpu[0, 0] == 1
