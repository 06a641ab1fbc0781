"""Refused requests, and errors as response bodies."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from hyimg_cli.errors import HyimgError, MachineError, ManifestError, required
from hyimg_cli.manifest.fields import BY_NAME
from hyimg_cli.settings.values import shown

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
# Codes of jobs that failed because of their request.
_ASKED_WRONGLY = ("manifest.", "source.", "usage", "output-image.")
# Codes of faults that only the server's operator can mend.
_OF_THE_SERVER = ("storage.", "machine", "output.")
_CODES = {"missing": "request.missing-field", "extra_forbidden": "request.unknown-field"}
Model = TypeVar("Model", bound=BaseModel)
# Tells the official client not to retry.
NO_RETRY = {"x-should-retry": "false"}


class Refused(HyimgError):
    """A request answered with the status `status`; `param` is the wrong field."""

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
        # The pictures of the request that succeeded.
        self.data: list[dict[str, Any]] = []

    @property
    def message(self) -> str:
        return f"{self.what} ({self.hint})" if self.hint else self.what

    def body(self) -> dict[str, Any]:
        """Return the response body in the shape that OpenAI's clients read."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        shown = {"message": self.message, "type": _TYPES.get(self.status, kind)}
        error = shown | {"param": self.param or None, "code": self.code}
        return {"error": error} | ({"data": self.data} if self.data else {})


def bad_request(param: str, what: str, code: str = "request.bad-value", hint: str = "") -> Refused:
    """Return the refusal of a field or a query parameter: 400."""
    return Refused(400, what, param=param, hint=hint, code=code)


def too_large(what: str, most: int) -> Refused:
    """Return the refusal of more than `most` bytes: 413."""
    return Refused(413, f"{what} has more than {most:,} bytes", code="request.too-large")


def too_slow(what: str, most_s: float) -> Refused:
    """Return the refusal of a request that did not arrive in time: 408."""
    what, head = f"{what} did not arrive within {most_s:.0f} s", {"connection": "close"}
    return Refused(408, what, code="request.timeout", headers=head)


def server_full(what: str, wait_s: int, status: int = 429) -> Refused:
    """Return the refusal of a request that may be sent again after `wait_s`."""
    head = {"retry-after": str(wait_s)}
    return Refused(status, what, hint="try again later", code="server.full", headers=head)


def stopping(doing: str = "stopping") -> Refused:
    """Return the refusal of work while the server is loading or stopping: 503."""
    what, code, head = f"the server is {doing}", f"server.{doing}", {"retry-after": "5"}
    return Refused(503, what, hint="try again later", code=code, headers=head)


def internal(*, code: str) -> Refused:
    """Return the refusal of a request that met a bug: 500."""
    what, hint = "the request met a bug in hyimg", "see the server's log"
    return Refused(500, what, hint=hint, code=code, headers=NO_RETRY)


def refusal_of(error: HyimgError | Mapping[str, Any], sent: Iterable[str] = ()) -> Refused:
    """Return an error, or the `error` of a result line, as a refusal.

    `sent`: the fields of the request; a field is named as the request does.
    """
    if isinstance(error, Refused):
        return error
    if isinstance(error, Mapping):
        param, head = "", {} if error.get("retryable") else NO_RETRY
        what, hint, code = error["message"], error.get("hint", ""), error["code"]
    else:
        if isinstance(error, ManifestError):
            error = error.faults[0]
        what, hint, code, head = error.what, error.hint, error.code, {}
        # The place of other errors may be a path on the server.
        param = error.where.partition(": ")[2] if code.startswith("manifest.") else ""
        same = (name for name in sent if name in BY_NAME and BY_NAME[name].name == param)
        param = next(same, param)
    status = 400 if code.startswith(_ASKED_WRONGLY) else 500
    if isinstance(error, MachineError):  # may succeed after a restart
        status = 503
    status = 507 if code == "storage.full" else status
    if code.startswith(_OF_THE_SERVER):  # the hint is for who runs the command
        hint = "try again later, or ask who runs the server"
    return Refused(status, what, param=param, hint=hint, code=code, headers=head)


def validated(model: type[Model], fields: Mapping[str, Any]) -> Model:
    """Return the fields of a body or a query as a model. Raises Refused."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        param = str(fault["loc"][0])[:80] if fault["loc"] else ""
        code = _CODES.get(fault["type"], "request.bad-value")
        is_file = not isinstance(fault["input"], str | int | float | list | dict | None)
        what = f"{param} is {'a file' if is_file else shown(fault['input'])}"
        hint = f"expected {required(fault['msg'])}"
        if fault["type"] == "is_instance_of":
            hint = "send it as a file of a form"
        elif fault["type"] in _CODES:
            is_lacking = fault["type"] == "missing"
            what, hint = f"{param} is missing" if is_lacking else f"{shown(param)} is not known", ""
        raise bad_request(param, what, code, hint) from None
