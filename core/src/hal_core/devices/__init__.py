"""Base classes and parts of devices.

- ``primitives``: the interface that the vendor of an asynchronous device implements
  (:class:`~hal_core.devices.primitives.Primitives`).
- ``asynchronous``: the device over them (:class:`~hal_core.devices.asynchronous.AsyncDevice`).
- ``stream_device``: its base, which needs only streams, events and host memory, for devices with their own way to move
  bytes (:class:`~hal_core.devices.stream_device.StreamDevice`; the distribution ``paddle-hal-paddle`` uses it).
- ``events``, ``tickets``, ``blocks``, ``retired_memory``: parts of these two, which a vendor need not read.
- ``substitutes``: the base of plugins whose chip can be replaced for tests.
- ``sync``, ``base``: synchronous devices, and the base of all devices; ``cpu``: the device in the core.
- ``hal_core.ranks``: groups of ranks, their watchdogs, and collectives on host memory.
"""

from __future__ import annotations

from ..lazy import face

_load, __dir__, __all__ = face(
    __name__,
    {
        "hal_core.devices.asynchronous": "AsyncDevice",
        "hal_core.devices.blocks": "HostBlock Lease MirroredBlock",
        "hal_core.devices.events": "AsyncStream RecordedEvent",
        "hal_core.devices.retired_memory": "DeviceMemory SpanMemory",
        "hal_core.devices.primitives": "Launch PlanLaunch Primitives StreamPrimitives poll",
        "hal_core.devices.stream_device": "StreamDevice primitive",
        "hal_core.devices.framework_tensors": "paddle_piece tensor_over",
        "hal_core.devices.tickets": "AsyncCopy AsyncTicket",
        "hal_core.devices.base": "DeviceBase check_index check_options plan_value",
        "hal_core.devices.collective_ticket": "CollectiveTicket",
        "hal_core.devices.cpu.communicator": "HostCommunicator host_communicator",
        "hal_core.devices.probing": "Installed installed_paddle",
        "hal_core.devices.processor": "X86 check_processor processor_features",
        "hal_core.devices.ring_options": "RingOptions",
        "hal_core.devices.staging": "Span StagingRing",
        "hal_core.devices.substitutes": "SubstitutablePlugin",
        "hal_core.devices.sync": "PASSED SyncDevice",
        "hal_core.memory.copies": "CopyTicket HostCopy",
        "hal_core.memory.dlpack": "DLPACK_CPU DLPACK_CUDA",
        "hal_core.memory.dtypes": "dtype_of",
        "hal_core.memory.elements": "Elements ScatterColumns WIDTHS elements in_pieces",
        "hal_core.memory.foreign_tensors": "check_plain check_resolved",
        "hal_core.memory.packing": "Packed LONGEST_WRITE apply_packed cut cut_long_writes",
        "hal_core.memory.plan": "SCATTER_MAP PlanBuilder Records WritePlan apply_to_host runs_of",
        "hal_core.memory.values": "Value",
        "hal_core.memory.views": "Index Memory extent",
        "hal_core.memory.writes": "across",
        "hal_core.ranks.communicator": "Communicator",
        "hal_core.ranks.groups": "Maker OpenGroup OwnGroup Share close_groups open_groups opened",
        "hal_core.ranks.host_group": "HOST HostGroup",
        "hal_core.ranks.job": "join_world own_host wait_for_listener",
        "hal_core.ranks.ports": "HeldPort",
        "hal_core.slots.batch_admission": "AdmittedColumns",
        "hal_core.slots.update": "STEP_FIELDS update_inputs",
        "hal_core.slots.fields": "ROW_FIELDS",
        "hal_core.slots.native_columns": "REQUEST_NAMES TASK_NAMES NativeColumns",
        "hal_core.slots.host_table": "BLOCKS BLOCKS_HELD PREFILLED SLOT_ADMISSION TOKENS",
        "hal_core.slots.insertion": "plan_insert",
        "hal_core.slots.layout": "ADMISSION_ID CONFIG_KEY REQUEST_ROW TOKENS_LEFT",
        "hal_core.slots.geometry": "DYNAMIC",
        "hal_core.slots.task": "TRAITS",
        "hal_core.tickets": "Mode",
    },
)

_MOVED = {
    "Candidates": "hal_paddle.scatter_probe",
    "CustomDevice": "hal_paddle.custom_device",
    "CustomDevicePlugin": "hal_paddle",
    "PaddleDevice": "hal_paddle.sync_place",
    "PaddlePlugin": "hal_paddle",
    "PaddleSupport": "hal_paddle.conformance",
    "SimulatedRanks": "hal_paddle.conformance",
    "TensorRanks": "hal_paddle_runner.ranks",
    "custom_place": "hal_paddle.places",
    "import_paddle": "hal_paddle.places",
    "exchange_blocks": "hal_paddle.collectives",
    "open_job": "hal_engine.distributed.job_groups",
    "paddle_core": "hal_paddle.places",
    "paddle_device": "hal_paddle.places",
}
"""Names of version 1.0 to their present modules: for one release, an import from here says where they are."""


def __getattr__(name: str) -> object:
    if name in _MOVED:
        cure = "paddle-hal-paddle has hal_paddle: pip install ./plugins/paddle in hal's checkout"
        raise ImportError(f"{name} moved from hal_core.devices to {_MOVED[name]} ({cure})", name=name)
    return _load(name)
