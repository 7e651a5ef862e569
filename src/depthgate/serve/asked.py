"""What clients may ask for: a table of parameters for each kind of completion, and errors in OpenAI's form."""

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from depthgate.errors import DepthgateError, InvalidValueError, check_count
from depthgate.generation.config import Sampling

Check = Callable[[Any, str], object]  # of a value and its name; raises InvalidValueError
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class RequestError(DepthgateError):
    """A request that is refused or fails: the status of HTTP, and the parameter that is to blame, if one is."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.status, self.body = status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass
class Asked:
    """A request that is in order; whether its prompts are is found out when they become tokens."""

    model: str | None = None
    prompt: Any = None
    messages: list[dict[str, Any]] | None = None  # of a chat, instead of a prompt
    n: int = 1
    logprobs: int | None = None
    top_logprobs: int = 0
    stream: bool = False
    stream_options: dict[str, bool] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def sequences(self) -> int:
        """How many continuations are asked for."""
        prompts = sum(isinstance(each, str | list) for each in self.prompt) if isinstance(self.prompt, list) else 1
        return self.n * max(1, prompts)

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens to show next to each; None: no probabilities at all."""
        if self.messages is None:
            return self.logprobs
        return self.top_logprobs if self.logprobs or self.top_logprobs else None

    def samplings(self, longest: int) -> list[Sampling]:
        """The options of each of the n continuations of a prompt, whose seeds follow each other."""
        seed = self.sampling.get("seed", secrets.randbits(62))
        given = {"max_new_tokens": longest} | self.sampling
        return [Sampling(**given | {"seed": (seed + i) % 2**63}) for i in range(self.n)]


def _check_kind(value: Any, name: str, kind: Any, what: str) -> None:
    if not isinstance(value, kind):
        raise InvalidValueError(f"{name} is {str(value)[:60]!r}: it must be {what}")


def _check_neutral(value: Any, name: str, neutral: Any) -> None:
    """Take what is not done here where it asks for nothing."""
    if value != neutral:
        raise InvalidValueError(f"{name} is not supported: leave it out, or give {json.dumps(neutral)}")


def _check_stop(stop: Any, name: str) -> None:
    _SAMPLING["stop"](stop, name)
    texts = [stop] if isinstance(stop, str) else stop
    if len(texts) > 4 or any(len(text) > 256 for text in texts):  # every token is compared with all their beginnings
        raise InvalidValueError(f"{name} is too long: give at most 4 texts of at most 256 characters")


def _check_stream_options(options: Any, name: str) -> None:
    _check_kind(options, name, dict, "an object")
    for key, value in options.items():
        if key != "include_usage" or not isinstance(value, bool):
            raise InvalidValueError(
                f"{name}.{key[:60]} is {str(value)[:60]!r}: give include_usage alone, true or false"
            )


def _check_messages(messages: Any, name: str) -> None:
    _check_kind(messages or None, name, list, "a list of messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys() <= {"role", "content", "name"}:
            raise InvalidValueError(f"{name}[{i}] must be an object with a role and a content, and a name at most")
        content = message["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        texts = [part["text"] if isinstance(part, dict) and part.keys() == {"type", "text"} else part for part in parts]
        for each in (message["role"], message.get("name", ""), *texts):
            _check_kind(each, f"{name}[{i}]", str, "made of text, or of parts of the type text")


_SAMPLING: dict[str, Check] = {each.name: each.metadata["check"] for each in fields(Sampling) if each.metadata}
_text, _flag = (partial(_check_kind, kind=kind, what=what) for kind, what in ((str, "text"), (bool, "true or false")))

# What to check, and the field of Asked or option of Sampling that is meant; None: it is taken, and changes nothing.
_BOTH: dict[str, tuple[Check, str | None]] = {
    "model": (_text, "model"),
    "max_tokens": (_SAMPLING["max_new_tokens"], "max_new_tokens"),
    **{name: (_SAMPLING[name], name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "stop": (_check_stop, "stop"),
    "seed": (partial(check_count, minimum=0, maximum=2**63 - 1), "seed"),
    "n": (partial(check_count, maximum=128), "n"),
    "stream": (_flag, "stream"),
    "stream_options": (_check_stream_options, "stream_options"),
    "user": (_text, None),
    "frequency_penalty": (partial(_check_neutral, neutral=0), None),
    "presence_penalty": (partial(_check_neutral, neutral=0), None),
    "logit_bias": (partial(_check_neutral, neutral={}), None),
}
COMPLETION = _BOTH | {
    "prompt": (partial(_check_kind, kind=str | list, what="text, token ids, or a list of either"), "prompt"),
    "logprobs": (partial(check_count, minimum=0, maximum=5), "logprobs"),
    "best_of": (partial(_check_neutral, neutral=1), None),
    "echo": (partial(_check_neutral, neutral=False), None),
    "suffix": (partial(_check_neutral, neutral=""), None),
}
CHAT = _BOTH | {
    "messages": (_check_messages, "messages"),
    "max_completion_tokens": _BOTH["max_tokens"],
    "logprobs": (_flag, "logprobs"),
    "top_logprobs": (partial(check_count, minimum=0, maximum=20), "top_logprobs"),
    "tools": (partial(_check_neutral, neutral=[]), None),
    "response_format": (partial(_check_neutral, neutral={"type": "text"}), None),
}


def read(body: bytes, chat: bool) -> Asked:
    """The request in a body; what is unknown, wrong or not done here is refused by its name."""
    try:
        given = json.loads(body.decode())
        _check_kind(given, "the body", dict, "a JSON object")
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not a request in JSON and UTF-8: {str(error)[:200]}") from None
    known, needed, asked = CHAT if chat else COMPLETION, "messages" if chat else "prompt", Asked()
    for name, value in given.items():
        if name not in known:
            raise RequestError(400, f"{name[:60]!r} is not a known parameter: leave it out", name[:60])
        check, meaning = known[name]
        if value is None:
            continue
        try:
            check(value, name)
        except InvalidValueError as error:
            raise RequestError(400, str(error), name) from None
        if meaning in vars(asked):
            setattr(asked, meaning, value)
        elif meaning is not None:
            asked.sampling[meaning] = value
    if getattr(asked, needed) is None:
        raise RequestError(400, f"{needed} is missing: give some", needed)
    return asked
