"""Answers in OpenAI's form, whole or chunk by chunk."""

import json
import secrets
import time
from collections.abc import AsyncIterator
from itertools import accumulate
from typing import Any

from depthgate.flops import sequence_flops
from depthgate.generation.text import Event
from depthgate.loading import LoadedDecoder
from depthgate.serve.asked import Asked, RequestError
from depthgate.serve.worker import Job

_REASONS = {None: None, "end": "stop", "stop": "stop", "length": "length", "context": "length"}
_LEAST = -9999.0  # log-probability of what cannot be, as JSON has no infinity


class Answer:
    """The answer to a request, while its job is under way."""

    def __init__(self, asked: Asked, job: Job, model: LoadedDecoder, name: str) -> None:
        self.asked, self.job, self.model, self.chat = asked, job, model, asked.messages is not None
        self.kind = "chat.completion" if self.chat else "text_completion"
        identity = f"{'chatcmpl' if self.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.head = {"id": identity, "object": self.kind, "created": int(time.time()), "model": name}
        self.index = {number: i for i, number in enumerate(job.requests)}
        self.said: dict[int, int] = {}  # characters of each continuation that has begun

    async def whole(self) -> dict[str, Any]:
        """The answer when all of it is there."""
        told: list[Event] = []
        while news := await self.job.news():
            told += news
        choices = [self._choice(events, "message") for events in self._apart(told)]
        return {**self.head, "choices": choices, "usage": self._usage()}

    async def stream(self) -> AsyncIterator[str]:
        """The answer as server-sent events: one for each token that has something to show; tokens of a continuation
        that came while the client was reading go together."""
        usage = {"usage": None} if self.asked.stream_options.get("include_usage") else {}
        head = self.head | {"object": f"{self.kind}.chunk" if self.chat else self.kind} | usage
        try:
            while news := await self.job.news():
                for events in self._apart(news):
                    if self.asked.likeliest is not None or any(event.text or event.finish for event in events):
                        yield _data({**head, "choices": [self._choice(events, "delta")]})
            if usage:
                yield _data({**head, "choices": [], "usage": self._usage()})
            yield "data: [DONE]\n\n"
        except RequestError as error:
            yield _data(error.body)

    def _apart(self, events: list[Event]) -> list[list[Event]]:
        """Tokens by the continuation that they belong to."""
        found: dict[int, list[Event]] = {number: [] for number in self.job.requests}
        for event in events:
            found[event.request].append(event)
        return [each for each in found.values() if each]

    def _choice(self, events: list[Event], name: str) -> dict[str, Any]:
        """Some tokens of a continuation, or all of them."""
        number, text = events[0].request, "".join(event.text for event in events)
        role = {} if number in self.said else {"role": "assistant"}
        said = {name: {**role, "content": text}} if self.chat else {"text": text}
        before = self.said.get(number, 0)
        self.said[number] = before + len(text)
        shown = None if self.asked.likeliest is None else self._logprobs(events, before)
        return {"index": self.index[number], **said, "logprobs": shown, "finish_reason": _REASONS[events[-1].finish]}

    def _logprobs(self, events: list[Event], before: int) -> dict[str, Any]:
        tokens = [self._token(event.token, event.logprob) for event in events]
        tops = [[self._token(*each) for each in event.top] for event in events]
        if self.chat:
            return {"content": [{**token, "top_logprobs": top} for token, top in zip(tokens, tops, strict=True)]}
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            # Of two that look alike, as half a character does, the likelier one is shown.
            "top_logprobs": [{each["token"]: each["logprob"] for each in reversed(top)} for top in tops],
            "text_offset": list(accumulate((len(event.text) for event in events[:-1]), initial=before)),
        }

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        known = self.model.tokenizer
        raw = known.token_text(token).encode(errors="surrogateescape") if token < known.vocab else b""
        return {"token": raw.decode(errors="replace"), "logprob": max(logprob or 0.0, _LEAST), "bytes": list(raw)}

    def _usage(self) -> dict[str, Any]:
        """Tokens, of which prompts count once for all their continuations; and how deep those went that were computed,
        prompts included, with the share of forward FLOPs that this saved against all layers for all tokens."""
        config, results = self.model.config, [request.result for request in self.job.requests.values()]
        read = sum(len(result.prompt_tokens) for result in results[:: self.asked.n])
        added = sum(len(result.tokens) for result in results)
        depths = [depth for result in results for depth in result.depths]
        taken = sum(sequence_flops(config, len(result.depths), result.routed) for result in results)
        whole = sum(sequence_flops(config, len(result.depths)) for result in results)
        depth = {"layers": config.layers, "mean_layers": sum(depths) / len(depths), "flops_saved": 1 - taken / whole}
        return {"prompt_tokens": read, "completion_tokens": added, "total_tokens": read + added, "depth": depth}


def _data(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
