"""Request and response models: they validate input and define the OpenAPI description."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, FiniteFloat, model_validator
from pydantic_core import PydanticCustomError

from mbpa.serve.answers import Answer, NearExample, Reason
from mbpa.serve.audit import AuditEntry, format_time
from mbpa.serve.input_checks import MAX_LABEL_CHARACTERS, MAX_PICTURE_BYTES, MAX_TEXT_CHARACTERS
from mbpa.serve.journal import ListedExample

MAX_BASE64_CHARACTERS = 4 * MAX_PICTURE_BYTES // 3
MAX_QUERIES_PER_CALL = 256
MAX_EXPLAINED_PER_CALL = 16
MAX_EXAMPLES_PER_CALL = 256
MAX_IDS_PER_CALL = 10_000
MAX_LISTED_PER_CALL = 1000
UNKNOWN_FIELD = "unknown_field"  # type of the validation error for unknown fields
MAX_NAME_CHARACTERS = 100  # of an unknown field's name that are compared and repeated


def _exclude_characters(control: str) -> dict[str, Any]:
    """Return an OpenAPI pattern that excludes these control characters."""
    return {"pattern": f"^[^{control}]+$"}


# The patterns are documentation only: `input_checks` checks the text and names the character.
Text = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MAX_TEXT_CHARACTERS,
        json_schema_extra=_exclude_characters(r"\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"),
    ),
]
Label = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MAX_LABEL_CHARACTERS,
        json_schema_extra=_exclude_characters(r"\x00-\x1f\x7f-\x9f"),
    ),
]
Picture = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MAX_BASE64_CHARACTERS
        + 2 * MAX_BASE64_CHARACTERS // 64
        + 100,  # allows line breaks and a data URL prefix
        json_schema_extra={"contentEncoding": "base64"},
    ),
]
Embedding = Annotated[list[FiniteFloat], Field(min_length=1, max_length=65_536)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Id = Annotated[int, Field(ge=1, le=2**62)]


class ApiModel(BaseModel):
    """Base class of all messages. An unknown field is an error, so misspelt names are noticed."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_field(cls, given: Any) -> Any:
        """Raise an error for an unknown field, and suggest the field that was probably meant."""
        if isinstance(given, dict):
            for name in given:
                if name not in cls.model_fields:
                    # JSON may hold surrogates, which pydantic cannot report.
                    shown = str(name)[:MAX_NAME_CHARACTERS].encode("utf-8", "backslashreplace")
                    context = {"name": shown.decode(), "why": _explain_unknown(name, cls)}
                    raise PydanticCustomError(UNKNOWN_FIELD, "unknown field", context)
        return given


def _explain_unknown(name: str, message: type[BaseModel]) -> str:
    """Suggest the fields of a message that were probably meant, or list all of them."""
    known = list(message.model_fields)
    near = difflib.get_close_matches(name[:MAX_NAME_CHARACTERS].lower(), known, n=2)
    if near:
        return f"unknown field; did you mean {' or '.join(near)}?"
    return f"unknown field; the known ones are {', '.join(known)}"


def _require_one(message: BaseModel, *names: str) -> None:
    if sum(getattr(message, name) is not None for name in names) != 1:
        raise ValueError(f"give exactly one of: {', '.join(names)}")


def _require_field(name: str, kind: str) -> dict[str, Any]:
    """Return an OpenAPI schema stating that a field is present and not null."""
    return {"required": [name], "properties": {name: {"type": kind}}}


class Query(ApiModel):
    """Texts or pictures, whichever the run was made from, or embeddings from its encoder."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [_require_field(name, "array") for name in ("texts", "images", "embeddings")],
            "examples": [{"texts": ["one salami pizza for tonight"]}],
        }
    )

    texts: Annotated[list[Text], Field(min_length=1, max_length=MAX_QUERIES_PER_CALL)] | None = None
    images: (
        Annotated[list[Picture], Field(min_length=1, max_length=MAX_QUERIES_PER_CALL)] | None
    ) = None
    """Files of pictures, in base64."""
    embeddings: (
        Annotated[list[Embedding], Field(min_length=1, max_length=MAX_QUERIES_PER_CALL)] | None
    ) = None
    top: Annotated[int, Field(ge=1, le=100)] = 3
    """Number of labels to return per answer."""
    threshold: Fraction | None = None
    """Confidence below which the classifier abstains; by default the run's; 0: never."""

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        _require_one(self, "texts", "images", "embeddings")
        return self

    @property
    def size(self) -> int:
        """Number of queries."""
        return len(self.texts or self.images or self.embeddings or ())


class ExplainQuery(Query):
    """Like the body of `/predict`, but with fewer queries per request."""

    texts: Annotated[list[Text], Field(min_length=1, max_length=MAX_EXPLAINED_PER_CALL)] | None = (
        None
    )
    images: (
        Annotated[list[Picture], Field(min_length=1, max_length=MAX_EXPLAINED_PER_CALL)] | None
    ) = None
    """Files of pictures, in base64."""
    embeddings: (
        Annotated[list[Embedding], Field(min_length=1, max_length=MAX_EXPLAINED_PER_CALL)] | None
    ) = None


class Probability(ApiModel):
    label: str
    probability: float


class Prediction(ApiModel):
    label: str | None
    """The most probable label; `null` if the classifier abstains."""
    confidence: float
    """Probability of the most probable label."""
    abstains: bool
    top: list[Probability]
    in_scope: float | None
    """Probability that the query belongs to any label, by how near their examples are. All other
    probabilities include it. `null` if the run does not estimate it."""


class Predictions(ApiModel):
    answers: list[Prediction]


class Neighbor(ApiModel):
    id: int
    label: str
    text: str | None
    weight: float
    distance: float
    """Euclidean distance between keys, not squared."""


class Explanation(ApiModel):
    answer: Prediction
    before: list[Probability]
    """Labels predicted by the head alone, without the memory."""
    neighbors: list[Neighbor]
    change: float
    """Distance that adaptation moved the head's parameters."""


class Explanations(ApiModel):
    reasons: list[Explanation]


class NewExample(ApiModel):
    """A label with a text or picture, an embedding, or both; the embedding is used if given."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                _require_field("text", "string"),
                _require_field("image", "string"),
                _require_field("embedding", "array"),
            ]
        }
    )

    label: Label
    text: Text | None = None
    image: Picture | None = None
    """The file of a picture, in base64."""
    embedding: Embedding | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if self.text is None and self.image is None and self.embedding is None:
            raise ValueError("give text, image or embedding")
        if self.text is not None and self.image is not None:
            raise ValueError("give text or image, not both")
        return self


class LearnRequest(ApiModel):
    """Examples to teach, all or none."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"examples": [{"label": "order_pizza", "text": "can you deliver a calzone"}]}
            ]
        }
    )

    examples: Annotated[list[NewExample], Field(min_length=1, max_length=MAX_EXAMPLES_PER_CALL)]
    request: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """A name for this call. If the call is sent again under this name, nothing is taught twice."""


class LearnResult(ApiModel):
    ids: list[int]
    labels: int
    """Number of labels after this call."""


class ForgetRequest(ApiModel):
    """Examples to delete, by id, or all examples of a label."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [_require_field("ids", "array"), _require_field("label", "string")],
            "examples": [{"label": "order_pizza"}],
        }
    )

    ids: Annotated[list[Id], Field(min_length=1, max_length=MAX_IDS_PER_CALL)] | None = None
    label: Label | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        _require_one(self, "ids", "label")
        return self


class ForgetResult(ApiModel):
    ids: list[int]
    """Ids of the deleted examples."""


class RenameRequest(ApiModel):
    """A label and its new name, which no label has yet."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"label": "order_pizza", "to": "pizza"}]}
    )

    label: Label
    to: Label


class MergeRequest(ApiModel):
    """A label, and the label that its examples get."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"label": "order_pizza", "into": "pizza"}]}
    )

    label: Label
    into: Label


class RelabelResult(ApiModel):
    examples: int
    """Number of examples that have the other label now."""


class ExamplesQuery(ApiModel):
    """Which examples to list."""

    model_config = ConfigDict(strict=False)  # values of a query string are always texts

    label: Label | None = None
    since: AwareDatetime | None = None
    """Earliest time of teaching, in ISO 8601 with a time zone, such as 2026-01-31T12:00:00Z."""
    origin: Literal["trained", "taught"] | None = None
    """Whether the examples are those that the head was trained with, or were taught later."""
    order: Literal["oldest", "newest"] = "oldest"
    """Which examples come first."""
    limit: Annotated[int, Field(ge=1, le=MAX_LISTED_PER_CALL)] = 100
    cursor: Annotated[int, Field(ge=0, le=2**62)] | None = None
    """The `cursor` of the page before; without it, the first page is returned."""


class StoredExample(ApiModel):
    id: int
    label: str
    text: str | None
    origin: str
    """"trained" if the head was trained with it, else "taught"."""
    taught_at: str | None
    """Time of teaching, in ISO 8601; `null` if a version that did not record it stored it."""
    by: str | None
    """Name of the token with which it was taught; `null` if none was needed."""


class Examples(ApiModel):
    examples: list[StoredExample]
    cursor: int | None
    """Pass this to get the next page; `null`: this is the last page."""


class AuditQuery(ApiModel):
    """Which changes to list."""

    model_config = ConfigDict(strict=False)  # values of a query string are always texts

    limit: Annotated[int, Field(ge=1, le=MAX_LISTED_PER_CALL)] = 100
    cursor: Annotated[int, Field(ge=0, le=2**62)] | None = None
    """The `cursor` of the page before; without it, the newest changes are returned."""


class AuditedChange(ApiModel):
    change: int
    """Number of the change, as in `/stats`."""
    time: str
    """Time of the change, in ISO 8601."""
    by: str | None
    """Name of the token; `null` if none was needed."""
    action: str
    """"learn", "forget", "rename", "merge" (into a label with a row of its own), or "restore" for
    examples whose forgetting was undone; of a run in a database also "retrain" and "copy"."""
    first: int
    """Lowest id of the examples that were changed."""
    count: int
    """Number of examples that were changed."""
    label: str | None
    """Former name of a label that was renamed or merged."""
    new_label: str | None


class Audit(ApiModel):
    changes: list[AuditedChange]
    cursor: int | None
    """Pass this to get older changes; `null`: there are none."""


class RetrainResult(ApiModel):
    examples: int
    """Number of different examples that the head was trained with."""
    labels: int
    accuracy: float | None
    """Accuracy on held-out examples; `null` if there are too few."""
    threshold: float


class LabelCount(ApiModel):
    label: str
    examples: int
    trained: bool
    """Whether the head was trained on this label; if not, only its examples define it."""


class Labels(ApiModel):
    labels: list[LabelCount]


class Stats(ApiModel):
    examples: int
    taught: int
    labels: int
    new_labels: int
    change: int
    """Number of writes so far."""
    read_only: str | None
    threshold: float
    takes: str | None
    """"texts" or "images"; `null`: embeddings only."""
    encoder: str | None
    key_dim: int
    recall: float | None
    """Share of the nearest examples that a graph finds, measured on live queries; `null`: exact, or
    not measured yet.
    """
    waiting: int
    """Number of chunks of work that have not reached the model."""


class Health(ApiModel):
    status: str
    """"ok", or "read-only" if nothing more can be learnt."""
    reason: str | None


class Replica(ApiModel):
    position: int
    """Position in the log of all replicas that answers are given at."""
    lag: int
    """Number of further events of the log that are known and not yet applied."""
    stale_s: float
    """Seconds since the replica last knew that it had applied everything."""
    snapshot: int
    """Position at which everything was last loaded."""
    snapshot_age_s: float
    """Seconds since then."""


class ReplicaStats(Stats):
    replica: Replica


class ReplicaHealth(Health):
    replica: Replica


class Error(ApiModel):
    error: str


def make_prediction(answer: Answer) -> Prediction:
    return Prediction.model_construct(
        label=answer.label,
        confidence=answer.confidence,
        abstains=answer.abstains,
        top=_make_probabilities(answer.top),
        in_scope=answer.in_scope,
    )


def make_explanation(reason: Reason) -> Explanation:
    return Explanation.model_construct(
        answer=make_prediction(reason.answer),
        before=_make_probabilities(reason.before),
        neighbors=[_make_neighbor(each) for each in reason.neighbors],
        change=reason.change,
    )


def make_stored_example(listed: ListedExample) -> StoredExample:
    return StoredExample.model_construct(
        id=listed.id,
        label=listed.label,
        text=listed.text,
        origin="trained" if listed.is_trained else "taught",
        taught_at=None if listed.taught_ms is None else format_time(listed.taught_ms),
        by=listed.by,
    )


def make_audited_change(entry: AuditEntry) -> AuditedChange:
    return AuditedChange.model_construct(
        change=entry.change,
        time=format_time(entry.time_ms),
        by=entry.by,
        action=entry.action,
        first=entry.first,
        count=entry.count,
        label=entry.label,
        new_label=entry.new_label,
    )


def _make_neighbor(near: NearExample) -> Neighbor:
    return Neighbor.model_construct(**vars(near))


def _make_probabilities(top: tuple[tuple[str, float], ...]) -> list[Probability]:
    return [Probability.model_construct(label=label, probability=share) for label, share in top]
