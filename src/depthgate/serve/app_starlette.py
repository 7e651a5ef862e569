"""The application that any ASGI server runs: routes, keys and limits."""

import asyncio
import json
import os
import secrets
import time
from contextlib import suppress
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from depthgate.errors import DepthgateError
from depthgate.generation.engine import Engine
from depthgate.generation.text import Generation, read_prompts
from depthgate.loading import LoadedDecoder
from depthgate.serve.answer import Answer
from depthgate.serve.asked import Asked, RequestError, read
from depthgate.serve.chat import ChatTemplate
from depthgate.serve.config import ServeConfig
from depthgate.serve.metrics import Metrics
from depthgate.serve.worker import Worker

GRACE = 5.0  # seconds to send an error after the time is up


class App:
    """A model that is served."""

    def __init__(self, model: LoadedDecoder, config: ServeConfig, keys: list[bytes]) -> None:
        self.model, self.config, self.keys = model, config, keys
        self.metrics, self.template = Metrics(), ChatTemplate(config.model)
        self.engine = Engine(model, rows=config.rows, memory=config.memory or _room(model, config.rows))
        self.worker = Worker(self.engine, config.rows + config.queue, self.metrics)
        self.stopping = False  # no new requests
        self.busy = 0  # requests that are being answered
        self.card = {"id": config.name, "object": "model", "created": int(time.time()), "owned_by": "depthgate"}
        posts = [Route(f"/v1/{name}", self.complete, methods=["POST"]) for name in ("completions", "chat/completions")]
        lists = [Route("/v1/models", self.models), Route("/v1/models/{name}", self.models)]
        states = [Route("/health", self.health), Route("/metrics", self.figures)]
        errors = dict.fromkeys((DepthgateError, HTTPException, ClientDisconnect, Exception), _refused)
        self.routed = Starlette(routes=[*posts, *lists, *states], exception_handlers=errors)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.statuses[message["status"]] += 1
            await send(message)

        counts = scope["type"] == "http" and scope["path"].startswith("/v1/")
        self.busy += counts
        try:
            await self.routed(scope, receive, counted if counts else send)
        finally:
            self.busy -= counts

    async def health(self, _: Request) -> Response:
        """Say whether requests are taken."""
        said = self.worker.failed or ("stopping" if self.stopping else "ok")
        return _json({"status": said}, 200 if said == "ok" else 503)

    async def figures(self, _: Request) -> Response:
        """Tell Prometheus what was done."""
        text = self.metrics.text(self.engine.running, self.engine.waiting)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        """Name the model, alone or as a list of one."""
        self._admit(request)
        name = request.path_params.get("name")
        self._check_model(name)
        return _json(self.card if name else {"object": "list", "data": [self.card]})

    async def complete(self, request: Request) -> Response:
        """Continue prompts or a conversation."""
        self._admit(request)
        arrived = asyncio.get_running_loop().time()
        deadline = arrived + self.config.timeout
        asked = read(await self._body(request, deadline), request.scope["path"].startswith("/v1/chat"))
        self._check_model(asked.model)
        self.worker.check(asked.sequences)  # before any work
        wanted = await asyncio.to_thread(self._wanted, asked)
        answer = Answer(asked, self.worker.submit(wanted, arrived, deadline), self.model, self.config.name)
        return _Stream(answer) if asked.stream else await _whole(answer, request.receive)

    def _admit(self, request: Request) -> None:
        scheme, _, key = request.headers.get("authorization", "").encode("latin-1").partition(b" ")
        shown = key.strip() if scheme.lower() == b"bearer" else b""
        if self.keys and not any(secrets.compare_digest(shown, key) for key in self.keys):
            raise RequestError(401, "the key is wrong: send Authorization: Bearer KEY", code="invalid_api_key")
        if self.stopping:
            raise RequestError(503, "the server is stopping: ask another one")

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.config.name:
            message = f"the model {name[:60]!r} is not here: ask for {self.config.name!r}"
            raise RequestError(404, message, "model", "model_not_found")

    async def _body(self, request: Request, deadline: float) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout_at(deadline):
                async for part in request.stream():
                    body += part
                    if len(body) > self.config.max_body:
                        raise RequestError(413, f"the request has more than {self.config.max_body} bytes: send less")
        except TimeoutError:
            raise RequestError(408, "the request came too slowly: send it again") from None
        return bytes(body)

    def _wanted(self, asked: Asked) -> list[tuple[Any, ...]]:
        """Arguments of Engine.add for each continuation. Unless told, a completion has 16 tokens, and the answer in
        a chat as many as there is room for."""
        most, chat = self.config.max_tokens or self.engine.most, asked.messages is not None
        if asked.sampling.get("max_new_tokens", 1) > most:
            raise RequestError(400, f"max_tokens is too large: ask for at most {most}", "max_tokens")
        wanted: list[tuple[Any, ...]] = []
        for known in read_prompts(self.model, [self.template.encode(asked.messages or [])] if chat else asked.prompt):
            text, ids = known.prompt, known.prompt_tokens
            longest = min(most, max(1, self.engine.most - len(ids)) if chat else 16)
            wanted += [(Generation(text, ids), each, asked.likeliest) for each in asked.samplings(longest)]
        return wanted


def _room(model: LoadedDecoder, rows: int) -> int | None:
    """Tokens whose keys and values take half of the free memory; None: that is more than the rows can hold."""
    config, weight = model.config, model.embed.weight
    layers = config.layers - len(config.routed) * max(0, 1 - 2 * config.capacity)  # as the engine has pages for them
    size = 2 * (config.kv_heads or config.heads) * config.head_size * weight.element_size() * layers
    machine = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = torch.cuda.mem_get_info(weight.device)[0] if weight.is_cuda else machine
    return None if rows * (config.context + 256) * size < free / 2 else max(256, int(free / 2 / size))


class _Stream(StreamingResponse):
    """An answer as it comes; its job ends with it, also where the client leaves or does not read."""

    def __init__(self, answer: Answer) -> None:
        # The second: nginx would hold events back.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(answer.stream(), media_type="text/event-stream", headers=headers)
        self.job = answer.job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(TimeoutError):  # nobody reads
                async with asyncio.timeout_at(self.job.deadline + GRACE):
                    await super().__call__(scope, receive, send)
        finally:
            self.job.close()


async def _whole(answer: Answer, receive: Receive) -> Response:
    """The answer when it is complete, unless the client leaves before."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    work, left = asyncio.create_task(answer.whole()), asyncio.create_task(gone())
    try:
        await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
        return _json(work.result()) if work.done() else Response(status_code=499)
    finally:
        work.cancel()
        left.cancel()
        answer.job.close()


def _json(value: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    # Not JSONResponse: what is quoted from a request may hold half a surrogate pair, which has no UTF-8.
    return Response(json.dumps(value), status, headers, "application/json")


def _refused(_: Request, error: Exception) -> Response:
    """An error in the form that OpenAI's clients know."""
    if not isinstance(error, RequestError):
        statuses = {HTTPException: getattr(error, "status_code", 500), ClientDisconnect: 499, DepthgateError: 400}
        status = next((status for kind, status in statuses.items() if isinstance(error, kind)), 500)
        error = RequestError(status, str(error) or type(error).__name__)
    return _json(error.body, error.status, {"Retry-After": "1"} if error.status in (429, 503) else None)
