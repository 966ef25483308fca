"""Status codes of the LLM-DataDist API and the one exception that carries them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import NoReturn

from vllm_llmdd_connector.datadist import _engine

__all__ = [
    "LLMException",
    "LLMStatusCode",
    "Status",
    "engine_errors",
    "fail",
    "first_generation_errors",
    "first_generation_status",
    "status_of",
]

_BASE = 0x5010B000
_KEY_EXISTS = _BASE + 0x15  # of the engine; Python has no name for it


class LLMStatusCode(IntEnum):
    """What a call ended with. The names, also the odd one, and the values are the vendor's."""

    LLM_SUCCESS = 0
    LLM_FAILED = 0xFFFFFFFF
    LLM_WAIT_PROCESS_TIMEOUT = _BASE + 0x1
    LLM_KV_CACHE_NOT_EXIST = _BASE + 0x2
    LLM_REPEAT_REQUEST = _BASE + 0x3
    LLM_REQUEST_ALREADY_COMPLETED = _BASE + 0x4
    LLM_PARAM_INVALID = _BASE + 0x5
    LLM_ENGINE_FINALIZED = _BASE + 0x6
    LLM_NOT_YET_LINK = _BASE + 0x7
    LLM_ALREADY_LINK = _BASE + 0x8
    LLM_LINK_FAILED = _BASE + 0x9
    LLM_UNLINK_FAILED = _BASE + 0xA
    LLM_NOTIFY_PROMPT_UNLINK_FAILED = _BASE + 0xB
    LLM_CLUSTER_NUM_EXCEED_LIMIT = _BASE + 0xC
    LLM_PROCESSING_LINK = _BASE + 0xD
    LLM_DEVICE_OUT_OF_MEMORY = _BASE + 0xE
    LLM_PREFIX_ALREADY_EXIST = _BASE + 0xF
    LLM_PREFIX_NOT_EXIST = _BASE + 0x10
    LLM_SEQ_LENOVERLIMIT = _BASE + 0x11
    LLM_NO_FREE_BLOCK = _BASE + 0x12
    LLM_BLOCKS_OUT_OF_MEMORY = _BASE + 0x13
    LLM_EXIST_LINK = _BASE + 0x18
    LLM_FEATURE_NOT_ENABLED = _BASE + 0x19
    LLM_TIMEOUT = _BASE + 0x1A
    LLM_LINK_BUSY = _BASE + 0x1B
    LLM_OUT_OF_MEMORY = _BASE + 0x1C
    LLM_DEVICE_MEM_ERROR = 507053
    LLM_SUSPECT_REMOTE_ERROR = 507057
    LLM_UNKNOWN_ERROR = -1

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class LLMException(RuntimeError):
    """A refused or failed call. ``status_code`` says which kind, the text says what to do."""

    def __init__(
        self, *args: object, status_code: LLMStatusCode = LLMStatusCode.LLM_SUCCESS
    ) -> None:
        super().__init__(*args)
        self._status_code = status_code

    def __reduce__(self) -> tuple[object, ...]:
        """Pickling keeps the code, so the exception survives a trip between processes."""
        return _rebuild, (self.args, self._status_code)

    @property
    def status_code(self) -> LLMStatusCode:
        return self._status_code


def _rebuild(args: tuple[object, ...], status_code: LLMStatusCode) -> LLMException:
    return LLMException(*args, status_code=status_code)


class Status:
    """A status code as an object."""

    def __init__(self, status: LLMStatusCode) -> None:
        self._status = status

    @property
    def status_code(self) -> LLMStatusCode:
        return self._status

    def is_ok(self) -> bool:
        return self._status == LLMStatusCode.LLM_SUCCESS


def status_of(code: int) -> LLMStatusCode:
    """The status of an engine code; unknown ones become ``LLM_FAILED``."""
    try:
        return LLMStatusCode(code)
    except ValueError:
        return LLMStatusCode.LLM_FAILED


def fail(message: str, status_code: LLMStatusCode = LLMStatusCode.LLM_PARAM_INVALID) -> NoReturn:
    """Raise an ``LLMException``; without a code it is the one of a failed value check."""
    raise LLMException(message, status_code=status_code)


@contextmanager
def engine_errors(tag: str) -> Iterator[None]:
    """Turn the engine's error inside the block into an ``LLMException`` that names the call."""
    try:
        yield
    except _engine.EngineError as error:
        sentence, code = error.args
        status = LLMStatusCode.LLM_PARAM_INVALID if code == _KEY_EXISTS else status_of(code)
        raise _exception(tag, status, sentence) from None


# What the first generation calls the engine's codes; it has no name for a key that is bound twice.
_FIRST_GENERATION = {
    LLMStatusCode.LLM_TIMEOUT: LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
    LLMStatusCode.LLM_OUT_OF_MEMORY: LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY,
}


def first_generation_status(code: int) -> LLMStatusCode:
    status = status_of(code)
    return _FIRST_GENERATION.get(status, status)


@contextmanager
def first_generation_errors(tag: str) -> Iterator[None]:
    """``engine_errors`` with the codes of ``KvCacheManager``."""
    try:
        yield
    except _engine.EngineError as error:
        sentence, code = error.args
        raise _exception(tag, first_generation_status(code), sentence) from None


def _exception(tag: str, status: LLMStatusCode, sentence: str) -> LLMException:
    return LLMException(f"[{tag}] failed, error code is {status}: {sentence}", status_code=status)
