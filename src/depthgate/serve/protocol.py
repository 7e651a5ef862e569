"""OpenAI's protocol: what a request may ask for, the tokens of a conversation, and the form of an answer."""

import json
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from itertools import accumulate, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from depthgate.checkpoint.store import TOKENIZER
from depthgate.data.sources import utf8
from depthgate.errors import DepthgateError, InvalidValueError, check_count, show
from depthgate.flops import sequence_flops
from depthgate.generation.config import Sampling
from depthgate.generation.engine import Request
from depthgate.generation.text import Event
from depthgate.loading import LoadedDecoder, is_hugging_face

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_REASONS = {None: None, "end": "stop", "stop": "stop", "length": "length", "context": "length"}
_LEAST = -9999.0  # log-probability of what cannot be, as JSON has no infinity


class RequestError(DepthgateError):
    """A request that is refused or fails: the status of HTTP, and the parameter that is to blame, if one is."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.status, self.body = status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _check_kind(value: Any, name: str, kind: Any, what: str) -> None:
    if not isinstance(value, kind):
        raise InvalidValueError(f"{name} is {show(value, _json)}: it must be {what}")


def _check_among(value: Any, name: str, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        known = " or ".join(map(json.dumps, allowed))
        what = f"{name} is {show(value, _json)}, which is not supported"
        raise InvalidValueError(f"{what}: give {known}, or leave it out")


def _check_as_json(check: "Check", value: Any, name: str) -> None:
    """Make a check whose error quotes a value as Python does, and quote it as it came."""
    try:
        check(value, name)
    except InvalidValueError as error:
        quoted = f" is {show(value, _json)}"
        raise InvalidValueError(str(error).replace(f" is {show(value)}", quoted, 1)) from None


def _check_stream_options(given: Any, name: str) -> None:
    _check_kind(given, name, dict, "an object")
    known = {"include_usage": (True, False), "include_obfuscation": (False,)}
    for option, value in given.items():
        _check_among(option, f"a name in {name}", tuple(known))
        _check_among(value, f"{name}.{option}", known[option])


def _check_messages(given: Any, name: str) -> None:
    _check_kind(given, name, list, "a list of messages")
    if not given:
        raise InvalidValueError(f"{name} is []: give at least one")
    for i, message in enumerate(given):
        _check_kind(message, f"{name}[{i}]", dict, "an object with a role and a content")
        said = {f: value for f, value in message.items() if value is not None and (value != [] or f == "content")}
        for field in dict.fromkeys((*said, "role", "content")):
            here, value = f"{name}[{i}].{field[:60]}", said.get(field)
            if field not in ("role", "content", "name"):
                raise InvalidValueError(f"{here} is not supported: leave it out")
            parts = value if field == "content" and isinstance(value, list) else []
            if not parts:
                _check_kind(value, here, str, "text" if field != "content" else "text, or a list of parts of text")
            for n, part in enumerate(parts):
                _check_kind(part, f"{here}[{n}]", dict, "an object with a type and a text")
                _check_among(part.get("type"), f"{here}[{n}].type", ("text",))
                _text(part.get("text"), f"{here}[{n}].text")


def _check_stop(stop: Any, name: str) -> None:
    _SAMPLING["stop"](stop, name)
    texts = [stop] if isinstance(stop, str) else stop
    if len(texts) > 4 or any(len(text) > 256 for text in texts):  # every token is compared with all their beginnings
        raise InvalidValueError(f"{name} is too long: give at most 4 texts of at most 256 characters")


Check = Callable[[Any, str], object]  # of a value and its name; raises InvalidValueError
_SAMPLING: dict[str, Check] = {each.name: each.metadata["check"] for each in fields(Sampling) if each.metadata}
_FILTERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_NOT_DONE = {  # what is taken at the value that asks for nothing
    **{"frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "best_of": 1, "echo": False, "suffix": ""},
    **{
        "tools": [],
        "tool_choice": "none",
        "functions": [],
        "function_call": "none",
        "response_format": {"type": "text"},
    },
    **{"modalities": ["text"], "store": False, "metadata": {}},
}
_json = partial(json.dumps, ensure_ascii=False)
_text = partial(_check_kind, kind=str, what="text")
_flag = partial(_check_kind, kind=bool, what="true or false")
_BOTH: dict[str, Check] = {
    **{name: partial(_check_among, allowed=(value,)) for name, value in _NOT_DONE.items()},
    **{name: _SAMPLING[name] for name in _FILTERS},
    "model": _text,
    "user": _text,
    "max_tokens": _SAMPLING["max_new_tokens"],
    "stop": _check_stop,
    "seed": partial(check_count, minimum=0, maximum=2**63 - 1),
    "n": partial(check_count, maximum=128),
    "stream": _flag,
    "stream_options": _check_stream_options,
    "parallel_tool_calls": _flag,  # of which there are none
    "service_tier": partial(_check_among, allowed=("auto", "default")),
}
COMPLETION = _BOTH | {
    "prompt": partial(_check_kind, kind=str | list, what="text, token ids, or a list of either"),
    "logprobs": partial(check_count, minimum=0, maximum=5),
}
CHAT = _BOTH | {
    "messages": _check_messages,
    "max_completion_tokens": _BOTH["max_tokens"],
    "logprobs": _flag,
    "top_logprobs": partial(check_count, minimum=0, maximum=20),
}


def read(body: bytes, chat: bool) -> dict[str, Any]:
    """The parameters in a body, in the words of completions, and the options of Sampling among them; what is unknown or
    wrong is refused by its name."""
    known, needed, name = CHAT if chat else COMPLETION, "messages" if chat else "prompt", None
    try:
        given = json.loads(body.decode())
        _check_kind(given, "the body", dict, "a JSON object")
        given = {name: value for name, value in given.items() if value is not None}
        for name, value in given.items():
            if name not in known:
                raise InvalidValueError(f"{name!r:.60} is not a known parameter: leave it out")
            _check_as_json(known[name], value, name)
    except InvalidValueError as error:
        raise RequestError(400, str(error), name and name[:60]) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON in UTF-8: {str(error)[:200]}") from None
    if needed not in given:
        raise RequestError(400, f"{needed} is missing: give some", needed)
    asked: dict[str, Any] = dict.fromkeys(("model", "max_tokens", "logprobs")) | {"n": 1, "stream": False} | given
    asked["sampling"] = {name: asked[name] for name in (*_FILTERS, "stop") if name in asked}
    if chat:  # has other names for these
        asked["max_tokens"] = asked.get("max_completion_tokens", asked["max_tokens"])
        if asked.get("top_logprobs") and not asked["logprobs"]:
            raise RequestError(400, "top_logprobs needs logprobs: give true for it, too", "top_logprobs")
        asked["logprobs"] = asked.get("top_logprobs", 0) if asked["logprobs"] else None
    return asked


def find_template(model: str) -> Any:
    """The tokenizer of transformers in the folder of a model, if it has a chat template."""
    home, run = Path(model), Path(model, TOKENIZER)
    folder = home if is_hugging_face(home) else run if run.is_dir() else home.absolute().parent / TOKENIZER
    config = folder / "tokenizer_config.json"
    if any(folder.glob("chat_template*")) or (config.is_file() and b'"chat_template"' in config.read_bytes()):
        from depthgate.hf.folder import find_tokenizer

        return find_tokenizer(folder)
    return None


def encode_chat(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    """The ids of a conversation, to be continued by the model's answer. Special tokens are those of the template: where
    somebody's words spell one, they stay words."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise RequestError(400, "the model's tokenizer has no chat template: use /v1/completions", "messages")
    mark = secrets.token_hex(16)  # cuts such words in two
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]

    def words(content: str | list[dict[str, str]]) -> str:
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        for token in special:
            text = text.replace(token, token[:1] + mark + token[1:])
        return text

    told = [{name: words(said) for name, said in each.items() if said is not None} for each in messages]
    try:
        text = tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates refuse conversations in words of their own
        what = f"messages are not a conversation that the chat template takes: {str(error)[:200]}"
        raise RequestError(400, what, "messages") from None
    parts = [utf8(part, "a message").decode() for part in text.split(mark)]
    found = tokenizer.backend_tokenizer.encode_batch_fast(parts, add_special_tokens=False)
    return [token for part in found for token in part.ids]


class Answer:
    """The form of an answer, whose continuations are given by the requests that the engine works on."""

    def __init__(self, asked: dict[str, Any], requests: list[Request], model: LoadedDecoder, name: str) -> None:
        self.asked, self.requests, self.model, self.chat = asked, requests, model, "messages" in asked
        kind = "text_completion" if not self.chat else "chat.completion.chunk" if asked["stream"] else "chat.completion"
        self.head = {"id": f"dg-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": name}
        self._said: dict[int, int] = {}  # characters of each continuation that has begun

    def choices(self, events: list[Event]) -> Iterator[dict[str, Any]]:
        """Tokens that came, by the continuation that they belong to."""
        which = attrgetter("request")
        for number, group in groupby(sorted(events, key=which), which):
            tokens = list(group)
            text, before = "".join(event.text for event in tokens), self._said.get(number, 0)
            role = {} if number in self._said else {"role": "assistant"}
            message = {"delta" if self.asked["stream"] else "message": {**role, "content": text}}
            shown = None if self.asked["logprobs"] is None else self._logprobs(tokens, before)
            self._said[number] = before + len(text)
            index, reason = number - self.requests[0].number, _REASONS[tokens[-1].finish]
            said = message if self.chat else {"text": text}
            yield {"index": index, **said, "logprobs": shown, "finish_reason": reason}

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

    def usage(self) -> dict[str, Any]:
        """Tokens, of which prompts count once for all their continuations; and how deep those went that were computed,
        prompts included, with the share of forward FLOPs that this saved against all layers for all tokens."""
        config, results = self.model.config, [request.result for request in self.requests]
        read = sum(len(result.prompt_tokens) for result in results[:: self.asked["n"]])
        added = sum(len(result.tokens) for result in results)
        depths = [depth for result in results for depth in result.depths]
        taken = sum(sequence_flops(config, len(result.depths), result.routed) for result in results)
        whole = sum(sequence_flops(config, len(result.depths)) for result in results)
        depth = {"layers": config.layers, "mean_layers": sum(depths) / len(depths), "flops_saved": 1 - taken / whole}
        return {"prompt_tokens": read, "completion_tokens": added, "total_tokens": read + added, "depth": depth}
