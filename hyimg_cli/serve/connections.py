"""The server's connections: how many there may be, and how long they may take.

A connection whose request has not arrived costs a file descriptor and needs no key. So the next
request's head must be whole within `HEAD_S`. Above the limit, a new connection takes the place of
the one that has waited longest without a request. Requests at work are limited in `app`.
"""

import asyncio
import errno
import json
import logging
import time
from contextlib import suppress
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from hyimg_cli.serve.errors import Refused, server_full, too_slow
from hyimg_cli.serve.metrics import Metrics

try:
    import resource
except ImportError:  # not a POSIX system
    resource = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)
# Seconds in which a request's head must arrive, from the connection or the last answer on.
HEAD_S = 10.0
# Seconds in which a client may send the rest of a body after its answer: it may not read before.
REST_S = 30.0
# Seconds in which a refused client can read its answer.
END_S = 1.0
MOST_REQUESTS = 512
_REMARK_S = 60.0


def most_requests() -> int:
    """Return the limit of requests at work: 512, or half of the files this process may open."""
    if resource is None:
        return MOST_REQUESTS
    return min(MOST_REQUESTS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


def raise_file_limit() -> None:
    """Raise the number of files that this process may open to the most that it may ask for."""
    if resource is not None:
        with suppress(ValueError, OSError):
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def hear_of_accept_errors(loop: asyncio.AbstractEventLoop) -> None:
    """Log that the process may open no more files at most once a minute, not at each connection."""
    heard_at = -_REMARK_S

    def hear(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal heard_at
        if getattr(context.get("exception"), "errno", None) not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif time.monotonic() >= heard_at + _REMARK_S:
            heard_at = time.monotonic()
            logger.error("cannot accept connections: %s", context["exception"])

    loop.set_exception_handler(hear)


class Connection(H11Protocol):
    """A connection of a server; `of` makes the class of one server's connections.

    `most`: how many there may be. `idle`: those without a request, oldest first. `ending`: those
    that were refused and have not closed yet.
    """

    most: ClassVar[int]
    metrics: ClassVar[Metrics]
    idle: ClassVar[dict["Connection", None]]
    ending: ClassVar[dict["Connection", None]]
    remarked_at: ClassVar[float] = -_REMARK_S
    _timer: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, most: int, metrics: Metrics) -> type["Connection"]:
        """Return the class of one server's connections."""
        return type(
            cls.__name__, (cls,), {"most": most, "metrics": metrics, "idle": {}, "ending": {}}
        )

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) - len(self.ending) > self.most:
            self._remark()
            # Without any idle one, all have a request: then this one cannot be served.
            next(iter(self.idle), self)._refuse(
                server_full("the server has too many connections", 5, status=503)
            )
        if self not in self.ending:
            self._watch()

    def data_received(self, data: bytes) -> None:
        if self not in self.ending:
            super().data_received(data)
            self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def _watch(self) -> None:
        """Start the time for a request's head, unless a request is at work or the time runs."""
        if self.transport.is_closing() or (self.cycle and not self.cycle.response_complete):
            self._forget()
        elif self._timer is None:
            self.idle[self] = None
            has_body = self.conn.their_state is h11.SEND_BODY
            self._timer = self.loop.call_later(REST_S if has_body else HEAD_S, self._end)

    def _forget(self) -> None:
        self.idle.pop(self, None)
        self.ending.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        """End a connection on which no request has arrived in time."""
        self._refuse(too_slow("the request", HEAD_S), is_said=self.has_begun)

    @property
    def has_begun(self) -> bool:
        """True if a part of a request's head has arrived."""
        return self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])

    def _refuse(self, refused: Refused, *, is_said: bool = True) -> None:
        """Answer with a refusal, if the client can take it as the answer to its request, and close.

        A connection that has been answered and is idle is closed without a word: the client may
        just have sent its next request, and take the refusal as the answer to an earlier one.
        """
        self._forget()
        is_new = self.cycle is None or self.has_begun
        if not (is_said and is_new and self.conn.our_state is h11.IDLE):
            self.transport.close()
            return
        self.metrics.answered("other", refused.status, is_retry=False)
        body = json.dumps(refused.body()).encode()
        head = {"content-type": "application/json", "content-length": str(len(body))}
        head |= {"connection": "close"} | refused.headers
        events: list[Any] = [  # h11 allows an answer to a request that has not arrived
            h11.Response(status_code=refused.status, headers=[*head.items()]),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ]
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        # Closing at once would drop the answer if a part of the request has not been read.
        self.transport.write_eof()
        self.ending[self] = None
        self._timer = self.loop.call_later(END_S, self.transport.close)
        if len(self.ending) > self.most // 8:
            oldest = next(iter(self.ending))
            oldest._forget()
            oldest.transport.abort()

    def _remark(self) -> None:
        """Log that there are too many connections, at most once a minute."""
        own = type(self)
        if time.monotonic() >= own.remarked_at + _REMARK_S:
            own.remarked_at = time.monotonic()
            logger.warning("more than %d connections: the oldest without a request end", self.most)
