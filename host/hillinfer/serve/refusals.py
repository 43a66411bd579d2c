# SPDX-License-Identifier: Apache-2.0
"""Why a request is refused or failed, as a status and OpenAI's error object say it."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Any

from hillinfer.errors import FULL, Failure, HillInferError

INVALID = "invalid_request_error"
SERVER = "server_error"


class ApiError(Exception):
    """A request that is not answered, or not to its end.

    Parameters
    ----------
    status
        Of HTTP.
    message
        What is wrong and how to go on, in one line.
    code
        What programs look at.
    kind
        OpenAI's `type`.
    param
        The field at fault; None for none.
    retry_after
        Seconds after which another try makes sense; None where none does.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        kind: str = INVALID,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.kind, self.param, self.retry_after = kind, param, retry_after

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        told = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": told}


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return the refusal of a request that says something wrong."""
    return ApiError(400, message, code, param=param)


def gone_error() -> ApiError:
    """Return what ends a request whose client has left; nobody reads it."""
    return ApiError(499, "the client is gone", "client_gone")


# --- The table ---


@dataclass(frozen=True)
class Row:
    """What one class of errors becomes.

    Parameters
    ----------
    status, code
        As in `ApiError`.
    public
        What is said instead of the error's own line, which may name places on this machine; None
        for that line.
    """

    status: int
    code: str
    public: str | None = None

    @property
    def kind(self) -> str:
        """OpenAI's `type`."""
        return INVALID if self.status < 500 else SERVER


_DEFECT = Row(500, "internal_error", "the request failed; the server's log says why")
_DRIVE = Row(503, "drive_failed", "the drive of the KV cache failed; the server's log says how")
_DRIVE_FULL = Row(503, "drive_full", "the drive of the KV cache is full")
_STORE = Row(503, "store_failed", "the store failed; the server's log says how")
_KEY = Row(503, "store_key", "the store's key is missing or wrong; the server's log says more")
_MODEL = Row(500, "model_failed", "the model cannot be used; the server's log says why")
_MEMORY = Row(503, "memory_full", "the memory of the KV cache is full: try again later")

# By name, so that classes of rooms above have a row too.
ROWS = {
    "SettingsError": Row(400, "invalid_value"),
    "UnsupportedFeatureError": Row(400, "unsupported"),
    "BudgetError": _MEMORY,
    "ColdPoolError": _DRIVE,
    "StoredRowsError": _DRIVE,
    "PageLockError": _MEMORY,
    "CacheUseError": _DEFECT,
    "PromptError": Row(400, "invalid_prompt"),
    "TemplateError": Row(400, "chat_template"),
    "ModelError": _MODEL,
    "FetchError": _MODEL,
    "FitError": _MEMORY,
    "SessionError": _DEFECT,
    "BrokenRunError": _DEFECT,
    "OutputError": _DEFECT,
    "NoReaderError": _DEFECT,
    "DeviceError": Row(503, "device_failed", "a device failed; the server's log says how"),
    "PynqError": Row(503, "device_failed", "a device failed; the server's log says how"),
    "SecrecyError": _KEY,
    "WrongKeyError": _KEY,
    "StoreRulesError": _STORE,
    "StoreError": _STORE,
    "StoreExistsError": _STORE,
    "CatalogueError": _STORE,
    "AlreadyStoredError": _STORE,
    "StoreFailedError": _STORE,
    "NativeError": _DEFECT,
    "MeasuringEndedError": _DEFECT,
    "UnlikeRowsError": _DEFECT,
    "ReportError": _DEFECT,
    "XclbinError": _DEFECT,
}


def row_of(kind: type[BaseException]) -> Row:
    """Return the row of a class, or of the nearest above it; a defect's where none has one."""
    return next((ROWS[one.__name__] for one in kind.__mro__ if one.__name__ in ROWS), _DEFECT)


def api_error(error: BaseException) -> ApiError:
    """Return what a client is told of an error."""
    if isinstance(error, ApiError):
        return error
    row = row_of(type(error)) if isinstance(error, HillInferError) else _DEFECT
    if isinstance(error, OSError) and (error.errno in FULL or error.errno == errno.EIO):
        row = _DRIVE
    if row is _DRIVE and _is_full(error):
        row = _DRIVE_FULL
    message = row.public or Failure.of(error).message
    return ApiError(row.status, message, row.code, row.kind)


def _is_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        error = error.__cause__
    return False
