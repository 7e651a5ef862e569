"""Requests that are malformed, huge, hostile or not allowed get a clear 4xx, and the server stays up."""

import http.client
import json
import socket

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthgate.cli import main
from depthgate.serve import protocol

PROMPT = {"prompt": "a", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def ask(server, path="/v1/completions", body=None, method="POST", **headers):
    """Status, headers and the error of an answer, asked without any client's help."""
    line = http.client.HTTPConnection("127.0.0.1", server.port)
    line.request(method, path, body if isinstance(body, bytes | None) else json.dumps(body), headers)
    answer = line.getresponse()
    told = json.loads(answer.read())
    line.close()
    return answer.status, answer.headers, told.get("error", told)


@pytest.fixture(autouse=True)
def _stays_up(request):
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        assert ask(server, "/health", method="GET")[0] == 200
        assert ask(server, body=PROMPT)[0] == 200
        assert server.app.engine.running == server.app.engine.waiting == 0


def test_a_prompt_is_one_sequence_however_long_it_is(start):
    few = start(rows=2, queue=1)
    for prompt in ("x" * 40, [7] * 40, ["x" * 40], [[7] * 40] * 3):
        assert ask(few, body={**PROMPT, "prompt": prompt})[0] == 200
    for prompt, n in ((["x"] * 4, 1), ([[7]] * 2, 2), ("x", 4)):
        status, _, error = ask(few, body={**PROMPT, "prompt": prompt, "n": n})
        assert (status, error["message"][:29]) == (400, "4 sequences are too many: ask")


def test_a_body_that_says_how_huge_it_is_is_refused_before_it_comes(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as line:
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n{")
        assert line.recv(100).startswith(b"HTTP/1.1 413")


WRONG = [  # what is sent, the parameter to blame, and a part of what is said
    ({"temperature": -1}, "temperature", "temperature is -1"),
    ({"temperature": "hot"}, "temperature", "temperature is 'hot'"),
    ({"temperature": True}, "temperature", "True"),
    ({"top_p": 0}, "top_p", r"(0, 1]"),
    ({"top_k": 0}, "top_k", "whole number"),
    ({"min_p": 1.5}, "min_p", "[0, 1]"),
    ({"repetition_penalty": 0}, "repetition_penalty", "(0, inf)"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
    ({"max_tokens": 10**40}, "max_tokens", "whole number"),
    ({"max_tokens": 2.5}, "max_tokens", "2.5"),
    ({"n": 0}, "n", "n is 0"),
    ({"n": 129}, "n", "128"),
    ({"seed": -1}, "seed", "seed is -1"),
    ({"seed": [1, 2]}, "seed", "seed is [1, 2]"),
    ({"stop": ""}, "stop", "none of them empty"),
    ({"stop": ["a"] * 5}, "stop", "at most 4"),
    ({"stop": "x" * 1000}, "stop", "256 characters"),
    ({"stop": {"a": 1}}, "stop", "stop is"),
    ({"stream": 1}, "stream", "true or false"),
    ({"stream_options": {"other": True}}, "stream_options", "include_usage"),
    ({"stream_options": {"include_usage": "x"}}, "stream_options", "'include_usage': 'x'"),
    ({"model": 3}, "model", "text"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "not supported"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
    ({"best": 1}, "best", "not a known parameter"),
    ({"\ud800": 1}, "\ud800", "not a known parameter"),
]


@pytest.mark.parametrize(("given", "param", "words"), WRONG, ids=[str(wrong[0])[:40] for wrong in WRONG])
def test_wrong_parameters_are_named(server, given, param, words):
    for path, usual in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
        status, _, error = ask(server, path, {**usual, **given})
        assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
        assert words in error["message"]


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ({"prompt": None}, "prompt", "missing"),
        ({"prompt": {"a": 1}}, "prompt", "token ids"),
        ({"prompt": ""}, None, "empty"),
        ({"prompt": []}, None, "empty"),
        ({"prompt": [[]]}, None, "empty"),
        ({"prompt": [1, "a"]}, None, "a prompt is 1"),
        ({"prompt": [257]}, None, "from 0 to 256"),
        ({"prompt": [-1]}, None, "from 0 to 256"),
        ({"prompt": [True]}, None, "True"),
        ({"prompt": [[[1]]]}, None, "token id"),
        ({"prompt": "\ud800"}, None, "surrogate"),
        ({"prompt": "x" * 256}, None, "context is 256"),
        ({"prompt": ["a"] * 400}, None, "320 at a time"),
        ({"logprobs": 6}, "logprobs", "from 0 to 5"),
        ({"logprobs": True}, "logprobs", "True"),
        ({"echo": True}, "echo", "not supported"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"best_of": 2}, "best_of", "not supported"),
    ],
)
def test_wrong_completions(server, given, param, words):
    status, _, error = ask(server, body={**PROMPT, **given})
    assert (status, error["param"]) == (400, param)
    assert words in error["message"]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": 1, "content": "a"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": []}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None),
        ({"messages": [{"role": "user", "content": "<|endoftext|>" * 50_000}]}, None),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"prompt": "a"}, "prompt"),
    ],
)
def test_wrong_chats(server, given, param):
    status, _, error = ask(server, "/v1/chat/completions", {**CHAT, **given})
    assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"3", b"null", b'"a"', b"\xff\xfe{}", b'{"prompt": "\xc3"}', b"\x00" * 100),
        *(b'{"temperature": NaN}', b'{"temperature": -Infinity}', b'{"seed": ' + b"9" * 9999 + b"}"),
        b'{"temperature": 1e999, "prompt": "a"}',
        *(b"[" * 100_000, b'{"a":' * 100_000),
    ],
    ids=lambda body: repr(body[:20]),
)
def test_bodies_that_are_not_requests(server, body):
    status, _, error = ask(server, body=body)
    assert (status, error["type"]) == (400, "invalid_request_error")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from([2**63, -1e308]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted(protocol.COMPLETION | protocol.CHAT)), JSON, max_size=4), st.booleans())
def test_whatever_is_sent_no_request_fails_the_server(server, given, chat):
    usual = CHAT if chat else PROMPT
    line = http.client.HTTPConnection("127.0.0.1", server.port)
    line.request("POST", "/v1/chat/completions" if chat else "/v1/completions", json.dumps({**usual, **given}))
    answer = line.getresponse()
    told = answer.read()
    assert answer.status in (200, 400, 404), told
    assert answer.status != 200 or b'"error"' not in told
    line.close()


def test_neutral_values_of_what_is_not_done_are_taken(server):
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "best_of": 1, "echo": False}
    assert ask(server, body={**PROMPT, **neutral, "suffix": None, "user": "me", "stop": None, "seed": None})[0] == 200


def test_unknown_models_places_and_methods(server):
    status, _, error = ask(server, body={**PROMPT, "model": "gpt"})
    assert (status, error["code"], error["type"]) == (404, "model_not_found", "not_found_error")
    assert "'tiny'" in error["message"]
    assert ask(server, "/v1/embeddings", PROMPT)[0] == 404
    assert ask(server, "/../../etc/passwd", method="GET")[0] == 404
    assert ask(server, body=PROMPT, Host="[::1")[0] == 200
    assert ask(server, method="GET")[0] == 405
    assert ask(server, method="DELETE")[0] == 405


def test_what_is_not_http_is_refused(server):
    with socket.create_connection(("127.0.0.1", server.port)) as line:
        line.sendall(b"\x16\x03\x01 what is this\r\n\r\n")
        assert line.recv(100).startswith(b"HTTP/1.1 400")


def test_huge_bodies_are_refused_before_they_are_read(start):
    server = start(max_body=1000)
    assert ask(server, body={"prompt": "a" * 100, "max_tokens": 1})[0] == 200
    status, _, error = ask(server, body={"prompt": "a" * 1000})
    assert (status, "1000 bytes" in error["message"]) == (413, True)
    with socket.create_connection(("127.0.0.1", server.port)) as line:  # the rest never comes
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n" + b"a" * 1001)
        assert line.recv(100).startswith(b"HTTP/1.1 413")
    with socket.create_connection(("127.0.0.1", server.port)) as line:
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        line.sendall(b"400\r\n" + b"a" * 1024 + b"\r\n")
        assert line.recv(100).startswith(b"HTTP/1.1 413")


def test_a_body_that_does_not_end_is_given_up(start):
    server = start(timeout=0.2)
    with socket.create_connection(("127.0.0.1", server.port)) as line:
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        assert line.recv(100).startswith(b"HTTP/1.1 408")


def test_keys(start, tmp_path):
    (tmp_path / "keys").write_text("one\n\n two \n")
    server = start(api_key_file=str(tmp_path / "keys"))
    for key in ("one", "two"):
        assert [each.id for each in server.client(key=key).models.list()] == ["tiny"]
        assert server.client(key=key).completions.create(model="tiny", prompt="a", max_tokens=1).choices
    for key in ("three", "on", "one two", "önë"):
        for path, method in (("/v1/completions", "POST"), ("/v1/models", "GET")):
            status, _, error = ask(server, path, b"{", method, Authorization=f"Bearer {key}".encode())
            assert (status, error["code"], error["type"]) == (401, "invalid_api_key", "authentication_error")
    assert ask(server, body=PROMPT)[0] == ask(server, body=PROMPT, Authorization="Basic one")[0] == 401
    with pytest.raises(openai.AuthenticationError):
        server.client().models.list()
    assert ask(server, "/health", method="GET")[0] == 200


def test_limits_on_tokens_and_memory(start):
    server = start(max_tokens=8, rows=1, memory=256)
    status, _, error = ask(server, body={"prompt": "a", "max_tokens": 9})
    assert (status, error["param"]) == (400, "max_tokens")
    status, _, answer = ask(server, "/v1/chat/completions", {**CHAT, "max_tokens": None, "temperature": 0})
    assert status == 200
    assert answer["usage"]["completion_tokens"] <= 8


def test_no_template_no_chat(folder, start, monkeypatch):
    server = start()
    server.app.template = None
    status, _, error = ask(server, "/v1/chat/completions", CHAT)
    assert (status, error["param"]) == (400, "messages")
    assert "/v1/completions" in error["message"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model=nowhere"], "nowhere is not a folder"),
        (["--api-key-file=/nowhere"], "api_key_file is /nowhere"),
        (["--api-key-file=/dev/null"], "it has no keys"),
        (["--rows=0"], "rows is 0"),
        (["--port=99999"], "port is 99999"),
        (["--memory=3"], "memory is 3"),
        (["--host=nowhere.invalid"], "cannot listen on nowhere.invalid"),
    ],
)
def test_the_command_says_what_is_wrong(folder, capsys, options, words):
    assert main(["serve", "--model", folder, "--port=0", *options]) == 2
    assert words in capsys.readouterr().err


def test_a_port_in_use(folder, server, capsys):
    assert main(["serve", "--model", folder, "--port", str(server.port)]) == 2
    assert f"port {server.port} (Address already in use): name another" in capsys.readouterr().err
