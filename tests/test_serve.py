"""A real server and the real `openai` client; the tokens are a decoder's own."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

import openai
import pytest
from chat_artifact import TOKENIZER, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from local_server import serving

import export
from artifacts import Target
from export.build import build
from export.options import BuildOptions
from export.sources import read_source
from runtime import stream
from runtime.chat_template import ChatTemplate
from runtime.conversation import chat_prompt
from runtime.decode import Decoder
from runtime.errors import SlotError
from runtime.sampling import SamplingOptions
from runtime.serve_body import COMMON

CHECKPOINT = Path(export.__file__).parent / "demo" / "tiny-hybrid-mtp"
KEY = "a-key-for-these-tests"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("serve") / "counting", eos=())


@pytest.fixture(scope="module")
def port(folder):
    with serving(folder, most_waiting=64) as number:
        yield number


@pytest.fixture(scope="module")
def client(port):
    with openai_client(port) as made:
        yield made


def openai_client(port, key="none", **settings):
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, **settings
    )


@pytest.fixture(scope="module")
def reference(folder):
    """Text, by a decoder that has nothing to do with the server."""
    with Decoder.open(folder) as decoder:

        def text_of(prompt, count):
            ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
            steps = decoder.generate(ids, count)
            return TOKENIZER.decode([token for step in steps for token in step.tokens])

        yield text_of


def chat_ids(folder, messages, **options):
    with Decoder.open(folder) as decoder:
        template = ChatTemplate.of(folder, decoder.manifest)
    return chat_prompt(template, TOKENIZER, messages, options)[0]


def send(port, method, path, body=None, headers=None):
    """One bare request; returns status, headers and body."""
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    given = {"content-type": "application/json"} if body is not None else {}
    connection.request(method, path, body, {**given, **(headers or {})})
    response = connection.getresponse()
    data = response.read()
    connection.close()
    return response.status, response.headers, data


def refusal(port, path, body, **headers):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, _, answer = send(port, "POST", path, data, headers)
    error = json.loads(answer)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return status, error


def metrics(port) -> dict[str, float]:
    status, headers, data = send(port, "GET", "/metrics")
    assert (status, headers["content-type"]) == (
        200,
        "text/plain; version=0.0.4; charset=utf-8",
    )
    values, kinds = {}, {}
    for line in data.decode().splitlines():
        if line.startswith("# "):
            if line.startswith("# TYPE "):
                _, _, name, kinds[name] = line.split(" ")
            continue
        match = re.fullmatch(r'([a-z_]+)(\{[a-z]+="[^"]*"\})? (\S+)', line)
        assert match, line
        assert any(match[1].startswith(name) for name in kinds)
        values[match[1] + (match[2] or "")] = float(match[3])
    return values


def test_a_completion_is_the_decoders_text_with_its_numbers(client, reference):
    got = client.completions.create(model="counting", prompt="Hello", max_tokens=30)
    assert got.object == "text_completion"
    (choice,) = got.choices
    assert (choice.text, choice.finish_reason) == (reference("Hello", 30), "length")
    usage = got.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 30, 35)
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0
    assert got.model == "counting"


def test_sixteen_tokens_where_nobody_says_how_many(client, reference):
    got = client.completions.create(model="counting", prompt=[3, 1, 4], temperature=0)
    assert got.choices[0].text == reference([3, 1, 4], 16)


def test_a_stream_has_the_same_text_and_usage_where_asked(client, reference):
    chunks = list(
        client.completions.create(
            model="counting",
            prompt="Hello",
            max_tokens=30,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *pieces, end, usage = chunks
    assert len(pieces) > 2
    assert "".join(chunk.choices[0].text for chunk in pieces) == reference("Hello", 30)
    assert [chunk.choices[0].finish_reason for chunk in (pieces[0], end)] == [None, "length"]
    assert (usage.choices, usage.usage.completion_tokens) == ([], 30)
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_chat_follows_the_template_and_goes_on_from_the_last_turn(client, folder, reference):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "Hi"}]
    got = client.chat.completions.create(model="counting", messages=messages, max_tokens=20)
    ids = chat_ids(folder, messages)
    message = got.choices[0].message
    assert (message.role, message.content) == ("assistant", reference(ids, 20))
    assert got.usage.prompt_tokens == len(ids)

    messages += [
        {"role": "assistant", "content": message.content},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
    ]
    stream = client.chat.completions.create(
        model="counting",
        messages=messages,
        max_completion_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"chat_template_kwargs": {"think": True}},
    )
    first, *rest, usage = list(stream)
    assert first.choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in rest)
    ids = chat_ids(folder, [*messages[:-1], {"role": "user", "content": "ab"}], think=True)
    assert text == reference(ids, 20)
    assert 0 < usage.usage.prompt_tokens_details.cached_tokens < len(ids)


def test_stop_strings_and_stop_tokens_end_an_answer(client, reference):
    whole = reference("Hello", 60)
    stop = next(c for i, c in enumerate(whole) if i > 5 and whole.index(c) == i)
    got = client.completions.create(
        model="counting", prompt="Hello", max_tokens=60, stop=["never", stop]
    )
    assert (got.choices[0].text, got.choices[0].finish_reason) == (
        whole.split(stop)[0],
        "stop",
    )
    (token,) = TOKENIZER.encode("H")
    got = client.completions.create(
        model="counting",
        prompt="Hello",
        max_tokens=400,
        extra_body={"stop_token_ids": [token], "k": 1},
    )
    assert got.choices[0].text == reference("Hello", 400).split("H")[0]


def test_the_caches_full_is_a_length(client):
    got = client.completions.create(model="counting", prompt=[1] * 505, max_tokens=400)
    assert (got.choices[0].finish_reason, got.usage.completion_tokens) == ("length", 8)
    got = client.completions.create(model="counting", prompt=[1] * 511, max_tokens=400)
    assert got.usage.completion_tokens == 2


def test_models_are_listed(client, port):
    assert [model.id for model in client.models.list()] == ["counting"]
    assert client.models.retrieve("counting").id == "counting"
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        client.models.retrieve("other")


def test_health_and_metrics_tell_what_was_done(client, port):
    assert json.loads(send(port, "GET", "/health")[2]) == {"status": "ok"}
    before = metrics(port)
    got = client.completions.create(model="counting", prompt="Metric", max_tokens=30)
    after = metrics(port)

    def grown(name):
        return after[name] - before.get(name, 0)

    assert grown('mtp_requests_total{outcome="completed"}') == 1
    assert grown("mtp_prompt_tokens_total") == 6
    assert grown("mtp_generated_tokens_total") == 30
    details = got.usage.completion_tokens_details
    accepted = sum(grown(f'mtp_drafts_accepted_total{{position="{p}"}}') for p in (1, 2, 3))
    assert accepted == details.accepted_prediction_tokens
    assert grown("mtp_time_to_first_token_seconds_count") == 1
    assert grown('mtp_time_to_first_token_seconds_bucket{le="+Inf"}') == 1
    assert grown("mtp_tokens_per_step_sum") == pytest.approx(29 / grown("mtp_steps_total"))
    assert after["mtp_queue_length"] == 0


REFUSED = [
    ({"n": 2}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"logit_bias": {"1": 5}}, "logit_bias"),
    ({"logprobs": 3}, "logprobs"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"temperature": 0.5}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 1e400}, None),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": 257}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"seed": -1}, "seed"),
    ({"presence_penalty": 101}, "presence_penalty"),
    ({"tools": [{}]}, "tools"),
    ({"nonsense": 1}, "nonsense"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"x": 1}}, "stream_options"),
    ({"k": 4}, "k"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [10**9]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
]


@pytest.mark.parametrize(("change", "parameter"), REFUSED)
def test_what_cannot_be_is_refused_by_name(port, change, parameter):
    body = {"model": "counting", "prompt": "a", "max_tokens": 3, **change}
    status, error = refusal(port, "/v1/completions", body)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", parameter)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "at least one message"),
        ([], "at least one message"),
        ([3], r"messages\[0\]' must be an object"),
        ([{"role": "tool", "content": "x"}], r"role' is \"tool\"; it must be system"),
        ([{"role": "user"}], "must be a text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "parts of the type text"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "tool_calls' is not"),
        ([{"role": "user", "content": "x"}] * 4097, "give at most 4096"),
    ],
)
def test_messages_that_cannot_be_are_refused(port, messages, message):
    status, error = refusal(port, "/v1/chat/completions", {"messages": messages})
    assert status == 400
    assert re.search(message, error["message"]), error
    assert error["param"].startswith("messages")


def test_values_that_ask_for_nothing_are_taken(client):
    got = client.completions.create(
        model="counting",
        prompt="a",
        max_tokens=2,
        n=1,
        best_of=1,
        logit_bias={},
        echo=False,
        temperature=0.0,
        top_p=1.0,
        seed=7,
        user="me",
        presence_penalty=0,
    )
    assert got.usage.completion_tokens == 2


def test_other_faults_have_their_own_status(port, client):
    path = "/v1/completions"
    assert (
        refusal(port, path, {"model": "other", "prompt": "a"})[1]["code"] == "model_not_found"
    )
    status, error = refusal(port, path, {"prompt": "x" * 600})
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert refusal(port, path, b"{")[0] == 400
    assert refusal(port, path, b"[" * 100_000)[1]["message"] == "the body is nested too deeply"
    assert refusal(port, path, b'{"prompt": "a", "seed": NaN}')[0] == 400
    assert refusal(port, path, b"\xff\xfe")[0] == 400
    assert (
        refusal(port, path, b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}")[0] == 400
    )
    assert refusal(port, path, b" " * (4 * 2**20 + 1))[0] == 413
    assert refusal(port, path, {"prompt": "a"}, **{"content-type": "text/plain"})[0] == 415
    assert refusal(port, "/v1/nothing", {})[0] == 404
    status, _, body = send(port, "GET", path)
    assert (status, json.loads(body)["error"]["type"]) == (405, "invalid_request_error")


def test_without_a_key_only_local_names_are_served(port):
    for host in ("evil.example", "127.0.0.1.evil.example", "[", "", "localhost.evil"):
        status, error = refusal(port, "/v1/completions", {"prompt": "a"}, host=host)
        assert status == 403
        assert "localhost alone" in error["message"]
    for host in ("localhost", "LOCALHOST:80", "[::1]:8000", "127.0.0.1"):
        assert send(port, "GET", "/v1/models", headers={"host": host})[0] == 200


def test_with_a_key_only_who_has_it_is_served(folder):
    with serving(folder, key=KEY) as port:
        with openai_client(port, KEY) as client:
            assert [model.id for model in client.models.list()] == ["counting"]
        for key in ("wrong", KEY[:-1], KEY + "x"):
            refused = pytest.raises(openai.AuthenticationError, match="missing or wrong")
            with openai_client(port, key) as client, refused:
                client.models.list()
        for path in ("/v1/models", "/metrics", "/v1/models/counting"):
            assert send(port, "GET", path)[0] == 401
        assert (
            send(port, "GET", "/v1/models", headers={"authorization": f"Basic {KEY}"})[0]
            == 401
        )
        assert refusal(port, "/v1/chat/completions", b"not even JSON")[0] == 401
        assert send(port, "GET", "/health")[0] == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [*COMMON, "prompt", "messages", "temperature", "top_p", "n", "logit_bias", "user", "seed"]
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system"]) | JSON,
            "content": st.text() | JSON,
        }
    ),
    max_size=3,
)
VALID = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 4)},
    optional={
        "prompt": st.text(max_size=20) | st.lists(st.integers(-1, 300), max_size=5),
        "messages": MESSAGES,
        "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
        "stream": st.booleans(),
        "k": st.integers(-1, 4),
    },
)


@given(
    st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
    VALID,
    st.dictionaries(NAMES | st.text(max_size=6), JSON, max_size=3),
)
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_no_body_makes_the_server_fail(port, path, valid, wild):
    body = {**valid, **wild}
    if not isinstance(body.get("max_tokens"), int) or body["max_tokens"] > 4:
        body["max_tokens"] = 2
    body.pop("max_completion_tokens", None)
    status, headers, data = send(port, "POST", path, json.dumps(body).encode())
    assert status in (200, 400, 404), (status, data)
    if status == 200 and body.get("stream"):
        assert headers["content-type"].startswith("text/event-stream")
        assert data.endswith(b"data: [DONE]\n\n")
        return
    assert ("error" in json.loads(data)) == (status != 200)


@given(st.binary(max_size=60))
@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_bytes_make_the_server_fail(port, data):
    assert send(port, "POST", "/v1/completions", data)[0] == 400


def resident_kilobytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4


def test_two_hundred_requests_from_eight_clients_half_of_them_cancelled(folder, reference):
    """None is mixed up, none hangs, and memory does not grow."""
    prompts = [f"request {number} " for number in range(200)]
    want = {prompt: reference(prompt, 60) for prompt in prompts}

    def one(number):
        prompt = prompts[number]
        stream = client.completions.create(
            model="counting", prompt=prompt, max_tokens=60, stream=True
        )
        text = ""
        for count, chunk in enumerate(stream):
            text += chunk.choices[0].text
            if number % 2 and count == number % 7:
                stream.close()
                return want[prompt].startswith(text) and "cancelled"
        return text == want[prompt] and "completed"

    with serving(folder, most_waiting=16) as port, openai_client(port) as client:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, range(16)))
            before = resident_kilobytes()
            begin = time.monotonic()
            outcomes = list(pool.map(one, range(200)))
            assert time.monotonic() - begin < 60
        assert outcomes == ["cancelled" if n % 2 else "completed" for n in range(200)]
        assert resident_kilobytes() - before < 30_000
        limit = time.monotonic() + 5
        while metrics(port)["mtp_requests_running"] and time.monotonic() < limit:
            time.sleep(0.01)
        counted = metrics(port)
        assert counted["mtp_queue_length"] == counted["mtp_requests_running"] == 0
        ended = sum(n for name, n in counted.items() if name.startswith("mtp_requests_total"))
        assert ended == 216


def test_a_seed_gives_the_text_that_the_decoder_draws_with_it(tmp_path):
    options = BuildOptions(k=2, capacity=256, prefill_rows=64, target=Target("cpu", "float32"))
    build(read_source(CHECKPOINT), tmp_path / "demo", options, run_check=False)
    drawn = {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.5, "seed": 11}
    with Decoder.open(tmp_path / "demo") as decoder:
        wanted = SamplingOptions.parse(drawn)
        whole = "".join(stream(decoder, "def main():", 40, stop_ids=(), sampling=wanted))
        greedy = "".join(stream(decoder, "def main():", 40, stop_ids=()))
    assert whole != greedy
    with serving(tmp_path / "demo") as port, openai_client(port) as client:

        def ask(**more):
            body = {"top_k": 0, "ignore_eos": True}
            got = client.completions.create(
                model="demo", prompt="def main():", max_tokens=40, extra_body=body, **more
            )
            return got.choices[0].text

        assert [ask(**drawn), ask(), ask(**drawn)] == [whole, greedy, whole]
        assert len({ask(temperature=1.5) for _ in range(3)}) > 1


class Held:
    """Lets a decoder's steps pass one by one."""

    def __init__(self, monkeypatch):
        self.gate = threading.Semaphore(0)
        self.steps = 0
        step = Decoder.step

        def held(decoder, k=None):
            assert self.gate.acquire(timeout=20)
            self.steps += 1
            return step(decoder, k)

        monkeypatch.setattr(Decoder, "step", held)

    def reached(self, steps):
        return self.steps == steps

    def let(self, count):
        for _ in range(count):
            self.gate.release()


def wait_until(condition):
    limit = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def test_decoding_stops_within_a_step_when_the_client_leaves(folder, monkeypatch):
    held = Held(monkeypatch)
    with serving(folder) as port:
        for stream in (True, False):
            most = held.steps + 2
            connection = HTTPConnection("127.0.0.1", port, timeout=20)
            body = {"prompt": "hello", "max_tokens": 400, "stream": stream}
            connection.request(
                "POST",
                "/v1/completions",
                json.dumps(body),
                {"content-type": "application/json"},
            )
            held.let(2)
            wait_until(partial(held.reached, most))
            if stream:
                connection.getresponse().close()
            connection.close()
            wait_until(lambda: metrics(port)["mtp_requests_running"] == 1)
            time.sleep(0.4)  # for the server to see it
            held.let(1)
            wait_until(lambda: metrics(port)["mtp_requests_running"] == 0)
            assert held.steps == most + 1
        assert metrics(port)['mtp_requests_total{outcome="cancelled"}'] == 2


def test_a_full_queue_is_429_and_says_when_to_come_back(folder, monkeypatch):
    held = Held(monkeypatch)
    body = json.dumps({"prompt": "hello", "max_tokens": 5}).encode()
    with serving(folder, most_waiting=1) as port, ThreadPoolExecutor(2) as pool:
        running = pool.submit(send, port, "POST", "/v1/completions", body)
        wait_until(lambda: metrics(port)["mtp_requests_running"] == 1)
        waiting = pool.submit(send, port, "POST", "/v1/completions", body)
        wait_until(lambda: metrics(port)["mtp_queue_length"] == 1)
        status, headers, data = send(port, "POST", "/v1/completions", body)
        assert (status, headers["retry-after"]) == (429, "1")
        assert json.loads(data)["error"]["type"] == "rate_limit_error"
        held.let(100)
        assert [running.result()[0], waiting.result()[0]] == [200, 200]
        assert metrics(port)['mtp_requests_total{outcome="queue_full"}'] == 1


def test_a_request_that_takes_too_long_is_ended(folder, monkeypatch):
    held = Held(monkeypatch)
    body = {"prompt": "hello", "max_tokens": 50}
    with serving(folder, timeout=0.3) as port, ThreadPoolExecutor(2) as pool:
        plain = pool.submit(refusal, port, "/v1/completions", body)
        time.sleep(0.5)
        held.let(1)
        status, error = plain.result()
        assert (status, error["code"]) == (504, "timeout")
        data = json.dumps({**body, "stream": True}).encode()
        stream = pool.submit(send, port, "POST", "/v1/completions", data)
        time.sleep(0.5)
        held.let(1)
        status, _, data = stream.result()
        assert status == 200
        assert b'"code": "timeout"' in data
        assert data.endswith(b"data: [DONE]\n\n")
        assert metrics(port)['mtp_requests_total{outcome="timeout"}'] == 2


def test_a_graph_that_fails_is_500_and_the_next_request_runs(folder, monkeypatch, reference):
    step, calls = Decoder.step, []

    def failing(decoder, k=None):
        calls.append(0)
        if len(calls) == 3:
            raise SlotError("the verify graph failed: planted")
        return step(decoder, k)

    with serving(folder) as port:
        monkeypatch.setattr(Decoder, "step", failing)
        status, error = refusal(port, "/v1/completions", {"prompt": "hi", "max_tokens": 50})
        assert (status, error["type"]) == (500, "server_error")
        assert "planted" in error["message"]
        with openai_client(port) as client:
            got = client.completions.create(model="counting", prompt="hi", max_tokens=50)
            assert got.choices[0].text == reference("hi", 50)


def test_stopping_lets_what_runs_finish(folder):
    body = json.dumps({"prompt": "hello", "max_tokens": 300}).encode()
    with ThreadPoolExecutor(3) as pool:
        with serving(folder) as port:
            answers = [pool.submit(send, port, "POST", "/v1/completions", body) for _ in "abc"]
            wait_until(lambda: metrics(port)["mtp_requests_running"] == 1)
        assert [answer.result()[0] for answer in answers] == [200, 200, 200]
