"""The HTTP interface of a language model with a memory: OpenAI's protocol, learning and forgetting.

Answers are consistent with some order of the requests: one that begins after a document was learnt
or forgotten, and that acknowledged, sees the memory with or without it. Errors have OpenAI's form.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

import mbpa
from mbpa.language import MemoryLM, Score, SourceInfo, Token
from mbpa.serve import http, openai_answers, schemas
from mbpa.serve import language_schemas as messages
from mbpa.serve.language_service import (
    LanguageService,
    StorageError,
    UnknownSourceError,
    WritingTask,
    Written,
)
from mbpa.serve.middleware import Middleware
from mbpa.serve.model_thread import Ended, Job
from mbpa.serve.openai_answers import Answer, ChatAnswer, CompletionAnswer, Piece, TextPieces
from mbpa.serve.settings import LanguageSettings

COMPLETION_TOKENS = 16  # OpenAI's default
COUNTED_PATHS = {
    *("/v1/models", "/v1/completions", "/v1/chat/completions"),
    *("/learn", "/forget", "/sources", "/score"),
    *("/health", "/metrics", "/", "/docs", "/openapi.json", "/favicon.ico"),
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": messages.LanguageError, "description": what}
    for status, what in {
        400: "The request is not valid",
        401: "The token is missing or wrong",
        404: "There is no such model or document",
        408: "The body took too long to arrive",
        413: "The body or the document is too large",
        429: "Too many requests; Retry-After says when to try again",
        503: "The document could not be stored, or the service is stopping",
    }.items()
}
READ_ERRORS: dict[int | str, Any] = {status: ERRORS[status] for status in (401, 429)}
TYPES = {429: "requests", 500: "server_error", 503: "server_error"}
CODES = {
    401: "invalid_api_key",
    404: "unknown_url",
    413: "request_too_large",
    429: "rate_limit_exceeded",
}
PAGE_PATH = "/page"
PAGE_POLICY = "default-src 'self'; frame-ancestors 'none'"  # browsers load nothing from other hosts
log = logging.getLogger("mbpa.serve")


class ApiError(Exception):
    """A request that is refused."""

    def __init__(
        self, status: int, why: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(why)
        self.status, self.param, self.code = status, param, code


def create_language_app(lm: MemoryLM, settings: LanguageSettings | None = None) -> FastAPI:
    """Return the app. Pages mounted on it find the service at `app.state.service`.

    Args:
        lm: the model and its memory, which nobody else may change while the app runs.
        settings: the token and limits.
    """
    settings = settings or LanguageSettings()
    service = LanguageService(lm, settings)

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
    app.state.home = PAGE_PATH
    app.add_middleware(
        Middleware,
        settings=settings,
        metrics=service.metrics,
        paths=COUNTED_PATHS,
        format_error=format_error,
    )
    _add_error_handlers(app, service)
    _add_openai_routes(app, service)
    _add_memory_routes(app, service)
    http.add_pages(app, service.metrics, READ_ERRORS)
    _add_page(app)
    return app


def _add_page(app: FastAPI) -> None:
    """Add the page on which one tries the model, from files of the package."""
    folder = files("mbpa.serve") / "language_page"
    headers = {"Content-Security-Policy": PAGE_POLICY, "Cache-Control": "no-cache"}

    def add(path: str, name: str, kind: str) -> None:
        content = (folder / name).read_bytes()

        @app.get(path, include_in_schema=False)
        async def show() -> Response:
            return Response(content, media_type=kind, headers=headers)

    add(PAGE_PATH, "index.html", "text/html")
    add(f"{PAGE_PATH}/page.css", "page.css", "text/css")
    add(f"{PAGE_PATH}/page.js", "page.js", "text/javascript")


# OpenAI's protocol


def _add_openai_routes(app: FastAPI, service: LanguageService) -> None:
    def describe_model() -> dict[str, Any]:
        return {"id": service.name, "object": "model", "created": 0, "owned_by": "mbpa"}

    @app.get("/v1/models", responses=READ_ERRORS)
    async def models() -> Response:
        """List the models: the one of this run. As OpenAI's."""
        return JSONResponse({"object": "list", "data": [describe_model()]})

    @app.get("/v1/models/{id:path}", responses={**READ_ERRORS, 404: ERRORS[404]})
    async def model(id: str) -> Response:
        """Describe a model. As OpenAI's."""
        _require_model(service, id)
        return JSONResponse(describe_model())

    @app.post("/v1/completions", responses=ERRORS)
    async def completions(query: messages.CompletionRequest, request: Request) -> Response:
        """Continue texts. As OpenAI's, and with `mbpa` where each token came from."""
        _require_model(service, query.model)
        prompts = query.prompt
        if isinstance(prompts[0], str):
            _check_length(service, prompts, "prompt")
            prompts = await service.encode(prompts)
        limit = COMPLETION_TOKENS if query.max_tokens is None else query.max_tokens
        _check_prompts(service, prompts, limit, "prompt")
        texts = [
            given if isinstance(given, str) else service.decode(given)
            for given in (query.prompt if query.echo else [])
        ]
        answer = CompletionAnswer(
            service.name, service.fingerprint, query.logprobs, query.mbpa is not None
        )
        writing = _Writing(service, query, answer, prompts, limit, texts)
        return await writing.respond(request)

    @app.post("/v1/chat/completions", responses=ERRORS)
    async def chat(query: messages.ChatRequest, request: Request) -> Response:
        """Answer a conversation. As OpenAI's, and with `mbpa` where each token came from."""
        _require_model(service, query.model)
        text = await asyncio.to_thread(_render_chat, service, query.messages)
        _check_length(service, [text], "messages")
        prompts = await service.encode([text], add_special_tokens=False)
        limit = query.max_completion_tokens or query.max_tokens
        if limit is None:
            room = service.lm.longest_text - len(prompts[0])
            limit = max(1, min(service.settings.chat_tokens, room))
        _check_prompts(service, prompts, limit, "messages")
        top = (query.top_logprobs or 0) if query.logprobs else None
        answer = ChatAnswer(service.name, service.fingerprint, top, query.mbpa is not None)
        return await _Writing(service, query, answer, prompts, limit).respond(request)


def _require_model(service: LanguageService, name: str) -> None:
    if name != service.name:
        raise ApiError(
            404,
            f"The model {name!r} does not exist: this service has {service.name!r}",
            param="model",
            code="model_not_found",
        )


def _check_length(service: LanguageService, texts: list[str], param: str) -> None:
    """Refuse a text that is certainly too long, since finding its tokens would take a while."""
    longest = max(map(len, texts))
    if longest > service.max_prompt_characters:
        raise ApiError(
            400,
            f"This model's maximum context length is {service.lm.longest_text} tokens, too few "
            f"for {longest} characters in the {param}",
            param=param,
            code="context_length_exceeded",
        )


def _check_prompts(
    service: LanguageService, prompts: list[list[int]], max_tokens: int, param: str
) -> None:
    longest, vocabulary = service.lm.longest_text, service.lm.output_layer.out_features
    for ids in prompts:
        if not ids:
            raise ApiError(400, "a prompt must have at least one token", param=param)
        if len(ids) + max_tokens > longest:
            raise ApiError(
                400,
                f"This model's maximum context length is {longest} tokens, but you requested "
                f"{len(ids) + max_tokens} ({len(ids)} in the {param}, {max_tokens} to write)",
                param=param,
                code="context_length_exceeded",
            )
        if not 0 <= min(ids) <= max(ids) < vocabulary:
            raise ApiError(400, f"token ids must be from 0 to {vocabulary - 1}", param=param)


def _render_chat(service: LanguageService, conversation: list[messages.Message]) -> str:
    """Return the conversation as the model was trained to see it."""
    from jinja2 import TemplateError

    tokenizer = service.lm.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise ApiError(
            400,
            f"{service.name} has no chat template, so it was not trained to chat: use "
            "/v1/completions",
            param="model",
        )
    roles = {"developer": "system"}
    turns = [
        {"role": roles.get(each.role, each.role), "content": each.content} for each in conversation
    ]
    try:
        text: str = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ApiError(
            400, f"the model's chat template refused: {error}", param="messages"
        ) from error
    return text


class _Writing:
    """One request to write, and its answer: whole, or as a stream.

    Args:
        prompts: token ids of each prompt.
        max_tokens: the most tokens to write per choice.
        echoed: texts of the prompts, if they come first in the answer.
    """

    def __init__(
        self,
        service: LanguageService,
        query: messages.WritingRequest,
        answer: Answer,
        prompts: list[list[int]],
        max_tokens: int,
        echoed: list[str] | None = None,
    ) -> None:
        copies = query.n or 1
        self._service, self._query, self._answer = service, query, answer
        self._prompts = prompts
        self._echoed = [text for text in echoed or [] for _ in range(copies)]
        self._task = WritingTask(
            prompts=[ids for ids in prompts for _ in range(copies)],
            max_new_tokens=max_tokens,
            temperature=1.0 if query.temperature is None else query.temperature,
            top_p=1.0 if query.top_p is None else query.top_p,
            stop=query.stop,
            seed=query.seed,
            origins=0 if query.mbpa is None else query.mbpa.origins,
            top=answer.top or 0,
            scores_prompts=bool(self._echoed) and answer.top is not None,
        )

    async def respond(self, request: Request) -> Response:
        if not self._query.stream:
            job = self._service.write(self._task)
            body = await http.cancel_if_disconnected(request, self._answer_whole(job))
            return Response(body, media_type="application/json")
        events: asyncio.Queue[tuple[int, Token] | None] = asyncio.Queue()
        job = self._service.write(self._task, lambda *event: events.put_nowait(event))
        job.answered.add_done_callback(lambda _: events.put_nowait(None))
        return _EventStream(self._stream(job, events), lambda: self._service.end(job))

    async def _answer_whole(self, job: Job[Written]) -> bytes:
        written = await self._service.finish(job)
        return await asyncio.to_thread(self._format_whole, written)

    def _format_whole(self, written: Written) -> bytes:
        choices = []
        for index, each in enumerate(written.generations):
            start = self._start(index, written)
            piece = openai_answers.cut_at_stop(each, self._task.stop, len(start.text))
            whole = Piece(start.text + piece.text, start.tokens + piece.tokens)
            choices.append(self._answer.make_choice(index, whole, each.finish_reason))
        usage = openai_answers.count_usage(self._prompts, written.generations)
        return self._answer.make_whole(choices, usage)

    def _start(self, index: int, written: Written) -> Piece:
        """Return the prompt, if it comes first in the answer."""
        text = self._echoed[index] if self._echoed else ""
        return Piece(text, written.prompts[index] if written.prompts else [])

    async def _stream(
        self, job: Job[Written], events: asyncio.Queue[tuple[int, Token] | None]
    ) -> AsyncIterator[bytes]:
        wants_usage = self._query.wants_usage_chunk
        texts = [
            TextPieces(self._task.stop, len(self._echoed[index]) if self._echoed else 0)
            for index in range(len(self._task.prompts))
        ]

        def send(*choices: dict[str, Any]) -> bytes:
            return self._answer.make_event(list(choices), None, wants_usage)

        for choice in self._answer.start_stream(len(texts)):
            yield send(choice)
        for index, text in enumerate(self._echoed):
            yield send(self._answer.make_delta(index, Piece(text), None))
        while (event := await events.get()) is not None:
            index, token = event
            piece = texts[index].add(token)
            if piece.text or piece.tokens:
                yield send(self._answer.make_delta(index, piece, None))
        try:
            written = job.answered.result()
        except Exception as error:
            yield openai_answers.make_event(_describe_failure(error))
            return
        for index, each in enumerate(written.generations):
            piece = texts[index].finish(each)
            yield send(self._answer.make_delta(index, piece, each.finish_reason))
        if wants_usage:
            usage = openai_answers.count_usage(self._prompts, written.generations)
            yield self._answer.make_event([], usage, True)
        yield openai_answers.END_OF_STREAM


class _EventStream(StreamingResponse):
    """Server-sent events; `on_end` is called when all are sent or the client is gone."""

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


# Learning, forgetting, scoring


def _add_memory_routes(app: FastAPI, service: LanguageService) -> None:
    @app.post("/learn", responses=ERRORS, response_model=messages.LearnAnswer)
    async def learn(query: messages.LearnDocument, request: Request) -> Response:
        """Read a document into the memory. When the answer arrives, it is on disk and in use."""
        most = service.settings.document_characters
        if len(query.text) > most:
            raise ApiError(
                413,
                f"a document must have at most {most} characters, got {len(query.text)}: "
                "split it, or stop the service and use `mbpa lm read`",
                param="text",
            )
        try:
            learning = service.learn(query.text, query.source)
            info = await http.cancel_if_disconnected(request, learning)
        except ValueError as error:
            raise ApiError(400, str(error), param="text") from error
        made = messages.LearnAnswer(source=_describe_source(info), entries=service.entries)
        return http.serialize(made)

    @app.post("/forget", responses=ERRORS, response_model=messages.ForgetAnswer)
    async def forget(query: messages.ForgetDocument) -> Response:
        """Forget a document: all later answers are as if it had never been read."""
        await service.forget(query.source)
        return http.serialize(messages.ForgetAnswer(source=query.source, entries=service.entries))

    @app.get("/sources", responses=READ_ERRORS, response_model=messages.SourcesAnswer)
    async def sources() -> Response:
        """List the documents in the memory, in the order in which they were read."""
        return http.serialize(
            messages.SourcesAnswer(
                sources=[_describe_source(each) for each in service.sources],
                entries=service.entries,
                capacity=service.lm.memory.capacity,
            )
        )

    @app.post("/score", responses=ERRORS, response_model=messages.ScoreAnswer)
    async def score(query: messages.ScoreText, request: Request) -> Response:
        """Return the log-probability of each token of a text, with and without the memory."""
        _check_length(service, [query.text], "text")
        (ids,) = await service.encode([query.text])
        if not 2 <= len(ids) <= service.settings.scored_tokens:
            most = service.settings.scored_tokens
            why = f"a text must have from 2 to {most} tokens, got {len(ids)}"
            raise ApiError(400, why, param="text")
        scoring = service.score(ids, query.origins)
        found = await http.cancel_if_disconnected(request, scoring)
        body = await asyncio.to_thread(_format_score, service.decode(ids[:1]), found)
        return Response(body, media_type="application/json")

    @app.get("/health", response_model=schemas.Health)
    async def health() -> Response:
        """Report whether the service responds and can store documents. Requires no token."""
        reason = service.write_error
        status = "ok" if reason is None else "read-only"
        return http.serialize(schemas.Health(status=status, reason=reason))


def _describe_source(info: SourceInfo) -> messages.SourceAnswer:
    return messages.SourceAnswer(**asdict(info))


def _format_score(first: str, score: Score) -> bytes:
    figures = {
        name: getattr(score, name)
        for name in ("perplexity", "perplexity_alone", "bits_per_byte", "bits_per_byte_alone")
    }
    tokens = [openai_answers.describe_token(token) for token in score.tokens]
    return json.dumps({"first": first, "tokens": tokens, **figures}, allow_nan=False).encode()


# Errors


def format_error(
    status: int, why: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    return {
        "error": {
            "message": http.escape_surrogates(why),
            "type": TYPES.get(status, "invalid_request_error"),
            "param": None if param is None else http.escape_surrogates(param),
            "code": code or CODES.get(status),
        }
    }


def _make_error(status: int, why: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(format_error(status, why), status, headers)


def _describe_failure(error: Exception) -> dict[str, Any]:
    """Return the error that ends a stream."""
    if isinstance(error, Ended):
        return format_error(503, str(error))
    log.error("a request failed", exc_info=error)
    return format_error(500, "internal error: see the server's log")


def _add_error_handlers(app: FastAPI, service: LanguageService) -> None:
    http.add_error_handlers(app, service.metrics, _make_error)

    @app.exception_handler(RequestValidationError)
    async def report_invalid_body(_: Request, error: RequestValidationError) -> Response:
        where, why = http.describe_invalid_body(error)[1:]
        text = f"{where}: {why}" if where else why
        return JSONResponse(format_error(400, text, where or None), 400)

    @app.exception_handler(ApiError)
    async def report_refusal(_: Request, error: ApiError) -> Response:
        content = format_error(error.status, str(error), error.param, error.code)
        return JSONResponse(content, error.status)

    @app.exception_handler(UnknownSourceError)
    async def report_unknown_source(_: Request, error: UnknownSourceError) -> Response:
        return JSONResponse(format_error(404, str(error), "source", "source_not_found"), 404)

    @app.exception_handler(StorageError)
    async def report_storage_error(_: Request, error: StorageError) -> Response:
        return JSONResponse(format_error(503, str(error), code="storage_failed"), 503)

    @app.exception_handler(Ended)
    async def report_end(_: Request, error: Ended) -> Response:
        return _make_error(503, str(error), {"Retry-After": "1"})
