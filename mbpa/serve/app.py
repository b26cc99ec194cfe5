"""The HTTP interface of a classifier: predict, learn, explain, forget, and monitor.

The answers are consistent with some order of the requests: a prediction sees all of a lesson or
none of it, and every prediction requested after a lesson is acknowledged sees that lesson. Invalid
input changes nothing; the response is a JSON object with a one-line error message.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

import mbpa
from mbpa.encoders import pictures
from mbpa.errors import RunError
from mbpa.serve import docs_page, http, schemas
from mbpa.serve.answers import Answer, Reason
from mbpa.serve.batching import ResultT
from mbpa.serve.classifier import Classifier
from mbpa.serve.follower import PositionGate
from mbpa.serve.journal import InputError, JournalError
from mbpa.serve.journal_errors import UnavailableError
from mbpa.serve.middleware import TOKEN_NAME, Middleware
from mbpa.serve.model_work import BYTES_PER_TOKEN
from mbpa.serve.schemas import Error
from mbpa.serve.service import Service
from mbpa.serve.settings import Settings

REQUEST_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": Error, "description": "The body is not JSON"},
    401: {"model": Error, "description": "The token is missing or wrong"},
    408: {"model": Error, "description": "The body took too long to arrive"},
    413: {"model": Error, "description": "The body is too large"},
    422: {"model": Error, "description": "Unprocessable request"},
    429: {"model": Error, "description": "Too many requests; Retry-After says when to try again"},
}
WRITE_ERRORS: dict[int | str, dict[str, Any]] = {
    **REQUEST_ERRORS,
    503: {"model": Error, "description": "The journal can no longer be written"},
}
COUNTED_PATHS = {
    *("/predict", "/learn", "/explain", "/forget"),
    *(
        "/examples",
        "/audit",
        "/labels",
        "/labels/rename",
        "/labels/merge",
        "/backup",
        "/retrain",
        "/stats",
        "/health",
        "/metrics",
        "/",
        "/docs",
        "/openapi.json",
        "/favicon.ico",
    ),
}


def create_app(classifier: Classifier, settings: Settings | None = None) -> FastAPI:
    """Return the app. Pages mounted on it find the classifier at `app.state.service.classifier`."""
    settings = settings or Settings()
    service = Service(classifier, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop()

    app = FastAPI(
        title="mbpa",
        version=mbpa.__version__,
        description=__doc__,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own pages load scripts from other hosts
        redoc_url=None,
    )
    app.state.service = service
    app.state.home = "/docs"
    app.add_middleware(
        Middleware,
        settings=settings,
        metrics=service.metrics,
        paths=COUNTED_PATHS,
        estimate_wait_s=lambda length: service.model.estimate_wait_s(length / BYTES_PER_TOKEN),
        positions=None if classifier.replica is None else PositionGate(classifier),
    )
    _add_error_handlers(app, service)
    _add_prediction_routes(app, service)
    _add_teaching_routes(app, service)
    _add_label_routes(app, service)
    _add_status_routes(app, service)
    _add_listing_routes(app, service)
    _add_backup_route(app, service)
    _add_retrain_route(app, service)
    if classifier.takes == "images":
        _add_picture_route(app, classifier)
    docs_page.describe_inputs(app.openapi(), classifier.takes)
    return app


def _add_prediction_routes(app: FastAPI, service: Service) -> None:
    @app.post("/predict", responses=REQUEST_ERRORS, response_model=schemas.Predictions)
    async def predict(query: schemas.Query, request: Request) -> Response:
        """Predict labels; `null` where the confidence is below the threshold."""
        answers = await _cancel_if_disconnected(request, query.size, service.ask(query))
        made = [schemas.make_prediction(each) for each in answers if isinstance(each, Answer)]
        return http.serialize(schemas.Predictions.model_construct(answers=made))

    @app.post("/explain", responses=REQUEST_ERRORS, response_model=schemas.Explanations)
    async def explain(query: schemas.ExplainQuery, request: Request) -> Response:
        """Predict labels and return the examples that each answer is based on."""
        asking = service.ask(query, wants_reasons=True)
        reasons = await _cancel_if_disconnected(request, query.size, asking)
        made = [schemas.make_explanation(each) for each in reasons if isinstance(each, Reason)]
        return http.serialize(schemas.Explanations.model_construct(reasons=made))


def _add_teaching_routes(app: FastAPI, service: Service) -> None:
    @app.post("/learn", responses=WRITE_ERRORS, response_model=schemas.LearnResult)
    async def learn(lessons: schemas.LearnRequest, request: Request) -> Response:
        """Add examples. When the response arrives they are on disk and used by every prediction."""
        ids, labels = await _cancel_if_disconnected(
            request, len(lessons.examples), service.learn(lessons, by=_get_token_name(request))
        )
        return http.serialize(schemas.LearnResult.model_construct(ids=ids, labels=labels))

    @app.post("/forget", responses=WRITE_ERRORS, response_model=schemas.ForgetResult)
    async def forget(query: schemas.ForgetRequest, request: Request) -> Response:
        """Delete examples from the memory and from the files on disk."""
        ids = await service.forget(query, by=_get_token_name(request))
        return http.serialize(schemas.ForgetResult.model_construct(ids=ids))


def _add_label_routes(app: FastAPI, service: Service) -> None:
    @app.post("/labels/rename", responses=WRITE_ERRORS, response_model=schemas.RelabelResult)
    async def rename(query: schemas.RenameRequest, request: Request) -> Response:
        """Rename a label. From then on it is as if it had been taught with the new name."""
        count = await service.rename(query, by=_get_token_name(request))
        return http.serialize(schemas.RelabelResult(examples=count))

    @app.post("/labels/merge", responses=WRITE_ERRORS, response_model=schemas.RelabelResult)
    async def merge(query: schemas.MergeRequest, request: Request) -> Response:
        """Merge a label into another, as if its examples had been taught with that one."""
        count = await service.merge(query, by=_get_token_name(request))
        return http.serialize(schemas.RelabelResult(examples=count))


def _add_status_routes(app: FastAPI, service: Service) -> None:
    classifier = service.classifier
    refused: dict[int | str, Any] = {status: REQUEST_ERRORS[status] for status in (401, 429)}

    @app.get("/labels", responses=refused, response_model=schemas.Labels)
    async def labels() -> Response:
        """List all labels in the order of the head's outputs."""
        counts = classifier.counts
        trained = frozenset(counts.trained_labels)
        made = [
            schemas.LabelCount(label=label, examples=count, trained=label in trained)
            for label, count in counts.labels.items()
        ]
        return http.serialize(schemas.Labels.model_construct(labels=made))

    is_replica = classifier.replica is not None

    def describe_replica() -> dict[str, Any]:
        status = classifier.replica
        return {} if status is None else {"replica": schemas.Replica(**vars(status))}

    stats_schema = schemas.ReplicaStats if is_replica else schemas.Stats

    @app.get("/stats", responses=refused, response_model=stats_schema)
    async def stats() -> Response:
        """Return counts of examples and labels, and the state of the service."""
        counts = {**classifier.stats(), "waiting": service.model.waiting}
        return http.serialize(stats_schema(**counts, **describe_replica()))

    health_schema = schemas.ReplicaHealth if is_replica else schemas.Health

    @app.get("/health", response_model=health_schema)
    async def health() -> Response:
        """Report whether the service responds and can still learn. Requires no token."""
        reason = classifier.journal.read_only
        status = "ok" if reason is None else "read-only"
        return http.serialize(health_schema(status=status, reason=reason, **describe_replica()))

    http.add_pages(app, service.metrics, refused)


def _add_listing_routes(app: FastAPI, service: Service) -> None:
    described: dict[int | str, Any] = {
        503: {"model": Error, "description": "The journal cannot be read"},
        **{status: REQUEST_ERRORS[status] for status in (401, 422, 429)},
    }

    @app.get("/examples", responses=described, response_model=schemas.Examples)
    async def examples(query: Annotated[schemas.ExamplesQuery, Query()]) -> Response:
        """List the examples of the memory, a page at a time.

        Examples that are present from the first page to the last are listed exactly once, whatever
        is taught or forgotten meanwhile.
        """
        found = await service.list_examples(query)
        made = [schemas.make_stored_example(each) for each in found[: query.limit]]
        cursor = made[-1].id if len(found) > query.limit else None
        return http.serialize(schemas.Examples.model_construct(examples=made, cursor=cursor))

    @app.get("/audit", responses=described, response_model=schemas.Audit)
    async def audit(query: Annotated[schemas.AuditQuery, Query()]) -> Response:
        """List the changes of the memory, newest first, with the token that was used for each."""
        found = await asyncio.to_thread(
            service.classifier.journal.audit, limit=query.limit + 1, before=query.cursor
        )
        made = [schemas.make_audited_change(each) for each in found[: query.limit]]
        cursor = made[-1].change if len(found) > query.limit else None
        return http.serialize(schemas.Audit.model_construct(changes=made, cursor=cursor))


def _add_backup_route(app: FastAPI, service: Service) -> None:
    described: dict[int | str, Any] = {
        200: {"content": {"application/x-tar": {}}},
        503: {"model": Error, "description": "The journal cannot be read or copied"},
        **{status: REQUEST_ERRORS[status] for status in (401, 429)},
    }

    @app.get("/backup", responses=described, response_class=Response)
    async def backup() -> Response:
        """Return an archive of the run, from which `mbpa restore` makes a run.

        It holds every lesson that was acknowledged before the request, and no part of a call.
        Writes wait until the journal is copied; predictions do not.
        """
        archive = await service.make_backup()
        headers = {"Content-Length": str(archive.size), "Cache-Control": "no-store"}
        return StreamingResponse(iter(archive), media_type="application/x-tar", headers=headers)


def _add_retrain_route(app: FastAPI, service: Service) -> None:
    @app.post("/retrain", responses=WRITE_ERRORS, response_model=schemas.RetrainResult)
    async def retrain() -> Response:
        """Train the head again, with everything that the run holds; this takes minutes.

        The service answers and learns meanwhile, from the present head. When the response arrives,
        all answers come from the new one.
        """
        info = await service.retrain()
        summary = info.summary or {}
        return http.serialize(
            schemas.RetrainResult(
                examples=summary["examples"],
                labels=len(info.labels),
                accuracy=summary.get("accuracy"),
                threshold=info.threshold,
            )
        )


def _add_picture_route(app: FastAPI, classifier: Classifier) -> None:
    described: dict[int | str, Any] = {
        200: {"content": {"image/png": {}, "image/jpeg": {}}},
        404: {"model": Error, "description": "There is no such example"},
        503: {"model": Error, "description": "The journal cannot be read"},
        **{status: REQUEST_ERRORS[status] for status in (401, 422, 429)},
    }

    @app.get("/examples/{id}/image", responses=described, response_class=Response)
    async def picture(id: Annotated[int, Path(ge=1, le=2**62)]) -> Response:
        """Return the picture of an example as it is stored."""
        found = await asyncio.to_thread(classifier.image, id)
        if found is None:
            raise HTTPException(404, f"there is no example {id}")
        headers = {"Cache-Control": "no-store"}  # no cache must keep a forgotten picture
        return Response(found, media_type=pictures.get_media_type(found), headers=headers)


def _add_error_handlers(app: FastAPI, service: Service) -> None:
    http.add_error_handlers(app, service.metrics, _make_error)

    @app.exception_handler(RequestValidationError)
    async def report_invalid_body(_: Request, error: RequestValidationError) -> Response:
        status, where, why = http.describe_invalid_body(error)
        return _make_error(status, f"{where}: {why}" if where else why)

    @app.exception_handler(InputError)
    async def report_invalid_input(_: Request, error: InputError) -> Response:
        return _make_error(422, str(error))

    @app.exception_handler(RunError)
    async def report_run_error(_: Request, error: RunError) -> Response:
        return _make_error(422, str(error))

    @app.exception_handler(UnavailableError)
    async def report_unavailable(_: Request, error: UnavailableError) -> Response:
        return _make_error(503, str(error), {"Retry-After": "1"})

    @app.exception_handler(JournalError)
    async def report_journal_error(_: Request, error: JournalError) -> Response:
        return _make_error(503, str(error))


async def _cancel_if_disconnected(
    request: Request, size: int, work: Coroutine[Any, Any, ResultT]
) -> ResultT:
    """Await the work for a request, and cancel it if the client disconnects.

    A request of one item is not watched: it finishes before a disconnect could be noticed.
    """
    return await (work if size == 1 else http.cancel_if_disconnected(request, work))


def _get_token_name(request: Request) -> str | None:
    """Return the name of the token that a request was sent with."""
    name: str | None = request.scope.get(TOKEN_NAME)
    return name


def _make_error(status: int, why: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"error": http.escape_surrogates(why)}, status, headers)
