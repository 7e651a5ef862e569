"""Requests that are malformed, huge, hostile or not allowed get a clear 4xx, and the server stays up."""

import http.client
import json
import socket

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthgate.cli import main
from depthgate.commands import serve
from depthgate.serve import listen_uvicorn, protocol
from depthgate.serve.config import ServeConfig

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
    few = start(rows=2, queue=2)
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
    ({"temperature": "hot"}, "temperature", 'temperature is "hot"'),
    ({"temperature": True}, "temperature", "temperature is true"),
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
    ({"stream_options": {"include_usage": "x"}}, "stream_options", 'stream_options.include_usage is "x"'),
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
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": [1, "a"]}, "prompt", "a prompt is 1"),
        ({"prompt": [257]}, "prompt", "from 0 to 256"),
        ({"prompt": [-1]}, "prompt", "from 0 to 256"),
        ({"prompt": [True]}, "prompt", "True"),
        ({"prompt": [[[1]]]}, "prompt", "token id"),
        ({"prompt": "\ud800"}, "prompt", "surrogate"),
        ({"prompt": "x" * 256}, "prompt", "context is 256"),
        ({"prompt": ["a"] * 400}, None, "192 at a time"),
        ({"logprobs": 6}, "logprobs", "from 0 to 5"),
        ({"logprobs": True}, "logprobs", "logprobs is true"),
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
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{"id": "a"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "<|endoftext|>" * 50_000}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"prompt": "a"}, "prompt"),
    ],
)
def test_wrong_chats(server, given, param):
    status, _, error = ask(server, "/v1/chat/completions", {**CHAT, **given})
    assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("hi", 'messages[1] is "hi": it must be an object'),
        (None, "messages[1] is null"),
        ({"content": "a"}, "messages[1].role is null: it must be text"),
        ({"role": ["user"], "content": "a"}, 'messages[1].role is ["user"]: it must be text'),
        ({"role": "user", "content": None}, "messages[1].content is null: it must be text, or a list"),
        ({"role": "user", "content": True}, "messages[1].content is true"),
        ({"role": "user", "content": []}, "messages[1].content is []: it must be text"),
        ({"role": "user", "content": "a", "name": 3}, "messages[1].name is 3"),
        ({"role": "user", "content": "a", "tool_call_id": "x"}, "messages[1].tool_call_id is not supported"),
        ({"role": "user", "content": ["a"]}, 'messages[1].content[0] is "a": it must be an object'),
        ({"role": "user", "content": [{"text": "a"}]}, "messages[1].content[0].type is null"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text is null: it must be text"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "text": "b"}]},
            'messages[1].content[1].type is "image_url", which is not supported: give "text"',
        ),
    ],
)
def test_messages_are_refused_by_their_number_and_field(server, message, words):
    given = {"messages": [CHAT["messages"][0], message]}
    status, _, error = ask(server, "/v1/chat/completions", {**CHAT, **given})
    assert (status, error["param"]) == (400, "messages")
    assert error["message"].startswith(words)


def test_fields_of_messages_that_are_null_count_as_not_given(server):
    given = {**CHAT, "seed": 1, "messages": [{"role": "user", "content": "hi", "name": None, "tool_calls": None}]}
    answers = [ask(server, "/v1/chat/completions", each) for each in (given, {**CHAT, "seed": 1})]
    assert [answer[2]["choices"] for answer in answers] == [answers[0][2]["choices"]] * 2


def test_what_is_too_long_for_the_model_has_its_code(start):
    server = start(memory=256)
    for path, asked in (
        ("/v1/completions", {"prompt": "x" * 256}),
        ("/v1/completions", {"prompt": ["x", "x" * 300]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 256}]}),
    ):
        status, _, error = ask(server, path, asked)
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] in asked


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
    tools = {"tools": [], "tool_choice": "none", "functions": [], "function_call": "none", "parallel_tool_calls": True}
    others = {"store": False, "modalities": ["text"], "service_tier": "auto", "metadata": {}}
    stream = {"stream_options": {"include_usage": False, "include_obfuscation": False}}
    said = {"role": "assistant", "content": "b", "annotations": [], "tool_calls": [], "refusal": None}
    talk = {"messages": [*CHAT["messages"], said, *CHAT["messages"]], "prediction": None, "top_logprobs": 0}
    assert ask(server, "/v1/chat/completions", {**CHAT, **tools, **others, **stream, **talk})[0] == 200
    for name, value in {"store": True, "tool_choice": "auto", "service_tier": "flex", "metadata": {"a": "b"}}.items():
        status, _, error = ask(server, "/v1/chat/completions", {**CHAT, name: value})
        assert (status, error["param"]) == (400, name)
        assert f"{name} is {json.dumps(value)}, which is not supported" in error["message"]


def test_a_body_that_goes_wrong_after_its_answer_is_cut_off_without_a_word(server, caplog):
    with socket.create_connection(("127.0.0.1", server.port)) as line:
        line.sendall(b"POST /v1/nope HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert b"404" in line.recv(1000)
        line.sendall(b"zz\r\n")
        while not cut_off(line):  # after the rest of the answer
            pass
    assert ask(server, "/health", method="GET")[0] == 200
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_unknown_models_places_and_methods(server):
    status, _, error = ask(server, body={**PROMPT, "model": "gpt"})
    assert (status, error["code"], error["type"]) == (404, "model_not_found", "not_found_error")
    assert "'tiny'" in error["message"]
    assert ask(server, "/v1/embeddings", PROMPT)[0] == 404
    assert ask(server, "/../../etc/passwd", method="GET")[0] == 404
    assert ask(server, body=PROMPT, Host="[::1")[0] == 200
    for method in ("GET", "DELETE"):
        status, headers, error = ask(server, method=method)
        assert (status, headers["Allow"], error["message"]) == (405, "POST", "Method Not Allowed")


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
    (tmp_path / "keys").write_text("one\n\n two \n#three\n# a comment\n")
    server = start(api_key_file=str(tmp_path / "keys"))
    for key in ("one", "two"):
        assert [each.id for each in server.client(key=key).models.list()] == ["tiny"]
        assert server.client(key=key).completions.create(model="tiny", prompt="a", max_tokens=1).choices
    for key in ("three", "#three", "on", "one two", "önë"):
        for path, method in (("/v1/completions", "POST"), ("/v1/models", "GET")):
            status, _, error = ask(server, path, b"{", method, Authorization=f"Bearer {key}".encode())
            assert (status, error["code"], error["type"]) == (401, "invalid_api_key", "authentication_error")
    assert ask(server, body=PROMPT)[0] == ask(server, body=PROMPT, Authorization="Basic one")[0] == 401
    with pytest.raises(openai.AuthenticationError):
        server.client().models.list()
    assert ask(server, "/health", method="GET")[0] == 200


def read_to(line, end):
    told = b""
    while not told.endswith(end):
        told += line.recv(1000)


def cut_off(line):
    """Wait until a connection was closed, also by force."""
    try:
        return line.recv(100) == b""
    except ConnectionResetError:
        return True


def test_a_head_that_does_not_end_is_given_up(start, monkeypatch):
    monkeypatch.setattr(listen_uvicorn, "HEAD", 0.2)
    server = start()
    for before in (b"", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"):
        for part in (b"", b"POST /v1/completions HTTP/1.1\r\nX: "):
            with socket.create_connection(("127.0.0.1", server.port)) as line:
                line.sendall(before)
                read_to(line, b'{"status": "ok"}' if before else b"")
                line.sendall(part)
                assert cut_off(line)


def test_a_body_that_comes_after_its_answer_holds_no_connection(start, monkeypatch):
    monkeypatch.setattr(listen_uvicorn, "HEAD", 0.2)
    server = start()
    with socket.create_connection(("127.0.0.1", server.port)) as line:
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n")
        read_to(line, b"}}")
        line.sendall(b"a")
        assert cut_off(line)


def test_connections_are_limited(start, monkeypatch):
    monkeypatch.setattr(listen_uvicorn, "MOST", 2)
    server = start()
    with socket.create_connection(("127.0.0.1", server.port)):
        assert ask(server, body=PROMPT)[0] == 200
        with socket.create_connection(("127.0.0.1", server.port)) as second:
            second.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            read_to(second, b'{"status": "ok"}')
            with socket.create_connection(("127.0.0.1", server.port)) as third:
                assert cut_off(third)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (b"my secret key\n", "a line of it has a space between words"),
        (b"one\n\xff\xfe\n", "it cannot be read as text in UTF-8"),
        (None, "Is a directory"),
        (b" \n\n", "it has no keys"),
    ],
)
def test_files_that_are_no_keys(folder, tmp_path, capsys, keys, words):
    path = tmp_path if keys is None else tmp_path / "keys"
    if keys is not None:
        path.write_bytes(keys)
    assert main(["serve", "--model", folder, "--port=0", "--api_key_file", str(path)]) == 2
    told = capsys.readouterr().err
    assert f"api_key_file is {path}: " in told
    assert words in told
    assert "name a file with one key" in told
    assert "secret key" not in told


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


def test_a_port_that_another_got_while_the_model_was_loaded(folder, capsys, monkeypatch):
    with serve.bound("127.0.0.1", 0) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr(serve, "build", lambda *_: other.listen())
        assert main(["serve", "--model", folder, "--port", str(port)]) == 2
    assert f"port {port} (Address already in use): name another" in capsys.readouterr().err


def test_a_model_is_called_as_its_folder(folder, monkeypatch):
    monkeypatch.chdir(f"{folder}/tokenizer")
    assert ServeConfig(model="..").name == ServeConfig(model=folder).name == "tiny"
