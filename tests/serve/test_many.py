"""Many clients at once, those that leave, those that do not read, limits, faults, and the end."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading

import openai
import pytest
import torch

import depthgate as dg
from depthgate.data.tokenizer import ByteTokenizer
from depthgate.loading import LoadedDecoder
from depthgate.serve import worker
from depthgate.serve.app_starlette import App
from depthgate.serve.config import ServeConfig
from depthgate.serve.listen_uvicorn import Line
from tests.serve.test_refusals import PROMPT, ask

LONG = {"prompt": "a", "max_tokens": 200, "temperature": 0.9, "seed": 1}


def until(state):
    """Wait for a state, which another thread brings about."""
    gone = threading.Event()
    while not state():
        gone.wait(0.005)


def empty(server):
    return lambda: server.app.engine.running == server.app.engine.waiting == 0


def test_nobody_gets_anothers_tokens(start, model):
    """Clients of random lengths, more than there are rows; every third leaves when it has read a little."""
    server, draw = start(rows=5, memory=1024), random.Random(0)
    todo = [
        {"prompt": "".join(draw.choices("the quickbrown", k=draw.randint(1, 60))), "seed": i,
         "max_tokens": draw.randint(1, 60)}
        for i in range(36)
    ]  # fmt: skip

    async def one(client, i, asked):
        if i % 3 == 1:
            return (await client.completions.create(model="tiny", **asked)).choices[0].text
        text, read = "", 0
        async with await client.completions.create(model="tiny", stream=True, **asked) as stream:
            async for part in stream:
                text, read = text + part.choices[0].text, read + 1
                if i % 3 == 2 and read == 2:
                    return text
        return text

    async def all_of_them():
        client = server.client(openai.AsyncOpenAI)
        try:
            return await asyncio.gather(*(one(client, i, asked) for i, asked in enumerate(todo)))
        finally:
            await client.close()

    found = asyncio.run(all_of_them())
    for i, (asked, text) in enumerate(zip(todo, found, strict=True)):
        (result,) = dg.generate(model, asked["prompt"], max_new_tokens=asked["max_tokens"], seed=asked["seed"])
        assert result.text.startswith(text) if i % 3 == 2 else result.text == text
    until(empty(server))
    assert server.app.worker.jobs == {}


def test_a_client_that_leaves_frees_its_row_at_once(start):
    server = start(rows=1)
    for stream in (True, False):
        body = json.dumps({**LONG, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with server.held():
            with socket.create_connection(("127.0.0.1", server.port)) as line:
                line.sendall(head + body)
                until(lambda: server.app.worker.jobs)
            until(lambda: not server.app.worker.jobs)  # not a token has come
        until(empty(server))
        assert ask(server, body=PROMPT)[0] == 200


def test_a_full_queue_says_when_to_come_back(start):
    server = start(rows=1, queue=4)
    answers = []
    with server.held():
        waiting = [threading.Thread(target=lambda: answers.append(ask(server, body=PROMPT)[0])) for _ in range(3)]
        for each in waiting:
            each.start()
        until(lambda: len(server.app.worker.jobs) == 3)
        status, headers, error = ask(server, body=PROMPT)
        assert (status, error["type"], error["code"]) == (429, "rate_limit_error", "queue_full")
        assert int(headers["Retry-After"]) >= 1
        with pytest.raises(openai.RateLimitError):
            server.client().completions.create(model="tiny", **PROMPT)
    for each in waiting:
        each.join()
    assert answers == [200] * 3
    status, _, error = ask(server, body={**PROMPT, "n": 4})
    assert (status, "at most 3" in error["message"]) == (400, True)


@pytest.mark.parametrize("how", ["address", "key"])
def test_clients_take_turns_and_none_fills_the_queue(start, tmp_path, how):
    """Of two clients, told apart by their keys or their addresses (one proxy, on this machine, is trusted)."""
    (tmp_path / "keys").write_text("a\nb\n")
    server = start(rows=1, queue=4, **({"api_key_file": str(tmp_path / "keys")} if how == "key" else {}))
    name, values = (
        ("Authorization", ("Bearer a", "Bearer b")) if how == "key" else ("X-Forwarded-For", ("10.1", "10.2"))
    )
    one, two = ({name: value} for value in values)
    order = []

    def wait(who, headers):
        before = len(server.app.worker.jobs)
        asked = threading.Thread(target=lambda: (ask(server, body=PROMPT, **headers), order.append(who)))
        asked.start()
        until(lambda: len(server.app.worker.jobs) > before)
        return asked

    with server.held():
        waiting = [wait("one", one) for _ in range(3)]
        assert ask(server, body=PROMPT, **one)[0] == 429
        waiting += [wait("two", two) for _ in range(2)]
        assert ask(server, body=PROMPT, **two)[0] == 429  # now all of it is full
    for each in waiting:
        each.join()
    assert order.index("two") <= 1  # as soon as what ran had ended
    assert sorted(order) == ["one"] * 3 + ["two"] * 2


def test_a_client_whose_rows_others_have_does_not_fill_the_queue(start, tmp_path):
    (tmp_path / "keys").write_text("a\nb\nc\n")
    server = start(rows=4, queue=8, api_key_file=str(tmp_path / "keys"))
    answers = []
    four = {**PROMPT, "n": 4}

    def wait(key):
        before, headers = len(server.app.worker.jobs), {"Authorization": f"Bearer {key}"}
        asked = threading.Thread(target=lambda: answers.append(ask(server, body=four, **headers)[0]))
        asked.start()
        until(lambda: len(server.app.worker.jobs) == before + 4)
        return asked

    with server.held():
        waiting = [wait("a"), wait("b")]  # the first has all rows
        assert ask(server, body=PROMPT, Authorization="Bearer b")[0] == 429
        waiting.append(wait("c"))
    for each in waiting:
        each.join()
    assert answers == [200] * 3


def test_time_is_limited(start):
    server = start(timeout=0.2)
    with server.held():
        status, _, error = ask(server, body=LONG)
        assert (status, error["type"]) == (504, "server_error")
        assert server.app.worker.jobs == {}
        with pytest.raises(openai.APIError, match="longer than the server allows"):
            list(server.client().completions.create(model="tiny", stream=True, **LONG))
        assert server.app.worker.jobs == {}
    until(empty(server))
    assert ask(server, body=PROMPT)[0] == 200


def asgi(app, send, body):
    """Call an application as a server does; the client stays connected."""
    sent = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive():
        return sent.pop() if sent else await asyncio.Event().wait()

    path = "/v1/completions"
    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "server": None}
    return app({**scope, "asgi": {"version": "3.0", "spec_version": "2.3"}}, receive, send)


def test_a_client_that_does_not_read_holds_nobody(start, monkeypatch):
    monkeypatch.setattr(worker, "MOST_UNREAD", 5)
    server, told = start(), []

    async def main():
        stuck, reads = asyncio.Event(), asyncio.Event()

        async def send(message):
            told.append(message.get("body", b""))
            if len(told) == 3:
                stuck.set()
                await reads.wait()

        call = asyncio.create_task(asgi(server.app, send, {**LONG, "n": 8, "stream": True}))
        await stuck.wait()
        while not empty(server)():  # though nobody reads
            await asyncio.sleep(0.005)
        assert server.app.worker.jobs == {}
        reads.set()
        await call

    asyncio.run(main())
    assert b"read too slowly" in told[-2]
    assert ask(server, body=PROMPT)[0] == 200


def test_a_client_that_never_reads_again_is_dropped(start, monkeypatch):
    monkeypatch.setattr("depthgate.serve.app_starlette.GRACE", 0.1)
    server = start(timeout=0.3)

    async def send(message):
        await asyncio.Event().wait()

    asyncio.run(asgi(server.app, send, {**LONG, "stream": True}))
    assert server.app.worker.jobs == {}


def test_a_connection_that_is_never_read_is_cut_off_without_a_word(start, monkeypatch, capsys):
    lost, real, made = threading.Event(), Line.connection_lost, Line.connection_made

    def small(self, transport):
        made(self, transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    monkeypatch.setattr(Line, "connection_made", small)
    monkeypatch.setattr("depthgate.serve.app_starlette.GRACE", 0.1)
    monkeypatch.setattr(Line, "connection_lost", lambda *_: (real(*_), lost.set()))
    server, body = start(timeout=1), json.dumps({**LONG, "n": 64, "stream": True, "logprobs": 5}).encode()
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        line.connect(("127.0.0.1", server.port))
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        lost.wait()
    assert server.stop() == 0
    assert capsys.readouterr().err == ""


def test_logits_that_are_not_finite_fail_that_request_alone(start):
    server = start()
    weight = server.app.model.embed.weight
    kept = weight.data[ord("z")].clone()
    weight.data[ord("z")] = torch.nan
    for stream in (False, True):
        with pytest.raises(openai.APIError, match="have NaN"):
            list(server.client().completions.create(model="tiny", prompt="z", stream=stream))
    weight.data[ord("z")] = kept
    assert ask(server, body=PROMPT)[0] == 200
    assert empty(server)()


def answered(app, body):
    """The answer of an application without a server around it."""
    told = []

    async def send(message):
        told.append(message.get("body", message.get("status")))

    asyncio.run(asgi(app, send, body))
    return told[0], json.loads(b"".join(told[1:]))


def random_model(**shape):
    torch.manual_seed(0)
    model = LoadedDecoder(dg.ModelConfig(**{"dim": 16, "layers": 2, "heads": 2} | shape)).eval()
    model.tokenizer = ByteTokenizer()
    return model


def test_ids_that_the_tokenizer_does_not_know_have_no_text(folder):
    """As in models whose vocabulary was made round."""
    model = random_model(vocab=400)
    (result,) = dg.generate(model, "abc", max_new_tokens=60, seed=1)
    assert max(result.tokens) > 256
    assert result.text == model.tokenizer.decode([i for i in result.tokens if i < 257])
    asked = {"prompt": "abc", "max_tokens": 60, "seed": 1, "logprobs": 5}
    status, answer = answered(App(model, ServeConfig(model=folder), []), asked)
    assert (status, answer["choices"][0]["text"]) == (200, result.text)


def test_a_request_that_never_fits_into_memory_is_refused(folder):
    app = App(random_model(context=600), ServeConfig(model=folder, memory=300), [])
    status, answer = answered(app, {"prompt": "a" * 200, "max_tokens": 100})
    assert (status, "there is memory for 256" in answer["error"]["message"]) == (400, True)


def test_an_engine_that_fails_is_told_to_all(start):
    server, failures = start(), []
    with server.held(lambda: 1 / 0):
        waiting = [threading.Thread(target=lambda: failures.append(ask(server, body=LONG))) for _ in range(2)]
        for each in waiting:
            each.start()
        until(lambda: len(server.app.worker.jobs) == 2)
    for each in waiting:
        each.join()
    assert [(status, error["type"]) for status, _, error in failures] == [(500, "server_error")] * 2
    assert ask(server, "/health", method="GET")[0] == 503
    assert ask(server, body=PROMPT)[0] == 503
    assert ask(server, "/v1/models", method="GET")[0] == 200


def test_a_server_that_stops_finishes_what_it_has(start, model):
    server = start()
    found = []
    (expected,) = dg.generate(model, LONG["prompt"], max_new_tokens=200, temperature=0.9, seed=1)
    reader = threading.Thread(
        target=lambda: found.extend(server.client().completions.create(model="tiny", stream=True, **LONG))
    )
    with server.held():
        reader.start()
        until(lambda: server.app.worker.jobs)
        server.app.stopping = True
        assert ask(server, "/health", method="GET")[0] == 503
        status, headers, _ = ask(server, body=PROMPT)
        assert (status, headers["Retry-After"]) == (503, "1")
    reader.join()
    assert "".join(part.choices[0].text for part in found) == expected.text
    assert server.stop() == 0
    assert server.app.worker._turning.done()


@pytest.fixture
def process(folder):
    """`depthgate serve` as a process of its own."""
    command = [sys.executable, "-m", "depthgate", "serve", "--model", folder, "--port=0", "--device=cpu", "--json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as found:
        told = json.loads(found.stdout.readline())
        assert told["model"] == "tiny"
        found.port = int(told["url"].rpartition(":")[2])
        yield found
        found.kill()


def test_a_signal_ends_gracefully_and_a_second_at_once(process):
    assert ask(process, body=PROMPT)[0] == 200
    with socket.create_connection(("127.0.0.1", process.port)) as line:  # a request that never ends
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n"
        line.sendall(head)
        assert line.recv(100).startswith(b"HTTP/1.1 100")  # it is being read
        process.send_signal(signal.SIGTERM)
        until(lambda: ask(process, "/health", method="GET")[0] == 503)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 130
    assert process.stderr.read() == ""


def test_a_signal_lets_a_stream_end(process):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{process.port}/v1", api_key="none", max_retries=0)
    stream = client.completions.create(model="tiny", stream=True, **LONG)
    first = next(stream)
    process.send_signal(signal.SIGTERM)
    parts = [first, *stream]
    assert parts[-1].choices[0].finish_reason in ("length", "stop")
    assert process.wait() == 0
