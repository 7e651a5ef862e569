"""Conversations as token ids, by the template that a tokenizer comes with."""

import re
import secrets
from pathlib import Path
from typing import Any

from depthgate.checkpoint.store import TOKENIZER
from depthgate.loading import is_hugging_face
from depthgate.serve.asked import RequestError


class ChatTemplate:
    """The template of a model's tokenizer, or of none."""

    def __init__(self, model: str) -> None:
        self.tokenizer: Any = None  # of transformers
        homes = (home := Path(model), home / TOKENIZER, home.absolute().parent / TOKENIZER)
        folder = homes[0] if is_hugging_face(home) else homes[1] if homes[1].is_dir() else homes[2]
        config = folder / "tokenizer_config.json"
        if any(folder.glob("chat_template*")) or (config.is_file() and b'"chat_template"' in config.read_bytes()):
            from depthgate.hf.folder import find_tokenizer

            found = find_tokenizer(folder)
            self.tokenizer = found if getattr(found, "chat_template", None) else None

    def encode(self, messages: list[dict[str, Any]]) -> list[int]:
        """The ids of a conversation, to be continued by the model's answer. Special tokens are those of the template:
        where somebody's words spell one, they stay words."""
        if self.tokenizer is None:
            raise RequestError(400, "the model's tokenizer has no chat template: use /v1/completions", "messages")
        mark = secrets.token_hex(16)
        specials = "|".join(map(re.escape, self.tokenizer.all_special_tokens))
        told = [{**each, "content": re.sub(specials, lambda m: _halved(m[0], mark), _words(each))} for each in messages]
        try:
            text = self.tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates refuse conversations in words of their own
            raise RequestError(400, f"the chat template refuses the messages: {str(error)[:200]}", "messages") from None
        encode = self.tokenizer.backend_tokenizer.encode
        return [token for part in text.split(mark) for token in encode(part, add_special_tokens=False).ids]


def _words(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _halved(text: str, mark: str) -> str:
    return text[:1] + mark + text[1:]
