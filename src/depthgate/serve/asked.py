"""What clients may ask for: a table of parameters for each kind of completion, and errors in OpenAI's form."""

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NoReturn

from depthgate.errors import DepthgateError, InvalidValueError, check_count
from depthgate.generation.config import Sampling

Check = Callable[[Any, str], object]  # of a value and its name; raises InvalidValueError
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class RequestError(DepthgateError):
    """A request that is refused or fails: the status of HTTP, and the parameter that is to blame, if one is."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


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


def _kind(kind: Any, what: str) -> Check:
    def check(value: Any, name: str) -> None:
        if not isinstance(value, kind):
            raise InvalidValueError(f"{name} is {str(value)[:60]!r}: it must be {what}")

    return check


def _only(neutral: Any) -> Check:
    """Take what is not done here where it asks for nothing."""

    def check(value: Any, name: str) -> None:
        if value != neutral:
            raise InvalidValueError(f"{name} is not supported: leave it out, or give {json.dumps(neutral)}")

    return check


def _check_stop(stop: Any, name: str) -> None:
    _CHECKS["stop"](stop, name)
    texts = [stop] if isinstance(stop, str) else stop
    if len(texts) > 4 or any(len(text) > 256 for text in texts):  # every token is compared with all their beginnings
        raise InvalidValueError(f"{name} is too long: give at most 4 texts of at most 256 characters")


def _check_stream_options(options: Any, name: str) -> None:
    if not isinstance(options, dict) or not options.keys() <= {"include_usage"}:
        raise InvalidValueError(f"{name} is {str(options)[:60]!r}: it must be an object with include_usage alone")
    _flag(options.get("include_usage", False), f"{name}.include_usage")


def _check_messages(messages: Any, name: str) -> None:
    _kind(list, "a list of messages")(messages or None, name)
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys() <= {"role", "content", "name"}:
            raise InvalidValueError(f"{name}[{i}] must be an object with a role and a content, and a name at most")
        content = message["content"]
        for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise InvalidValueError(f"{name}[{i}].content must be text, or a list of parts of the type text")
        _text(message["role"], f"{name}[{i}].role")
        _text(message.get("name", ""), f"{name}[{i}].name")


_CHECKS: dict[str, Check] = {each.name: each.metadata["check"] for each in fields(Sampling) if each.metadata}
_text, _flag = _kind(str, "text"), _kind(bool, "true or false")

# What to check, and the field of Asked or option of Sampling that is meant; None: it is taken, and changes nothing.
_BOTH: dict[str, tuple[Check, str | None]] = {
    "model": (_text, "model"),
    "max_tokens": (_CHECKS["max_new_tokens"], "max_new_tokens"),
    **{name: (_CHECKS[name], name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "stop": (_check_stop, "stop"),
    "seed": (partial(check_count, minimum=0, maximum=2**63 - 1), "seed"),
    "n": (partial(check_count, maximum=128), "n"),
    "stream": (_flag, "stream"),
    "stream_options": (_check_stream_options, "stream_options"),
    "user": (_text, None),
    **{name: (_only(0), None) for name in ("frequency_penalty", "presence_penalty")},
    "logit_bias": (_only({}), None),
}
COMPLETION = _BOTH | {
    "prompt": (_kind(str | list, "text, token ids, or a list of either"), "prompt"),
    "logprobs": (partial(check_count, minimum=0, maximum=5), "logprobs"),
    "best_of": (_only(1), None),
    "echo": (_only(False), None),
    "suffix": (_only(""), None),
}
CHAT = _BOTH | {
    "messages": (_check_messages, "messages"),
    "max_completion_tokens": _BOTH["max_tokens"],
    "logprobs": (_flag, "logprobs"),
    "top_logprobs": (partial(check_count, minimum=0, maximum=20), "top_logprobs"),
    "tools": (_only([]), None),
    "response_format": (_only({"type": "text"}), None),
}


def read(body: bytes, chat: bool) -> Asked:
    """The request in a body; what is unknown, wrong or not done here is refused by its name."""
    try:
        given = json.loads(body.decode(), parse_constant=_not_json)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON in UTF-8: {str(error)[:200]}") from None
    if not isinstance(given, dict):
        raise RequestError(400, f"the body is a {type(given).__name__}: it must be a JSON object")
    known, needed = (CHAT, "messages") if chat else (COMPLETION, "prompt")
    asked = Asked()
    for name, value in given.items():
        if name not in known:
            raise RequestError(
                400, f"{name[:60]!r} is not a known parameter: leave it out", name[:60], "unknown_parameter"
            )
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
        raise RequestError(400, f"{needed} is missing: give some", needed, "missing_parameter")
    return asked


def _not_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
