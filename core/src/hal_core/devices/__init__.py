"""Base classes and parts of devices.

- ``primitives``: the interface that the vendor of an asynchronous device implements
  (:class:`~hal_core.devices.primitives.Primitives`).
- ``asynchronous``: the device over them (:class:`~hal_core.devices.asynchronous.AsyncDevice`).
- ``stream_device``: its base, which needs only streams, events and host memory, for devices with their own way to move
  bytes (:class:`~hal_core.devices.stream_device.StreamDevice`; Paddle's CustomDevices).
- ``events``, ``tickets``, ``blocks``, ``retired_memory``: parts of these two, which a vendor need not read.
- ``sync``, ``base``: synchronous devices, and the base of all devices; ``cpu``, ``paddle``: devices in the core.
"""

from __future__ import annotations

from ..lazy import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "hal_core.devices.asynchronous": "AsyncDevice",
        "hal_core.devices.blocks": "Lease MirroredBlock",
        "hal_core.devices.events": "AsyncStream RecordedEvent",
        "hal_core.devices.retired_memory": "DeviceMemory",
        "hal_core.devices.primitives": "Launch PlanLaunch Primitives StreamPrimitives poll",
        "hal_core.devices.stream_device": "StreamDevice primitive",
        "hal_core.devices.tensors": "tensor_over",
        "hal_core.devices.tickets": "AsyncTicket",
        "hal_core.devices.base": "DeviceBase check_index check_options",
        "hal_core.devices.paddle.conformance": "PaddleSupport SimulatedRanks",
        "hal_core.devices.paddle.custom": "CustomDevicePlugin",
        "hal_core.devices.paddle.custom_device": "CustomDevice",
        "hal_core.devices.paddle.device": "PaddleDevice",
        "hal_core.devices.paddle.memory": "paddle_piece",
        "hal_core.devices.paddle.places": "custom_place import_paddle paddle_core",
        "hal_core.devices.paddle.plugins": "PaddlePlugin",
        "hal_core.devices.paddle.probing": "Installed installed_paddle",
        "hal_core.devices.paddle.processor": "X86 check_processor processor_features",
        "hal_core.devices.paddle.ranks.collectives": "CollectiveTicket open_collectives open_job",
        "hal_core.devices.paddle.ranks.groups": "OpenGroup close_groups open_groups opened",
        "hal_core.devices.paddle.ranks.tensors": "TensorRanks library_of",
        "hal_core.devices.paddle.ranks.world": "join_world",
        "hal_core.devices.paddle.scatters": "Candidates",
        "hal_core.devices.ring_options": "RingOptions",
        "hal_core.devices.staging": "Span StagingRing",
        "hal_core.devices.sync": "SyncDevice",
        "hal_core.memory.copies": "CopyTicket HostCopy",
        "hal_core.memory.dlpack": "DLPACK_CPU DLPACK_CUDA",
        "hal_core.memory.dtypes": "dtype_of",
        "hal_core.memory.foreign": "check_plain check_resolved",
        "hal_core.memory.packing": "Packed ROW apply_packed cut_rows",
        "hal_core.memory.plan": "SCATTER_MAP PlanBuilder WritePlan apply_to_host",
        "hal_core.memory.values": "Value",
        "hal_core.memory.views": "Index Memory",
        "hal_core.ranks.communicator": "Communicator",
        "hal_core.ranks.ports": "HeldPort",
        "hal_core.slots.update": "STEP_FIELDS update_inputs",
        "hal_core.slots.fields": "ROW_FIELDS",
        "hal_core.slots.native_columns": "gather_with",
        "hal_core.slots.host_table": "BLOCKS HELD PREFILLED SLOT_ADMISSION TOKENS",
        "hal_core.slots.insertion": "plan_insert",
        "hal_core.slots.layout": "ADMISSION_ID CONFIG_KEY REQUEST_ROW TOKENS_LEFT",
        "hal_core.slots.geometry": "DYNAMIC",
        "hal_core.slots.task": "TRAITS",
        "hal_core.tickets": "Mode",
    },
)
