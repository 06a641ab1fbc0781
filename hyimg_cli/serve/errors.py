"""Refusals of requests, and every error as the body of a response."""

from collections.abc import Mapping
from typing import Any

from hyimg_cli.errors import HyimgError

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
# Codes of jobs that failed by what their request said.
_ASKED_WRONGLY = ("manifest.", "source.", "usage", "output-image.")


class Refused(HyimgError):
    """A request that is answered with `status`; `param` is the field that was wrong."""

    def __init__(
        self,
        status: int,
        what: str,
        *,
        param: str = "",
        hint: str = "",
        code: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(what, where=param, hint=hint, code=code)
        self.status, self.param, self.headers = status, param, dict(headers or {})


def bad_value(param: str, what: str) -> Refused:
    """The refusal of a field, or of a part of a query, whose value is not one of its kind."""
    return Refused(400, what, param=param, code="request.bad-value")


def status_of(error: HyimgError | Mapping[str, Any]) -> int:
    """The HTTP status of an error, or of the `error` of a result line."""
    if isinstance(error, Refused):
        return error.status
    code = error.code if isinstance(error, HyimgError) else error["code"]
    return 400 if code.startswith(_ASKED_WRONGLY) else 507 if code == "storage.full" else 500


def error_body(error: HyimgError | Mapping[str, Any]) -> dict[str, Any]:
    """The body that tells of an error, or of the `error` of a result line."""
    param = ""
    if isinstance(error, HyimgError):
        what, hint, code = error.what, error.hint, error.code
        param = error.param if isinstance(error, Refused) else ""
    else:
        what, hint, code = error["message"], error.get("hint", ""), error["code"]
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    message = f"{what} ({hint})" if hint else what
    return {"error": {"message": message, "type": kind, "param": param or None, "code": code}}
