"""Requests to the service of a language run, and its answers where they are not OpenAI's."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from mbpa.serve.schemas import UNKNOWN_FIELD, ApiModel

MAX_CHOICES = 128  # as OpenAI
MAX_STOPS, MAX_STOP_CHARACTERS = 4, 500
MAX_ORIGINS = 16
MAX_TOP = 20
MAX_PROMPT_IDS = 1_000_000
MAX_SOURCE_CHARACTERS = 1000
MAX_TOKENS = 1_000_000
_TEXT = {"type": "string"}
_ID = {"type": "integer", "minimum": 0}


def check_text(text: str) -> str:
    """Raise `ValueError` for a text that cannot be encoded: JSON may hold lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"must not contain lone surrogates, got {text[error.start]!a}") from None
    return text


def _check_source(name: Any) -> Any:
    if isinstance(name, str):
        check_text(name)
        if not name.strip():
            raise ValueError("must not be empty")
        for character in name:
            if ord(character) < 32 or 127 <= ord(character) < 160:
                raise ValueError(f"must not contain control characters, got {character!a}")
    return name


def _check_string(text: Any) -> Any:
    return check_text(text) if isinstance(text, str) else text


def _read_prompts(given: Any) -> list[str] | list[list[int]]:
    """Return the prompts of a request as a list."""
    prompts = given
    if isinstance(given, str) or (isinstance(given, list) and given and _is_id(given[0])):
        prompts = [given]
    if not isinstance(prompts, list) or not prompts:
        raise ValueError("must be a text, a list of texts, a list of token ids, or lists of these")
    if len(prompts) > MAX_CHOICES:
        raise ValueError(f"must have at most {MAX_CHOICES} prompts, got {len(prompts)}")
    if all(isinstance(each, str) for each in prompts):
        return [check_text(each) for each in prompts]
    for each in prompts:
        if not isinstance(each, list) or not all(map(_is_id, each[:MAX_PROMPT_IDS])):
            raise ValueError("must be all texts, or all lists of token ids")
        if len(each) > MAX_PROMPT_IDS:
            raise ValueError(f"must have at most {MAX_PROMPT_IDS} token ids, got {len(each)}")
    return prompts


def _is_id(given: Any) -> bool:
    return type(given) is int


def _read_stops(given: Any) -> tuple[str, ...]:
    """Return the stop strings of a request."""
    stops = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
        raise ValueError("must be a text or a list of texts")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"must have at most {MAX_STOPS} texts, got {len(stops)}")
    for each in stops:
        check_text(each)
        if not 1 <= len(each) <= MAX_STOP_CHARACTERS:
            raise ValueError(f"must have texts of 1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(stops)


Text = Annotated[str, BeforeValidator(_check_string)]
SourceName = Annotated[
    str, BeforeValidator(_check_source), Field(min_length=1, max_length=MAX_SOURCE_CHARACTERS)
]


class StreamOptions(ApiModel):
    include_usage: bool = False
    """End the stream with a chunk that counts the tokens."""
    include_obfuscation: bool = False
    """Ignored."""


class MemoryOptions(ApiModel):
    """What to say about the memory. Not in OpenAI's protocol: send it by `extra_body`."""

    origins: Annotated[int, Field(ge=0, le=MAX_ORIGINS)] = 1
    """For each token, the most similar places in the memory to return."""


class WritingRequest(ApiModel):
    """What completions and chat have in common.

    As in OpenAI's protocol, a parameter that is unknown is refused. One that is known there but
    has no effect here is ignored if it does not change the text (`user`, `metadata`, …), and must
    otherwise have its default (`presence_penalty`, `logit_bias`, `tools`, …).
    """

    ignored: ClassVar[frozenset[str]] = frozenset(
        {"user", "metadata", "store", "service_tier", "safety_identifier", "moderation"}
        | {"prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"}
        | {"parallel_tool_calls", "reasoning_effort", "verbosity"}
    )
    defaults: ClassVar[dict[str, tuple[Any, ...]]] = {
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        "tools": ([],),
        "functions": ([],),
        "tool_choice": ("none", "auto"),
        "function_call": ("none", "auto"),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "suffix": ("",),
        "best_of": (1,),
    }

    model: Text
    """Name of the model, as listed by /v1/models."""
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    """0 takes the most probable token, larger values draw more freely; by default 1."""
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    """Draw from the most probable tokens whose probabilities sum to this; by default 1."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Number of answers per prompt; by default 1."""
    stop: Annotated[
        tuple[str, ...],
        BeforeValidator(_read_stops),
        WithJsonSchema(
            {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": MAX_STOPS}]}
        ),
    ] = ()
    """Texts before which to stop: one, or a list of up to 4."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """Makes drawing repeatable, as long as the memory does not change."""
    stream: bool | None = None
    """Send the text as it is written, as server-sent events."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""
    mbpa: MemoryOptions | None = None
    """Return for each token how far the memory moved it, and where it came from."""

    @model_validator(mode="before")
    @classmethod
    def _drop_parameters_without_effect(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name, values in cls.defaults.items():
            value = given.get(name)
            if value is not None and value not in values:
                why = "is not supported"
                raise PydanticCustomError(UNKNOWN_FIELD, "unsupported", {"name": name, "why": why})
        without_effect = cls.ignored | cls.defaults.keys()
        return {name: value for name, value in given.items() if name not in without_effect}

    @model_validator(mode="after")
    def _check_options(self) -> WritingRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream")
        return self

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(WritingRequest):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "MODEL", "prompt": "The deadline is", "max_tokens": 20, "temperature": 0}
            ]
        }
    )

    prompt: Annotated[
        Any,
        BeforeValidator(_read_prompts),
        WithJsonSchema(
            {
                "anyOf": [
                    _TEXT,
                    {"type": "array", "items": _TEXT},
                    {"type": "array", "items": _ID},
                    {"type": "array", "items": {"type": "array", "items": _ID}},
                ]
            }
        ),
    ]
    """Text to continue, as text or as token ids; or several of them."""
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    """The most tokens to write; by default 16."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    """Return the log-probability of each token, and those of so many of the most probable ones."""
    echo: bool | None = None
    """Return the prompt before the text."""

    @model_validator(mode="after")
    def _limit_choices(self) -> CompletionRequest:
        if len(self.prompt) * (self.n or 1) > MAX_CHOICES:
            raise ValueError(f"n times the number of prompts must be at most {MAX_CHOICES}")
        if self.stream and self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is only allowed without stream")
        return self


class Message(BaseModel):
    """A message of a chat. Fields other than role and content are ignored."""

    model_config = ConfigDict(strict=True, use_attribute_docstrings=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        str,
        WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": {"type": "object"}}]}),
    ]
    """Text, or a list of parts of the type "text"."""

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, given: Any) -> Any:
        if given is None:  # an assistant's message may have none
            return ""
        parts = given if isinstance(given, list) else [{"type": "text", "text": given}]
        for part in parts:
            is_text = isinstance(part, dict) and part.get("type") == "text"
            if not is_text or not isinstance(part.get("text"), str):
                raise ValueError('must be a text, or parts of the type "text"')
        return check_text("".join(part["text"] for part in parts))


class ChatRequest(WritingRequest):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "MODEL", "messages": [{"role": "user", "content": "When is it due?"}]}
            ]
        }
    )

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    """The conversation so far."""
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    """The same as `max_completion_tokens`, which comes first."""
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    """The most tokens to write; by default 512, or what the context leaves."""
    logprobs: bool | None = None
    """Return the log-probability of each token."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    """Return those of so many of the most probable tokens as well; only with `logprobs`."""

    @model_validator(mode="after")
    def _require_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only allowed with logprobs")
        return self


class LearnDocument(ApiModel):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"source": "handbook.md", "text": "The deadline is the ninth of May."}]
        }
    )

    text: Text
    """The document."""
    source: SourceName
    """Its name, by which it can be forgotten; a document of this name is replaced."""


class ForgetDocument(ApiModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{"source": "handbook.md"}]})

    source: SourceName
    """Name of the document."""


class ScoreText(ApiModel):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"text": "The deadline is the ninth of May."}]}
    )

    text: Text
    origins: Annotated[int, Field(ge=0, le=MAX_ORIGINS)] = 0
    """For each token, the most similar places in the memory to return."""


class SourceAnswer(ApiModel):
    name: str
    tokens: int
    read_at: float
    """When it was read, in seconds since 1970."""


class LearnAnswer(ApiModel):
    source: SourceAnswer
    entries: int
    """Tokens in the memory, of all documents."""


class ForgetAnswer(ApiModel):
    source: str
    entries: int
    """Tokens in the memory, of all documents."""


class SourcesAnswer(ApiModel):
    sources: list[SourceAnswer]
    entries: int
    """Tokens in the memory, of all documents."""
    capacity: int
    """The most tokens that the memory can hold."""


class OriginAnswer(ApiModel):
    source: str
    """Name of the document."""
    position: int
    """Index of the token in the document that followed this place."""
    token: int
    """That token."""
    weight: float
    """Weight of this place among all that took part, which sum to 1."""
    distance: float
    """Distance between the states of the model here and there."""
    before: str
    text: str
    """Text of the token that followed."""
    after: str


class TokenAnswer(ApiModel):
    id: int
    text: str
    log_prob: float
    log_prob_alone: float
    """Log-probability according to the model without the memory."""
    moved: float
    """How many nats the memory added."""
    origins: list[OriginAnswer]
    """Similar places in the memory: those followed by this token first, then by weight."""


class ScoreAnswer(ApiModel):
    first: str
    """Text of the first token, which nothing predicts."""
    tokens: list[TokenAnswer]
    """The tokens after the first."""
    perplexity: float
    perplexity_alone: float
    """Perplexity of the model without the memory."""
    bits_per_byte: float
    bits_per_byte_alone: float


class ErrorDetails(ApiModel):
    message: str
    type: str
    param: str | None
    """Name of the parameter that is wrong, if it is one."""
    code: str | None


class LanguageError(ApiModel):
    error: ErrorDetails
