"""The routes of files and batches. `request.state.caller` is the name of the request's key."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from hyimg_cli.files import refuse_links
from hyimg_cli.serve.batches import Batch, Batches, BatchRequest
from hyimg_cli.serve.bodies import Bodies
from hyimg_cli.serve.errors import Refused, validated
from hyimg_cli.serve.results import RUN
from hyimg_cli.serve.uploads import FileForm, Page, Uploads, shown

# The files of a run's page.
_PAGE = ("report.html", "report", "outputs")
_NOSNIFF = {"x-content-type-options": "nosniff"}
_BYTES = "application/octet-stream"


class FilePage(Page):
    """The part of the list of files to return."""

    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000
    purpose: str = ""


def routes_of_files(uploads: Uploads, bodies: Bodies) -> list[Route]:
    """Return the routes of files."""

    async def create(request: Request) -> Response:
        form = validated(FileForm, await bodies.form(request, most_files=1))
        keep_s = form.expires_after.seconds if form.expires_after else None
        asked = request.state.caller, form.purpose, form.file, keep_s
        return JSONResponse(shown(await run_in_threadpool(uploads.add, *asked)))

    def listing(request: Request) -> Response:
        page, every = validated(FilePage, request.query_params), uploads.every(request.state.caller)
        wanted = (one for one in every if page.purpose in ("", one["purpose"]))
        return JSONResponse(page.of(map(shown, wanted)))

    def found(request: Request) -> dict[str, Any]:
        return uploads.find(request.path_params["file_id"], request.state.caller)

    def retrieve(request: Request) -> Response:
        return JSONResponse(shown(found(request)))

    def content(request: Request) -> Response:
        record = found(request)
        if "sha256" in record:
            return FileResponse(uploads.path_of(record), media_type=_BYTES, headers=_NOSNIFF)
        return StreamingResponse(uploads.made(record), media_type=_BYTES, headers=_NOSNIFF)

    def delete(request: Request) -> Response:
        record = found(request)
        uploads.delete(record)
        return JSONResponse({"id": record["id"], "object": "file", "deleted": True})

    one = "/v1/files/{file_id}"
    return [
        Route("/v1/files", create, methods=["POST"]),
        Route("/v1/files", listing, methods=["GET"]),
        Route(f"{one}/content", content, methods=["GET"]),
        Route(one, retrieve, methods=["GET"]),
        Route(one, delete, methods=["DELETE"]),
    ]


def routes_of_batches(batches: Batches, bodies: Bodies) -> list[Route]:
    """Return the routes of batches and of their runs' pages."""

    async def create(request: Request) -> Response:
        async with bodies.json(request) as body:
            asked = validated(BatchRequest, body)
        key, base = request.headers.get("idempotency-key", ""), str(request.base_url).rstrip("/")
        made = await run_in_threadpool(batches.create, request.state.caller, asked, key, base)
        return JSONResponse(made)

    def found(request: Request) -> Batch:
        return batches.find(request.path_params["batch_id"], request.state.caller)

    def listing(request: Request) -> Response:
        page, every = validated(Page, request.query_params), batches.every(request.state.caller)
        return JSONResponse(page.of(one.shown() for one in every))

    def retrieve(request: Request) -> Response:
        return JSONResponse(found(request).shown())

    def cancel(request: Request) -> Response:
        return JSONResponse(batches.cancel(found(request)))

    def page(request: Request) -> Response:
        run = found(request).folder / RUN
        path = Path(request.path_params["path"] or "report.html")
        place = run / path
        with suppress(OSError, ValueError):  # a link, or an invalid name
            refuse_links(place, run)
            is_shown = {*path.parts[:1]} <= {*_PAGE} and ".." not in path.parts
            if is_shown and place.is_file():
                return FileResponse(place, headers=_NOSNIFF | {"cache-control": "no-cache"})
        raise Refused(404, "the batch does not have this page, or not yet", code="batch.no-page")

    def slash(request: Request) -> Response:
        # Relative, because a proxy may have another host and path.
        return Response(status_code=308, headers={"location": f"{found(request).id}/"})

    one = "/v1/batches/{batch_id}"
    return [
        Route("/v1/batches", create, methods=["POST"]),
        Route("/v1/batches", listing, methods=["GET"]),
        Route(one, retrieve, methods=["GET"]),
        Route(f"{one}/cancel", cancel, methods=["POST"]),
        Route("/batches/{batch_id}", slash, methods=["GET"]),
        Route("/batches/{batch_id}/{path:path}", page, methods=["GET"]),
    ]
