"""What a device needs: bases to derive from, and the pieces that those are made of.

- ``primitives``: what the vendor of an asynchronous device writes (:class:`~hal_core.devices.primitives.Primitives`).
- ``asynchronous``: the device over them (:class:`~hal_core.devices.asynchronous.AsyncDevice`).
- ``streaming``: its half that needs streams, events and host memory alone, for devices that move bytes in a way of
  their own (:class:`~hal_core.devices.streaming.StreamDevice`; Paddle's CustomDevices).
- ``events``, ``tickets``, ``blocks``, ``lifetimes``: what the two are made of, and the vendor need not read.
- ``sync``, ``base``: synchronous devices, and what all devices share; ``cpu``, ``paddle``: devices that ship with the
  core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import face

if TYPE_CHECKING:
    from ..memory.copies import CopyTicket as CopyTicket
    from ..memory.copies import HostCopy as HostCopy
    from ..memory.dtypes import dtype_of as dtype_of
    from ..memory.packing import ROW as ROW
    from ..memory.packing import Packed as Packed
    from ..memory.packing import apply_packed as apply_packed
    from ..memory.packing import cut_rows as cut_rows
    from ..memory.plan import SCATTER_MAP as SCATTER_MAP
    from ..memory.plan import PlanBuilder as PlanBuilder
    from ..memory.plan import WritePlan as WritePlan
    from ..memory.plan import apply_to_host as apply_to_host
    from ..memory.values import Value as Value
    from ..memory.views import Index as Index
    from ..memory.views import Memory as Memory
    from ..ranks.communicator import Communicator as Communicator
    from ..slots.fields import ROW_FIELDS as ROW_FIELDS
    from ..slots.host_table import FEW as FEW
    from ..slots.host_table import TOKENS as TOKENS
    from ..slots.insertion import plan_insert as plan_insert
    from ..slots.layout import ADMISSION_ID as ADMISSION_ID
    from ..slots.layout import REQUEST_ROW as REQUEST_ROW
    from ..slots.state import DYNAMIC as DYNAMIC
    from ..slots.update import STEP_FIELDS as STEP_FIELDS
    from ..slots.update import update_inputs as update_inputs
    from ..tickets import Mode as Mode
    from .asynchronous import AsyncDevice as AsyncDevice
    from .base import DeviceBase as DeviceBase
    from .base import check_index as check_index
    from .base import check_options as check_options
    from .blocks import MirroredBlock as MirroredBlock
    from .events import AsyncStream as AsyncStream
    from .events import RecordedEvent as RecordedEvent
    from .lifetimes import DeviceMemory as DeviceMemory
    from .paddle.conformance import PaddleSupport as PaddleSupport
    from .paddle.conformance import SimulatedRanks as SimulatedRanks
    from .paddle.custom import CustomDevicePlugin as CustomDevicePlugin
    from .paddle.device import PaddleDevice as PaddleDevice
    from .paddle.places import custom_place as custom_place
    from .paddle.places import import_paddle as import_paddle
    from .paddle.places import paddle_core as paddle_core
    from .paddle.plugins import PaddlePlugin as PaddlePlugin
    from .paddle.probing import Installed as Installed
    from .paddle.probing import installed_paddle as installed_paddle
    from .paddle.ranks.collectives import open_collectives as open_collectives
    from .paddle.ranks.groups import open_groups as open_groups
    from .paddle.ranks.world import DEFAULT_TIMEOUT as DEFAULT_TIMEOUT
    from .paddle.ranks.world import join_world as join_world
    from .paddle.scatters import Candidates as Candidates
    from .primitives import POLL as POLL
    from .primitives import Launch as Launch
    from .primitives import PlanLaunch as PlanLaunch
    from .primitives import Primitives as Primitives
    from .primitives import StreamPrimitives as StreamPrimitives
    from .ring_options import RingOptions as RingOptions
    from .staging import Span as Span
    from .staging import StagingRing as StagingRing
    from .streaming import StreamDevice as StreamDevice
    from .streaming import primitive as primitive
    from .sync import SyncDevice as SyncDevice
    from .tickets import AsyncTicket as AsyncTicket

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "hal_core.devices.asynchronous": "AsyncDevice",
        "hal_core.devices.blocks": "MirroredBlock",
        "hal_core.devices.events": "AsyncStream RecordedEvent",
        "hal_core.devices.lifetimes": "DeviceMemory",
        "hal_core.devices.primitives": "Launch POLL PlanLaunch Primitives StreamPrimitives",
        "hal_core.devices.streaming": "StreamDevice primitive",
        "hal_core.devices.tickets": "AsyncTicket",
        "hal_core.devices.base": "DeviceBase check_index check_options",
        "hal_core.devices.paddle.conformance": "PaddleSupport SimulatedRanks",
        "hal_core.devices.paddle.custom": "CustomDevicePlugin",
        "hal_core.devices.paddle.device": "PaddleDevice",
        "hal_core.devices.paddle.places": "custom_place import_paddle paddle_core",
        "hal_core.devices.paddle.plugins": "PaddlePlugin",
        "hal_core.devices.paddle.probing": "Installed installed_paddle",
        "hal_core.devices.paddle.ranks.collectives": "open_collectives",
        "hal_core.devices.paddle.ranks.groups": "open_groups",
        "hal_core.devices.paddle.ranks.world": "DEFAULT_TIMEOUT join_world",
        "hal_core.devices.paddle.scatters": "Candidates",
        "hal_core.devices.ring_options": "RingOptions",
        "hal_core.devices.staging": "Span StagingRing",
        "hal_core.devices.sync": "SyncDevice",
        "hal_core.memory.copies": "CopyTicket HostCopy",
        "hal_core.memory.dtypes": "dtype_of",
        "hal_core.memory.packing": "Packed ROW apply_packed cut_rows",
        "hal_core.memory.plan": "SCATTER_MAP PlanBuilder WritePlan apply_to_host",
        "hal_core.memory.values": "Value",
        "hal_core.memory.views": "Index Memory",
        "hal_core.ranks.communicator": "Communicator",
        "hal_core.slots.update": "STEP_FIELDS update_inputs",
        "hal_core.slots.fields": "ROW_FIELDS",
        "hal_core.slots.host_table": "FEW TOKENS",
        "hal_core.slots.insertion": "plan_insert",
        "hal_core.slots.layout": "REQUEST_ROW ADMISSION_ID",
        "hal_core.slots.state": "DYNAMIC",
        "hal_core.tickets": "Mode",
    },
)
