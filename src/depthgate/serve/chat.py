"""Conversations as token ids, by the template that a tokenizer comes with."""

import secrets
from pathlib import Path
from typing import Any

from depthgate.checkpoint.store import TOKENIZER
from depthgate.data.sources import utf8
from depthgate.loading import is_hugging_face
from depthgate.serve.asked import RequestError


class ChatTemplate:
    """The chat template of a model's folder, if it has one."""

    def __init__(self, model: str) -> None:
        self.tokenizer: Any = None  # of transformers
        home, run = Path(model), Path(model, TOKENIZER)
        folder = home if is_hugging_face(home) else run if run.is_dir() else home.absolute().parent / TOKENIZER
        config = folder / "tokenizer_config.json"
        if any(folder.glob("chat_template*")) or (config.is_file() and b'"chat_template"' in config.read_bytes()):
            from depthgate.hf.folder import find_tokenizer

            self.tokenizer = find_tokenizer(folder)

    def encode(self, messages: list[dict[str, Any]]) -> list[int]:
        """The ids of a conversation, to be continued by the model's answer. Special tokens are those of the template:
        where somebody's words spell one, they stay words."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise RequestError(400, "the model's tokenizer has no chat template: use /v1/completions", "messages")
        mark = secrets.token_hex(16)  # cuts such words in two
        told = [{**message, "content": self._words(message["content"], mark)} for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates refuse conversations in words of their own
            raise RequestError(400, f"the chat template refuses the messages: {str(error)[:200]}", "messages") from None
        parts = [utf8(part, "a message").decode() for part in text.split(mark)]
        found = self.tokenizer.backend_tokenizer.encode_batch_fast(parts, add_special_tokens=False)
        return [token for part in found for token in part.ids]

    def _words(self, content: Any, mark: str) -> str:
        words = content if isinstance(content, str) else "".join(part["text"] for part in content)
        for token in self.tokenizer.added_tokens_decoder.values():
            if token.special:
                words = words.replace(token.content, token.content[:1] + mark + token.content[1:])
        return words
