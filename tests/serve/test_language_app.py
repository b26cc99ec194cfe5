"""The service of a language run, as the `openai` client and plain HTTP see it."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from servers import Server, open_client, running
from tiny_language_model import TEXT, make_model, make_tokenizer

from mbpa.language import MemoryLM
from mbpa.language.document_memory import Reading
from mbpa.serve.language_app import create_language_app
from mbpa.serve.settings import LanguageSettings

pytestmark = pytest.mark.filterwarnings("ignore:.*torch_dtype.*")
DOCS = Path(__file__).parents[2] / "docs/language-service.md"
OTHER = "The shop opens at nine. On Mondays it is closed, since the owner mends boats in the yard."
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system must be first') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: The heron{% endif %}"
)


@dataclass
class Service:
    """A service in this process, with clients."""

    url: str
    lm: MemoryLM
    app: Any
    client: openai.OpenAI
    http: httpx.Client
    model: str = "LlamaForCausalLM"

    def complete(self, prompt: Any = "The heron stands", **options: Any) -> Any:
        options = {"max_tokens": 8, "temperature": 0, **options}
        return self.client.completions.create(model=self.model, prompt=prompt, **options)

    def chat(self, content: Any = "Tell me.", **options: Any) -> Any:
        options = {"max_completion_tokens": 8, "temperature": 0, **options}
        messages = [{"role": "user", "content": content}]
        return self.client.chat.completions.create(model=self.model, messages=messages, **options)

    def learn(self, text: str = TEXT, source: str = "heron.md") -> httpx.Response:
        return self.http.post("/learn", json={"text": text, "source": source})

    def score(self, text: str = TEXT, origins: int = 0) -> dict[str, Any]:
        answer = self.http.post("/score", json={"text": text, "origins": origins})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def read_metric(self, name: str) -> float:
        found = re.search(rf"^mbpa_{name} (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        assert found is not None
        return float(found[1])


def open_openai(url: str, token: str = "none") -> openai.OpenAI:
    plain = httpx.Client(verify=False, timeout=60)
    return openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0, http_client=plain)


@contextmanager
def serving(lm: MemoryLM, **settings: Any) -> Iterator[Service]:
    app = create_language_app(lm, LanguageSettings(**settings))
    headers = {"Authorization": f"Bearer {settings.get('token', 'none')}"}
    with (
        running(app) as url,
        open_openai(url, settings.get("token", "none")) as client,
        open_client(url, headers=headers) as http,
    ):
        yield Service(url, lm, app, client, http)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    backend = make_tokenizer().backend_tokenizer
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", chat_template=TEMPLATE
    )


@pytest.fixture
def service(model: Any, tokenizer: Any) -> Iterator[Service]:
    with serving(MemoryLM(model, tokenizer, capacity=2000)) as made:
        yield made


@pytest.fixture(scope="module")
def untaught(model: Any, tokenizer: Any) -> Iterator[Service]:
    """A service for tests that change nothing."""
    with serving(MemoryLM(model, tokenizer, capacity=2000)) as made:
        yield made


@pytest.fixture(scope="module")
def taught(model: Any, tokenizer: Any) -> Iterator[Service]:
    """A service that has read a document, for tests that change nothing."""
    with serving(MemoryLM(model, tokenizer, capacity=2000)) as made:
        assert made.learn().status_code == 200
        yield made


# Completions


def test_the_model_is_listed(untaught: Service) -> None:
    (listed,) = untaught.client.models.list().data
    assert listed.id == untaught.model
    assert untaught.client.models.retrieve(untaught.model) == listed
    with pytest.raises(openai.NotFoundError):
        untaught.client.models.retrieve("gpt/4")


def test_a_completion_is_what_the_model_writes(taught: Service) -> None:
    expected = taught.lm.generate("The heron stands", max_new_tokens=8)
    answer = taught.complete()
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (expected.text, "length")
    assert choice.text == TEXT[16 : 16 + len(choice.text)]
    counts = answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens
    assert counts == (3, 8, 11)
    assert taught.complete(taught.lm.encode("The heron stands")).choices[0].text == choice.text


@pytest.mark.heavy
def test_prompts_and_copies_are_numbered_in_order(taught: Service) -> None:
    prompts = ["The heron stands", "In the evening it flies"]
    alone = [taught.complete(each).choices[0].text for each in prompts]
    answer = taught.complete(prompts, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [alone[0]] * 2 + [alone[1]] * 2
    ids = [taught.lm.encode(each) for each in prompts]
    assert [choice.text for choice in taught.complete(ids).choices] == alone
    assert answer.usage.prompt_tokens == sum(map(len, ids))


def test_many_choices_are_written_in_several_batches(untaught: Service) -> None:
    answer = untaught.complete(n=40, max_tokens=2, temperature=1.5, seed=1)
    assert [choice.index for choice in answer.choices] == list(range(40))
    assert len({choice.text for choice in answer.choices}) > 5


def test_a_stream_joins_to_the_whole(taught: Service) -> None:
    whole = taught.complete(["The heron stands", "In the"], logprobs=2)
    options = {"include_usage": True}
    chunks = list(
        taught.complete(
            ["The heron stands", "In the"], logprobs=2, stream=True, stream_options=options
        )
    )
    assert chunks[-1].usage == whole.usage
    assert not chunks[-1].choices
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(chunks) > 8
    for index, expected in enumerate(whole.choices):
        parts = [each for chunk in chunks for each in chunk.choices if each.index == index]
        assert "".join(part.text for part in parts) == expected.text
        assert [part.finish_reason for part in parts][-1] == "length"
        assert all(part.finish_reason is None for part in parts[:-1])
        found = [part.logprobs for part in parts if part.logprobs is not None]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [each for part in found for each in getattr(part, name)]
            wanted = getattr(expected.logprobs, name)
            assert joined == (pytest.approx(wanted, abs=1e-5) if "token_" in name else wanted)


def test_a_stream_ends_as_openai_says(untaught: Service) -> None:
    body = {"model": untaught.model, "prompt": "The", "max_tokens": 2, "stream": True}
    answer = untaught.http.post("/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-1])
    assert "usage" not in json.loads(events[0].removeprefix("data: "))


def test_log_probabilities_are_those_of_the_score(taught: Service) -> None:
    choice = taught.complete(logprobs=3, echo=True).choices[0]
    assert choice.text.startswith("The heron stands")
    scored = taught.lm.explain(choice.text, top=3).tokens
    given = choice.logprobs
    assert "".join(given.tokens) == choice.text
    assert given.token_logprobs[0] is given.top_logprobs[0] is None
    assert given.token_logprobs[1:] == pytest.approx([each.log_prob for each in scored], abs=1e-4)
    for token, top, expected in zip(given.tokens[1:], given.top_logprobs[1:], scored, strict=True):
        assert token in top
        assert max(top, key=top.__getitem__) == expected.top[0].text
        assert len(top) in (3, 4)
    assert given.text_offset == [
        sum(map(len, given.tokens[:index])) for index in range(len(given.tokens))
    ]
    assert taught.complete(logprobs=0).choices[0].logprobs.top_logprobs is None


def test_a_prompt_alone_is_scored(taught: Service) -> None:
    answer = taught.complete("The heron stands", max_tokens=0, echo=True, logprobs=1)
    assert answer.choices[0].text == "The heron stands"
    expected = [token.log_prob for token in taught.lm.score("The heron stands").tokens]
    assert answer.choices[0].logprobs.token_logprobs == [None, *expected]
    assert taught.complete("The", max_tokens=0, echo=True, logprobs=1).choices[0].text == "The"
    assert taught.complete("The", max_tokens=0).choices[0].text == ""


@pytest.mark.heavy
def test_a_stop_string_may_span_tokens(taught: Service) -> None:
    whole = taught.complete(max_tokens=12).choices[0].text
    assert whole.startswith(" in the shallow water of")
    stop = "allow wat"
    for stops in (stop, ["never", stop, "x", "y"]):
        choice = taught.complete(max_tokens=12, stop=stops, logprobs=0).choices[0]
        assert (choice.text, choice.finish_reason) == (" in the sh", "stop")
        assert "".join(choice.logprobs.tokens).startswith(choice.text)
        assert not "".join(choice.logprobs.tokens[:-1]).startswith(choice.text)
        parts = list(taught.complete(max_tokens=12, stop=stops, stream=True))
        assert "".join(part.choices[0].text for part in parts) == " in the sh"
        assert parts[-1].choices[0].finish_reason == "stop"
    # What looked like the start of a stop string is sent once it cannot be one.
    for stops in ("allow wine", " of the sea", "river and waits for"):
        parts = taught.complete(max_tokens=9, stop=stops, stream=True)
        text = taught.complete(max_tokens=9).choices[0].text
        assert "".join(part.choices[0].text for part in parts) == text


def test_a_seed_makes_answers_repeatable(untaught: Service) -> None:
    drawn = [
        [choice.text for choice in untaught.complete(temperature=1.5, n=3, seed=seed).choices]
        for seed in (1, 1, 2, -5, None, None)
    ]
    assert drawn[0] == drawn[1]
    assert len({tuple(each) for each in drawn}) == 5
    assert len(set(drawn[0])) > 1
    assert untaught.complete(temperature=1.5, top_p=0).choices[0].text == (
        untaught.complete(temperature=0).choices[0].text
    )
    assert untaught.complete(temperature=1e-30).choices[0].text


@pytest.mark.heavy
def test_origins_of_tokens_come_on_request(taught: Service) -> None:
    plain = taught.complete().choices[0]
    assert "mbpa" not in plain.model_extra
    options = {"extra_body": {"mbpa": {"origins": 2}}}
    choice = taught.complete(**options).choices[0]
    tokens = choice.mbpa["tokens"]
    assert "".join(token["text"] for token in tokens) == choice.text == plain.text
    for token in tokens:
        assert token["moved"] == pytest.approx(token["log_prob"] - token["log_prob_alone"])
        assert token["moved"] > 1
        first = token["origins"][0]
        assert first["source"] == "heron.md"
        assert first["text"] == token["text"]
        assert first["before"] + first["text"] + first["after"] in TEXT
        assert len(token["origins"]) == 2
    parts = [part.choices[0] for part in taught.complete(stream=True, **options)]
    assert [each for part in parts for each in part.mbpa["tokens"]] == tokens
    said = taught.chat(**options).choices[0]
    assert "".join(token["text"] for token in said.mbpa["tokens"]) == said.message.content


# Chat


def test_chat_uses_the_template_of_the_model(taught: Service) -> None:
    prompt = "system: Be brief.\nuser: Tell me.\nassistant: The heron"
    expected = taught.lm.generate(prompt, max_new_tokens=8)
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Tell "}, {"type": "text", "text": "me."}],
        },
    ]
    answer = taught.client.chat.completions.create(
        model=taught.model, messages=messages, max_completion_tokens=8, temperature=0
    )
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert answer.usage.prompt_tokens == len(taught.lm.encode(prompt))
    # An answer can be sent back as part of the conversation.
    again = taught.client.chat.completions.create(
        model=taught.model, messages=[*messages[:1], choice.message, messages[1]], max_tokens=1
    )
    assert again.usage.completion_tokens <= 1


def test_a_chat_stream_joins_to_the_whole(taught: Service) -> None:
    whole = taught.chat(logprobs=True, top_logprobs=2)
    chunks = list(taught.chat(logprobs=True, top_logprobs=2, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    content = "".join(delta.content or "" for delta in deltas)
    assert content == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    streamed = [
        each
        for chunk in chunks
        if chunk.choices[0].logprobs is not None
        for each in chunk.choices[0].logprobs.content
    ]
    assert streamed == whole.choices[0].logprobs.content
    assert len(streamed) == 8
    for token in streamed:
        assert bytes(token.bytes).decode() == token.token
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob == token.logprob
    assert "".join(token.token for token in streamed) == content


def test_a_model_without_a_template_does_not_chat(model: Any) -> None:
    lm = MemoryLM(model, make_tokenizer(), capacity=100)
    with serving(lm) as service, pytest.raises(openai.BadRequestError, match="no chat template"):
        service.chat()


# Errors


def say(**options: Any) -> Callable[[Service], Any]:
    return lambda service: service.chat(**options)


def write(prompt: Any = "The", **options: Any) -> Callable[[Service], Any]:
    return lambda service: service.complete(prompt, **options)


@pytest.mark.parametrize(
    ("call", "param", "message"),
    [
        (write("The heron " * 100), "prompt", "maximum context length is 128 tokens"),
        (write("The heron " * 100_000), "prompt", "context"),
        (write(max_tokens=128), "prompt", "maximum context length"),
        (say(content="The heron " * 100), "messages", "maximum context length"),
        (write(""), "prompt", "at least one token"),
        (write([]), "prompt", "must be a text"),
        (write([1, 2.5]), "prompt", "all lists of token ids"),
        (write([[1], "a"]), "prompt", "all lists of token ids"),
        (write([10**9]), "prompt", "token ids must be from 0"),
        (write([-1]), "prompt", "token ids must be from 0"),
        (write(["a"] * 200), "prompt", "at most 128 prompts"),
        (write(max_tokens=-1), "max_tokens", "greater than or equal to 0"),
        (write(n=10**9), "n", "less than or equal to 128"),
        (write(["a", "b"], n=100), None, "at most 128"),
        (write(temperature=2.5), "temperature", "less than or equal to 2"),
        (write(temperature="hot"), "temperature", "valid number"),
        (write(top_p=-1), "top_p", "greater than or equal to 0"),
        (write(seed=2**70), "seed", "less than"),
        (write(stop=["a"] * 5), "stop", "at most 4"),
        (write(stop=[""]), "stop", "1 to 500"),
        (write(stop=[1]), "stop", "list of texts"),
        (write(logprobs=100), "logprobs", "less than or equal to 20"),
        (write(stream_options={"include_usage": True}), None, "only allowed with stream"),
        (write(presence_penalty=1), "presence_penalty", "not supported"),
        (write(logit_bias={"5": 100}), "logit_bias", "not supported"),
        (write(extra_body={"temprature": 1}), "temprature", "did you mean temperature"),
        (write(extra_body={"mbpa": {"origins": 99}}), "mbpa.origins", "less than or equal to 16"),
        (say(top_logprobs=2), None, "only allowed with logprobs"),
        (say(content=[{"type": "image_url", "image_url": {"url": "x"}}]), None, 'type "text"'),
        (say(tools=[{"type": "function", "function": {"name": "f"}}]), "tools", "not supported"),
        (say(response_format={"type": "json_object"}), "response_format", "not supported"),
    ],
)
def test_bad_requests_are_explained(
    untaught: Service, call: Callable[[Service], Any], param: str | None, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        call(untaught)
    assert message in caught.value.message
    assert caught.value.type == "invalid_request_error"
    if param is not None:
        assert caught.value.param == param
    if "context" in message:
        assert caught.value.code == "context_length_exceeded"


def test_parameters_without_effect_are_ignored(untaught: Service) -> None:
    untaught.complete(user="me", presence_penalty=0, logit_bias={}, best_of=1, suffix=None)
    untaught.chat(
        user="me", metadata={"a": "b"}, store=True, tools=[], response_format={"type": "text"}
    )


def test_an_unknown_model_and_a_template_that_refuses(untaught: Service) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist") as caught:
        untaught.client.completions.create(model="gpt-4", prompt="The")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    messages: list[Any] = [{"role": role, "content": "A"} for role in ("user", "system")]
    with pytest.raises(openai.NotFoundError):
        untaught.client.chat.completions.create(model="gpt-4", messages=messages)
    with pytest.raises(openai.BadRequestError, match="system must be first"):
        untaught.client.chat.completions.create(model=untaught.model, messages=messages)


def test_a_token_is_required(model: Any, tokenizer: Any) -> None:
    with serving(MemoryLM(model, tokenizer, capacity=100), token="secret") as service:
        assert service.complete().choices[0].text
        with open_openai(service.url, "wrong") as stranger:
            with pytest.raises(openai.AuthenticationError, match="token is required") as caught:
                stranger.completions.create(model=service.model, prompt="The")
            assert caught.value.code == "invalid_api_key"
        with open_client(service.url) as plain:
            for path in ("/sources", "/metrics", "/v1/models"):
                assert plain.get(path).status_code == 401
            assert plain.post("/learn", json={"text": TEXT, "source": "a"}).status_code == 401
            for path in ("/health", "/docs", "/openapi.json"):
                assert plain.get(path).status_code == 200
        assert not service.lm.sources()


def test_too_many_requests_are_refused(model: Any, tokenizer: Any) -> None:
    lm = MemoryLM(model, tokenizer, capacity=2000)
    with serving(lm, waiting_requests=1) as service, ThreadPoolExecutor(2) as pool:
        with lm.hold():  # the thread of the model waits
            running = [pool.submit(service.complete) for _ in range(2)]
            wait_until(lambda: service.read_metric("waiting") == 1)
            with pytest.raises(openai.RateLimitError) as caught:
                service.complete()
            assert int(caught.value.response.headers["Retry-After"]) >= 1
            with pytest.raises(openai.RateLimitError):
                service.complete(stream=True)
            assert service.http.get("/sources").status_code == 200
            assert service.http.get("/health").status_code == 200
        assert len({each.result().choices[0].text for each in running}) == 1
        assert service.complete().choices[0].text


def wait_until(is_true: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/learn", "/score"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "LlamaForCausalLM", "prompt": "\\ud800", "messages": "\\ud800"}',
        b'{"model": "\\ud800", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}',
        b'{"model": "LlamaForCausalLM", "prompt": "a", "temperature": NaN}',
        b'{"model": "LlamaForCausalLM", "prompt": "a", "temperature": 1e999}',
        b'{"model": "LlamaForCausalLM", "prompt": "a", "\\udfff": 1}',
        b'{"model": "LlamaForCausalLM", "prompt": "a", "stop": "\\udfff"}',
        b'{"text": "a b c", "source": "\\ud800"}',
        b'{"text": "a b \\udc00", "source": "x"}',
        b'{"text": "a b c", "source": " "}',
        b'{"text": "a b c", "source": "a\\u0000b"}',
        b'{"text": "", "source": "x", "origins": -1}',
        b'{"text": ["a"], "source": {"a": 1}}',
        b'{"model": ' + b"[" * 5000,
    ],
)
def test_malformed_bodies_are_refused(untaught: Service, path: str, body: bytes) -> None:
    answer = untaught.http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert not untaught.lm.sources()


def test_errors_of_all_kinds_have_the_form_of_openai(untaught: Service) -> None:
    too_large = b'{"text": "' + b"a" * (8 << 20) + b'"}'
    for answer, status in (
        (untaught.http.get("/nothing"), 404),
        (untaught.http.get("/v1/completions"), 405),
        (untaught.http.post("/learn", content=too_large), 413),
        (untaught.learn("a" * 1_000_001), 413),
        (untaught.http.post("/forget", json={"source": "nothing"}), 404),
    ):
        assert answer.status_code == status
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


# The memory


def test_learning_changes_answers_and_forgetting_restores_them(service: Service) -> None:
    service.learn(OTHER, "shop.md")
    before, wrote = service.score(origins=2), service.complete().choices[0].text
    answer = service.learn()
    assert answer.json()["source"]["tokens"] == len(service.lm.encode(TEXT))
    after = service.score(origins=2)
    assert after["perplexity"] < before["perplexity"] / 2
    assert after["perplexity_alone"] == before["perplexity_alone"]
    assert after["first"] + "".join(token["text"] for token in after["tokens"]) == TEXT
    assert after["tokens"][0]["origins"][0]["source"] == "heron.md"
    assert service.complete().choices[0].text != wrote
    listed = service.http.get("/sources").json()
    assert [each["name"] for each in listed["sources"]] == ["shop.md", "heron.md"]
    assert listed["entries"] == len(service.lm)
    assert service.http.post("/forget", json={"source": "heron.md"}).status_code == 200
    assert service.score(origins=2) == before
    assert service.complete().choices[0].text == wrote
    missing = service.http.post("/forget", json={"source": "heron.md"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "source_not_found")


def test_what_cannot_be_learnt_is_explained(model: Any, tokenizer: Any) -> None:
    with serving(MemoryLM(model, tokenizer, capacity=50)) as service:
        for text, message in ((TEXT, "at most 51 tokens"), ("A", "at least two tokens")):
            answer = service.learn(text)
            assert answer.status_code == 400
            assert message in answer.json()["error"]["message"]
        assert service.learn("The heron stands in the water.").status_code == 200


def test_a_long_document_does_not_delay_answers(model: Any, tokenizer: Any) -> None:
    may_read = threading.Event()

    class SlowReader(MemoryLM):
        def prepare(self, *args: Any, **options: Any) -> Reading:
            assert may_read.wait(60)
            return super().prepare(*args, **options)

    lm = SlowReader(model, tokenizer, capacity=2000)
    with serving(lm, waiting_documents=1) as service, ThreadPoolExecutor(2) as pool:
        learning = [pool.submit(service.learn, TEXT, name) for name in "ab"]
        wait_until(lambda: service.read_metric("waiting_documents") == 1)
        assert service.complete().choices[0].text
        assert service.score(OTHER)
        assert service.learn(TEXT, "c").status_code == 429
        assert service.http.get("/sources").json()["sources"] == []
        may_read.set()
        assert [each.result().status_code for each in learning] == [200, 200]
        assert {each.name for each in lm.sources()} == {"a", "b"}


def test_learning_goes_before_waiting_answers(service: Service) -> None:
    with ThreadPoolExecutor(4) as pool:
        with service.lm.hold():
            waiting = [pool.submit(service.complete) for _ in range(3)]
            wait_until(lambda: service.read_metric("waiting") == 2)
            learning = pool.submit(service.learn)
            wait_until(lambda: service.read_metric("waiting") == 3)
        learning.result()
        texts = [each.result().choices[0].text for each in waiting]
    assert texts.count(service.complete().choices[0].text) == 2  # those that had not begun


def test_a_full_disk_changes_nothing(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = MemoryLM(model, tokenizer, capacity=2000)
    lm.save(tmp_path / "run")
    with serving(lm) as service:
        service.learn()
        before = service.score(OTHER)

        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("os.fsync", fail)
            for source in ("shop.md", "heron.md"):
                answer = service.learn(OTHER, source)
                assert answer.status_code == 503
                assert "No space left" in answer.json()["error"]["message"]
            assert service.http.get("/health").json()["status"] == "read-only"
            assert service.http.post("/forget", json={"source": "heron.md"}).status_code == 503
            assert service.score(OTHER) == before
        assert service.learn(OTHER, "shop.md").status_code == 200
        assert service.http.get("/health").json() == {"status": "ok", "reason": None}
        assert service.http.post("/forget", json={"source": "heron.md"}).status_code == 200
        kept = lm.sources()
    lm.close()
    assert MemoryLM.load(tmp_path / "run", model, tokenizer).sources() == kept


# Clients


@pytest.mark.heavy
def test_clients_at_the_same_time_get_their_own_answers(taught: Service) -> None:
    prompts = ["The heron stands", "In the evening", "The river", "Then the water"]
    alone = {each: taught.complete(each).choices[0].text for each in prompts}

    def ask(prompt: str, is_stream: bool) -> bool:
        if not is_stream:
            return taught.complete(prompt).choices[0].text == alone[prompt]
        parts = taught.complete(prompt, stream=True)
        return "".join(part.choices[0].text for part in parts) == alone[prompt]

    with ThreadPoolExecutor(8) as pool:
        asked = list(itertools.product(prompts, (True, False)))
        assert all(pool.map(lambda each: ask(*each), asked))


def test_parallel_learning_and_forgetting_end_in_one_state(service: Service) -> None:
    def change(number: int) -> int:
        if number % 2:
            return service.http.post("/forget", json={"source": "a"}).status_code
        return service.learn(f"{TEXT} Number {number}.", "a").status_code

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(change, range(24)))
    assert set(found[::2]) <= {200, 429}
    assert set(found[1::2]) <= {200, 404}
    service.learn(OTHER, "a")
    fresh = MemoryLM(service.lm.model, service.lm.tokenizer, capacity=2000)
    fresh.read(OTHER, source="a")
    expected = [token.log_prob for token in fresh.score(TEXT).tokens]
    assert [token["log_prob"] for token in service.score()["tokens"]] == expected


@pytest.fixture
def endless(tokenizer: Any) -> Iterator[Service]:
    """A service whose model can write 8,000 tokens and never ends a text by itself."""
    from transformers import PreTrainedTokenizerFast

    model = make_model(max_position_embeddings=8192, eos_token_id=None)
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with serving(MemoryLM(model, plain, capacity=2000)) as service:
        yield service


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_ends_its_generation(endless: Service, is_stream: bool) -> None:
    body = {"model": endless.model, "prompt": "The", "max_tokens": 8000, "stream": is_stream}
    if is_stream:
        with endless.http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            endless.http.post("/v1/completions", json=body, timeout=0.5)
    endless.complete(max_tokens=1)  # the model is free again
    assert 1 < endless.read_metric("tokens_written_total") < 4000


def test_what_is_running_when_the_service_stops_ends_with_an_error(endless: Service) -> None:
    parts = endless.complete(max_tokens=8000, stream=True)
    next(iter(parts))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(endless.complete)
        wait_until(lambda: endless.read_metric("waiting") == 1)
        endless.app.state.service.end_all()
        with pytest.raises(openai.APIError, match="stopping"):
            list(parts)
        with pytest.raises(openai.InternalServerError, match="stopping"):
            waiting.result()


# Processes


@pytest.fixture
def run(model: Any, tokenizer: Any, tmp_path: Path) -> Path:
    """A run of a model in a folder, for `mbpa serve`."""
    model.save_pretrained(tmp_path / "heron-2m")
    tokenizer.save_pretrained(tmp_path / "heron-2m")
    lm = MemoryLM(tmp_path / "heron-2m", capacity=100_000)
    lm.save(tmp_path / "run")
    lm.close()
    return tmp_path / "run"


def learn(client: httpx.Client, text: str, source: str) -> httpx.Response:
    return client.post("/learn", json={"text": text, "source": source})


def teach_and_forget(client: httpx.Client, teacher: int, done: dict[str, bool]) -> None:
    """Learn documents, and forget every third, until the server is gone; note what it answered."""
    for number in itertools.count():
        name = f"{teacher}-{number}.md"
        assert learn(client, f"{TEXT} This is {name}.", name).status_code == 200
        done[name] = True
        if number % 3 == 2:
            del done[name]  # it may be there or not until the answer
            assert client.post("/forget", json={"source": name}).status_code == 200
            done[name] = False


@pytest.mark.heavy
def test_a_killed_server_loses_nothing_that_it_acknowledged(run: Path) -> None:
    def score(client: httpx.Client) -> Any:
        answer = client.post("/score", json={"text": TEXT, "origins": 1})
        assert answer.status_code == 200
        return answer.json()

    done: dict[str, bool] = {}
    with Server(run) as server, ThreadPoolExecutor(2) as pool:
        assert "heron-2m, 0 documents, 0 tokens" in "".join(server.output)
        assert learn(server.client, OTHER, "shop.md").status_code == 200
        before = score(server.client)
        assert learn(server.client, TEXT, "heron.md").status_code == 200
        after = score(server.client)
        clients = [open_client(server.url) for _ in range(2)]
        teaching = [pool.submit(teach_and_forget, each, i, done) for i, each in enumerate(clients)]
        wait_until(lambda: len(done) > 12)
        server.kill()
        for each in teaching:
            with pytest.raises(httpx.TransportError):
                each.result()
        for client in clients:
            client.close()
    with Server(run) as server, open_openai(server.url) as client:
        listed = server.client.get("/sources").json()["sources"]
        names = {source["name"] for source in listed}
        for name, is_known in done.items():
            assert (name in names) == is_known, name
        assert {"shop.md", "heron.md"} <= names
        assert len(names - {"shop.md", "heron.md"} - done.keys()) <= 2  # one unanswered per client
        # Without the others, scores are the ones of before, to the bit.
        for name in names - {"shop.md", "heron.md"}:
            assert server.client.post("/forget", json={"source": name}).status_code == 200
        assert score(server.client) == after
        assert server.client.post("/forget", json={"source": "heron.md"}).status_code == 200
        assert score(server.client) == before
        (model,) = [each.id for each in client.models.list()]
        assert model == "heron-2m"
        assert client.completions.create(model=model, prompt="The heron").choices
        assert server.stop() == 0
        assert "everything that was taught is in" in "".join(server.output)
    again = MemoryLM.load(run)
    assert [source.name for source in again.sources()] == ["shop.md"]
    again.close()


def test_a_language_run_has_no_threshold(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mbpa.cli import main

    assert main(["serve", str(run), "--threshold", "0.5"]) == 2
    assert "no threshold" in capsys.readouterr().err


# Documentation


def test_the_examples_of_the_documentation_run(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    code = code.replace("http://127.0.0.1:8000", service.url)
    exec(compile(code, str(DOCS), "exec"), {})
    assert "handbook.md" in capsys.readouterr().out


def test_the_page_of_the_interface_names_every_path(untaught: Service) -> None:
    page = untaught.http.get("/docs").text
    for path in ("/v1/completions", "/v1/chat/completions", "/learn", "/forget", "/score"):
        assert f"<span>POST</span> {path}</h2>" in page
    assert untaught.http.get("/", follow_redirects=True).status_code == 200
