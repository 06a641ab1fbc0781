"""Refusals of requests, and every error as the body of a response."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from hyimg_cli.errors import HyimgError, MachineError, ManifestError

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
# Codes of jobs that failed because of what their request said.
_ASKED_WRONGLY = ("manifest.", "source.", "usage", "output-image.")
_CODES = {"missing": "request.missing-field", "extra_forbidden": "request.unknown-field"}
Model = TypeVar("Model", bound=BaseModel)
# Tells the official client not to send the request again.
NO_RETRY = {"x-should-retry": "false"}


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
        # Pictures of the request that were drawn all the same.
        self.data: list[dict[str, Any]] = []

    @property
    def message(self) -> str:
        return f"{self.what} ({self.hint})" if self.hint else self.what

    def body(self) -> dict[str, Any]:
        """The body of the response, in the shape that OpenAI's clients read."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        shown = {"message": self.message, "type": _TYPES.get(self.status, kind)}
        error = shown | {"param": self.param or None, "code": self.code}
        return {"error": error} | ({"data": self.data} if self.data else {})


def bad_request(param: str, what: str, code: str = "request.bad-value", hint: str = "") -> Refused:
    """The refusal, 400, of a field, or of a part of a query."""
    return Refused(400, what, param=param, hint=hint, code=code)


def too_large(what: str, most: int) -> Refused:
    """The refusal, 413, of a body, or of a part of one, that has more than `most` bytes."""
    return Refused(413, f"{what} has more than {most:,} bytes", code="request.too-large")


def server_full(what: str, wait_s: int) -> Refused:
    """The refusal, 429, of a request that may be sent again after a while."""
    head = {"retry-after": str(wait_s)}
    return Refused(429, what, hint="try again later", code="server.full", headers=head)


def stopping(doing: str = "stopping") -> Refused:
    """The refusal, 503, of work by a server that is stopping, or still loading."""
    what, code, head = f"the server is {doing}", f"server.{doing}", {"retry-after": "5"}
    return Refused(503, what, hint="try again later", code=code, headers=head)


def internal(*, code: str) -> Refused:
    """The refusal, 500, of a request that met a bug."""
    what, hint = "a mistake of hyimg's own", "the server's log has more"
    return Refused(500, what, hint=hint, code=code, headers=NO_RETRY)


def refusal_of(error: HyimgError | Mapping[str, Any]) -> Refused:
    """An error of a manifest or a job, or the `error` of a result line, as a refusal."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, Mapping):
        param, head = "", {} if error.get("retryable") else NO_RETRY
        what, hint, code = error["message"], error.get("hint", ""), error["code"]
    else:
        if isinstance(error, ManifestError):
            error = error.faults[0]
        what, hint, code, head = error.what, error.hint, error.code, {}
        # Other errors name paths of the server there.
        param = error.where.partition(": ")[2] if code.startswith("manifest.") else ""
    status = 400 if code.startswith(_ASKED_WRONGLY) else 500
    if isinstance(error, MachineError):  # the next start of the server may be luckier
        status = 503
    status = 507 if code == "storage.full" else status
    return Refused(status, what, param=param, hint=hint, code=code, headers=head)


def validated(model: type[Model], fields: Mapping[str, Any]) -> Model:
    """The fields of a body or a query, as a model declares them. Raises Refused."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        param = str(fault["loc"][0])[:80] if fault["loc"] else ""
        code = _CODES.get(fault["type"], "request.bad-value")
        raise bad_request(param, f"{param}: {fault['msg']}", code) from None
