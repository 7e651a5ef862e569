"""The application that any ASGI server runs: routes, keys and limits."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from depthgate.errors import DepthgateError, TooLongError
from depthgate.generation.config import Sampling
from depthgate.generation.engine import Engine
from depthgate.generation.text import Generation, read_prompts
from depthgate.loading import LoadedDecoder
from depthgate.serve.config import ServeConfig
from depthgate.serve.protocol import Answer, RequestError, encode_chat, find_template, read
from depthgate.serve.worker import Job, Worker

GRACE = 5.0  # seconds to send an error after the time is up


class App(Starlette):
    """A model that is served."""

    def __init__(self, model: LoadedDecoder, config: ServeConfig, keys: list[bytes]) -> None:
        self.model, self.config, self.keys = model, config, keys
        self.template = find_template(config.model)
        self.engine = Engine(model, rows=config.rows, memory=config.memory)
        self.worker = Worker(self.engine, config.queue, config.timeout)
        self.stopping = False  # no new requests
        self.card = {"id": config.name, "object": "model", "created": int(time.time()), "owned_by": "depthgate"}
        posts = [Route(f"/v1/{name}", self.complete, methods=["POST"]) for name in ("completions", "chat/completions")]
        lists = [Route("/v1/models", self.models), Route("/v1/models/{name}", self.models)]
        states = [Route("/health", self.health), Route("/metrics", self.figures)]
        errors = dict.fromkeys((DepthgateError, HTTPException, ClientDisconnect, Exception), _refused)
        super().__init__(routes=[*posts, *lists, *states], exception_handlers=errors)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and count answers by status."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start" and scope["path"].startswith("/v1/"):
                self.worker.metrics[f'requests_total{{status="{message["status"]}"}}'] += 1
            await send(message)

        await super().__call__(scope, receive, counted)

    async def health(self, _: Request) -> Response:
        """Say whether requests are taken."""
        said = self.worker.failed or ("stopping" if self.stopping else "ok")
        return _json({"status": said}, 200 if said == "ok" else 503)

    async def figures(self, _: Request) -> Response:
        """Tell Prometheus what was done, and what is under way."""
        now = {"requests_running": self.engine.running, "requests_waiting": self.engine.waiting}
        families: dict[str, list[str]] = {}
        for name, value in {**self.worker.metrics, **now}.items():
            family = name.partition("{")[0].removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
            kind = "histogram" if "_seconds" in name else "counter" if family.endswith("_total") else "gauge"
            lines = families.setdefault(family, [f"# TYPE depthgate_{family} {kind}\n"])
            lines.append(f"depthgate_{name} {value}\n")
        text = "".join(line for lines in families.values() for line in lines)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        """Name the model, alone or as a list of one."""
        name = request.path_params.get("name")
        self._admit(request)
        self._check_model(name)
        return _json(self.card if name else {"object": "list", "data": [self.card]})

    async def complete(self, request: Request) -> ASGIApp:
        """Continue prompts or a conversation."""
        client = self._admit(request)
        arrived = asyncio.get_running_loop().time()
        body = await self._body(request, arrived + self.config.timeout)
        asked = read(body, request.scope["path"].startswith("/v1/chat"))
        self._check_model(asked["model"])
        try:
            wanted = await asyncio.to_thread(self._wanted, asked, client)
            job = self.worker.submit(*wanted, asked["logprobs"], arrived, client)
        except RequestError:
            raise
        except DepthgateError as error:
            code = "context_length_exceeded" if isinstance(error, TooLongError) else None
            raise RequestError(400, str(error), "messages" if "messages" in asked else "prompt", code) from None
        return partial(_reply, job, Answer(asked, [*job.requests.values()], self.model, self.config.name))

    def _admit(self, request: Request) -> object:
        """The client: the key that is shown, or where there are no keys, the address."""
        scheme, _, key = request.headers.get("authorization", "").encode("latin-1").partition(b" ")
        shown = key.strip() if scheme.lower() == b"bearer" else b""
        if self.keys and not any(secrets.compare_digest(shown, key) for key in self.keys):
            raise RequestError(401, "the key is wrong: send Authorization: Bearer KEY", code="invalid_api_key")
        if self.stopping:
            raise RequestError(503, "the server is stopping: ask another one")
        return shown if self.keys else request.client and request.client.host

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.config.name:
            message = f"the model {name[:60]!r} is not here: ask for {self.config.name!r}"
            raise RequestError(404, message, "model", "model_not_found")

    async def _body(self, request: Request, deadline: float) -> bytes:
        body, most = bytearray(), self.config.max_body
        huge = RequestError(413, f"the request has more than {most} bytes: send less")
        if int(request.headers.get("content-length", 0)) > most:
            raise huge  # nothing of it is waited for
        try:
            async with asyncio.timeout_at(deadline):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise huge
        except TimeoutError:
            raise RequestError(408, "the request came too slowly: send it again") from None
        return bytes(body)

    def _wanted(self, asked: dict[str, Any], client: object) -> tuple[list[Generation], list[Sampling]]:
        """Prompts, and the options of the continuations of each, whose seeds follow each other. Unless told, a
        completion has 16 tokens, and the answer in a chat as many as there is room for."""
        most, chat = self.config.max_tokens or self.engine.most, "messages" in asked
        if (asked["max_tokens"] or 0) > most:
            raise RequestError(400, f"max_tokens is {asked['max_tokens']}: ask for at most {most}", "max_tokens")
        given = [encode_chat(self.template, asked["messages"])] if chat else asked["prompt"]
        several = isinstance(given, list) and any(isinstance(each, str | list) for each in given)
        self.worker.check((len(given) if several else 1) * asked["n"], client)  # before tokens are made of them
        prompts = read_prompts(self.model, given)
        usual = max(1, self.engine.most - len(prompts[0].prompt_tokens)) if chat else 16
        seed, length = asked.get("seed", secrets.randbits(62)), asked["max_tokens"] or min(most, usual)
        one = Sampling(**asked["sampling"], max_new_tokens=length)
        return prompts, [replace(one, seed=(seed + i) % 2**63) for i in range(asked["n"])]


async def _reply(job: Job, answer: Answer, scope: Scope, receive: Receive, send: Send) -> None:
    """Send what is said of a job, which ends with it, also where the client leaves or does not read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        job.fail(RequestError(499, "the client has left"))

    watching = asyncio.create_task(watch())
    try:
        async with asyncio.timeout_at(job.deadline + GRACE):
            if answer.asked["stream"]:
                events = (f"data: {event}\n\n" async for event in _events(job, answer))
                headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # nginx would hold events back
                await StreamingResponse(events, 200, headers, "text/event-stream").stream_response(send)
            else:
                told = [event async for news in job.news() for event in news]
                whole = {**answer.head, "choices": [*answer.choices(told)], "usage": answer.usage()}
                await _json(whole)(scope, receive, send)
    except TimeoutError:  # the client does not read
        if cut := scope.get("state", {}).get("cut"):
            cut()
            await watching  # until the server knows
    finally:
        watching.cancel()
        job.close()


async def _events(job: Job, answer: Answer) -> AsyncIterator[str]:
    """Tokens as they come, those together that came while the client was reading; usage; and the end."""
    head = answer.head | ({"usage": None} if answer.asked.get("stream_options", {}).get("include_usage") else {})
    try:
        async for news in job.news():
            for choice in answer.choices(news):
                yield json.dumps({**head, "choices": [choice]})
        if "usage" in head:
            yield json.dumps({**head, "choices": [], "usage": answer.usage()})
        yield "[DONE]"
    except RequestError as error:
        yield json.dumps(error.body)


def _json(value: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    # Not JSONResponse: what is quoted from a request may hold half a surrogate pair, which has no UTF-8.
    return Response(json.dumps(value), status, headers, "application/json")


async def _refused(_: Request, error: Exception) -> Response:
    """An error in the form that OpenAI's clients know. Not in a thread: a server that is told to end at once would not
    wait for it."""
    headers: Any = getattr(error, "headers", None)  # of 405: Allow
    if not isinstance(error, RequestError):
        status = 499 if isinstance(error, ClientDisconnect) else 400 if isinstance(error, DepthgateError) else 500
        said = getattr(error, "detail", str(error)) or type(error).__name__
        error = RequestError(getattr(error, "status_code", status), said)
    return _json(error.body, error.status, {"Retry-After": "1"} if error.status in (429, 503) else headers)
