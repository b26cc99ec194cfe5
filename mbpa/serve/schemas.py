"""Request and response models: they validate input and define the OpenAPI description."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator
from pydantic_core import PydanticCustomError

from mbpa.serve.answers import MOST_FILE, MOST_LABEL, MOST_TEXT, Answer, NearExample, Reason

BASE64 = 4 * MOST_FILE // 3  # characters of the largest picture in base64
MOST_QUERIES, MOST_EXPLAINED, MOST_EXAMPLES, MOST_IDS = 256, 16, 256, 10_000  # per call
UNKNOWN_FIELD = "unknown_field"  # type of the validation error for unknown fields
MAX_NAME_CHARACTERS = 100  # characters of an unknown field's name that are compared and repeated


def _written(control: str) -> dict[str, Any]:
    """Return an OpenAPI pattern that excludes these control characters."""
    return {"pattern": f"^[^{control}]+$"}


# The patterns are documentation only: `answers` checks the text and names the character.
Text = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MOST_TEXT,
        json_schema_extra=_written(r"\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"),
    ),
]
Label = Annotated[
    str,
    Field(min_length=1, max_length=MOST_LABEL, json_schema_extra=_written(r"\x00-\x1f\x7f-\x9f")),
]
Picture = Annotated[
    str,
    Field(
        min_length=1,
        max_length=BASE64 + 2 * BASE64 // 64 + 100,  # allows line breaks and a data URL prefix
        json_schema_extra={"contentEncoding": "base64"},
    ),
]
Embedding = Annotated[list[FiniteFloat], Field(min_length=1, max_length=65_536)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Id = Annotated[int, Field(ge=1, le=2**62)]


class Message(BaseModel):
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
    return f"unknown field; known are {', '.join(known)}"


def _one_of(message: BaseModel, *names: str) -> None:
    if sum(getattr(message, name) is not None for name in names) != 1:
        raise ValueError(f"give one of these: {', '.join(names)}")


def _given(name: str, kind: str) -> dict[str, Any]:
    """Return an OpenAPI schema stating that a field is present and not null."""
    return {"required": [name], "properties": {name: {"type": kind}}}


class Query(Message):
    """Texts or pictures, whichever the run was made from, or embeddings from its encoder."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [_given(name, "array") for name in ("texts", "images", "embeddings")],
            "examples": [{"texts": ["one salami pizza for tonight"]}],
        }
    )

    texts: Annotated[list[Text], Field(min_length=1, max_length=MOST_QUERIES)] | None = None
    images: Annotated[list[Picture], Field(min_length=1, max_length=MOST_QUERIES)] | None = None
    """Files of pictures, in base64."""
    embeddings: Annotated[list[Embedding], Field(min_length=1, max_length=MOST_QUERIES)] | None = (
        None
    )
    top: Annotated[int, Field(ge=1, le=100)] = 3
    """Number of labels to return per answer."""
    threshold: Share | None = None
    """Confidence below which it abstains; by default the run's. With 0 it never abstains."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        _one_of(self, "texts", "images", "embeddings")
        return self

    @property
    def size(self) -> int:
        """Number of queries."""
        return len(self.texts or self.images or self.embeddings or ())


class Why(Query):
    """As for `/predict`, but with fewer queries per request."""

    texts: Annotated[list[Text], Field(min_length=1, max_length=MOST_EXPLAINED)] | None = None
    images: Annotated[list[Picture], Field(min_length=1, max_length=MOST_EXPLAINED)] | None = None
    """Files of pictures, in base64."""
    embeddings: (
        Annotated[list[Embedding], Field(min_length=1, max_length=MOST_EXPLAINED)] | None
    ) = None


class Probability(Message):
    label: str
    probability: float


class Prediction(Message):
    label: str | None
    """The most probable label; `null` if the classifier abstains."""
    confidence: float
    abstains: bool
    top: list[Probability]


class Predictions(Message):
    answers: list[Prediction]


class Neighbor(Message):
    id: int
    label: str
    text: str | None
    weight: float
    distance: float
    """Euclidean distance between keys, not squared."""


class Explained(Message):
    answer: Prediction
    before: list[Probability]
    """Labels predicted by the head alone, without the memory."""
    neighbors: list[Neighbor]
    change: float
    """Distance that the head's parameters moved."""


class Explanations(Message):
    reasons: list[Explained]


class Taught(Message):
    """A label with a text or picture, an embedding, or both; the embedding is used if given."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                _given("text", "string"),
                _given("image", "string"),
                _given("embedding", "array"),
            ]
        }
    )

    label: Label
    text: Text | None = None
    image: Picture | None = None
    """The file of a picture, in base64."""
    embedding: Embedding | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.text is None and self.image is None and self.embedding is None:
            raise ValueError("give text, image or embedding")
        if self.text is not None and self.image is not None:
            raise ValueError("give text or image, not both")
        return self


class Lessons(Message):
    """Examples to teach, all or none."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"examples": [{"label": "order_pizza", "text": "can you deliver a calzone"}]}
            ]
        }
    )

    examples: Annotated[list[Taught], Field(min_length=1, max_length=MOST_EXAMPLES)]
    request: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """A name for this call. Sending the call again under this name teaches nothing twice."""


class Learnt(Message):
    ids: list[int]
    labels: int
    """Number of labels after this call."""


class Forgetting(Message):
    """Examples to delete, by id, or all examples of a label."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [_given("ids", "array"), _given("label", "string")],
            "examples": [{"label": "order_pizza"}],
        }
    )

    ids: Annotated[list[Id], Field(min_length=1, max_length=MOST_IDS)] | None = None
    label: Label | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        _one_of(self, "ids", "label")
        return self


class Forgotten(Message):
    ids: list[int]
    """Ids of the deleted examples."""


class LabelCount(Message):
    label: str
    examples: int
    trained: bool
    """Whether its row of the head was trained; if not, only its examples define the label."""


class Labels(Message):
    labels: list[LabelCount]


class Stats(Message):
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
    waiting: int
    """Pieces of work that have not reached the model."""


class Health(Message):
    status: str
    """"ok", or "read-only" if nothing more can be learnt."""
    reason: str | None


class Error(Message):
    error: str


def prediction(answer: Answer) -> Prediction:
    return Prediction.model_construct(
        label=answer.label,
        confidence=answer.confidence,
        abstains=answer.abstains,
        top=_probabilities(answer.top),
    )


def explained(reason: Reason) -> Explained:
    return Explained.model_construct(
        answer=prediction(reason.answer),
        before=_probabilities(reason.before),
        neighbors=[_neighbor(each) for each in reason.neighbors],
        change=reason.change,
    )


def _neighbor(near: NearExample) -> Neighbor:
    return Neighbor.model_construct(**vars(near))


def _probabilities(top: tuple[tuple[str, float], ...]) -> list[Probability]:
    return [Probability.model_construct(label=label, probability=share) for label, share in top]
