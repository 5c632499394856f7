"""The entry point ``hal`` of ``vllm.general_plugins``. vLLM calls it in all its processes, more than once.

Workers alone are changed, before their classes are imported: vLLM calls ``Platform.register_triton_kernel_overrides``
at that moment, which is extended; a vLLM without it (0.24) looks up the worker's class by a name, which is extended.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from hal_core import HalError, InvalidValue

from . import figures
from .launching import REGISTRY
from .settings import Settings

MARK = "of_hal"
REFUSED = {"thinking_token_budget": "vllm.v1.worker.gpu.sample.thinking_budget._thinking_budget_kernel"}
"""Parameters of requests, and the kernel that hal lacks for each. An author who registers one takes it out."""
_done: list[str] = []
"""The log's line, once this process was changed."""


def register() -> None:
    """Extend vLLM, so that workers write their slot state over a hal device. Called again it changes nothing."""
    settings = Settings.of()
    if settings.mode == "off" or os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        return
    figures.show()
    if _without_triton():
        # It refuses its runner V2 without Triton; the kernels that a step needs are registered in the worker.
        vars(import_module("vllm.config.vllm"))["HAS_TRITON"] = True
        _refuse_requests(type(import_module("vllm.platforms").current_platform))
    platform = type(import_module("vllm.platforms").current_platform)
    before = getattr(platform, "register_triton_kernel_overrides", None)
    if before is None:
        module, name = import_module("vllm.v1.worker.worker_base"), "resolve_obj_by_qualname"
        if not hasattr(getattr(module, name), MARK):
            setattr(module, name, _extended(getattr(module, name), settings, once=False))
    elif not hasattr(before, MARK):
        platform.register_triton_kernel_overrides = staticmethod(_extended(before, settings, once=True))


def _refuse_requests(platform: Any) -> None:  # noqa: ANN401 (vLLM's class)
    """Refuse a request where it arrives, as its kernel would end the engine."""
    before = getattr(platform, "validate_request", None)
    if before is None or hasattr(before, MARK):
        return

    def validate_request(processed_inputs: Any, params: Any) -> None:  # noqa: ANN401 (vLLM's)
        before(processed_inputs, params)
        for name, kernel in REFUSED.items():
            if getattr(params, name, None) is not None:
                what = f"it needs the kernel {kernel}, and there is no Triton"
                raise InvalidValue(what, cure="leave it out, or register that kernel", argument=name)

    setattr(validate_request, MARK, True)
    platform.validate_request = staticmethod(validate_request)


def _extended(before: Callable[..., Any], settings: Settings, *, once: bool) -> Callable[..., Any]:
    """Return a function that calls ``before`` and changes this process. ``once``: ``before`` fails when called again,
    as vLLM 0.32's ``register_kernels`` does where numba or cffi is loaded."""

    def extended(*args: Any) -> Any:  # noqa: ANN401 (vLLM's)
        result = None
        if not once:
            take_part(settings)
            return before(*args)
        if not _done:
            result = before(*args)
            take_part(settings)
        return result

    setattr(extended, MARK, True)
    return extended


def take_part(settings: Settings) -> None:
    """Change this worker, or log one warning and leave it as it is.

    :raises HalError: in place of the warning with ``HAL_VLLM_REQUIRE=1``, and without Triton, where vLLM's runner V2
        cannot go on without hal.
    """
    if _done:
        return
    log = import_module("vllm.logger").init_logger("vllm.hal_vllm")
    platform = import_module("vllm.platforms").current_platform
    from .installing import prepare

    try:
        prepared = prepare(settings, triton=_has_triton(), kind=platform.device_type)
    except HalError as error:
        if settings.require or _without_triton():
            raise
        log.warning("hal takes no part, vLLM's own buffers stay: %s", error)
        _done.append("")
        return
    _done.append(prepared.install())
    log.info("%s", _done[0])


def _has_triton() -> bool:
    return bool(import_module("vllm.triton_utils").HAS_TRITON)


def _without_triton() -> bool:
    """Return whether hal brings the kernels: vLLM has no Triton, but a registry of kernels, which came after 0.24."""
    return not _has_triton() and find_spec(REGISTRY) is not None
