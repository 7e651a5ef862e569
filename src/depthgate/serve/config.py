"""Options of `depthgate serve`. Imports no torch."""

import os
from dataclasses import dataclass
from pathlib import Path

from depthgate.errors import InvalidValueError
from depthgate.options import DEVICES, Options, choice, count, number, option, required


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Options):
    """Answer requests in OpenAI's protocol: completions and chat, streamed or whole."""

    model: str = required("folder of a run, of one of its checkpoints, or of a Hugging Face model")
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: all of this machine's")
    port: int = count(8000, "port to listen on; 0: a free one, which is printed", minimum=0, maximum=65535)
    api_key_file: str | None = option(
        None, "file of keys, one a line (# begins a comment), of which clients must show one"
    )
    device: str = choice("auto", DEVICES, "cpu, cuda, or auto")
    rows: int = count(64, "sequences decoded at once", maximum=2**16)
    memory: int | None = count(None, "tokens whose keys and values are held; unless given, half of the free memory")
    queue: int = count(256, "sequences that may wait for a row; further requests are refused", minimum=0)
    timeout: float = number(600.0, "(0, 1e9]", "seconds that a request may take, its waiting and its sending included")
    max_body: int = count(2**20, "bytes of a request at most")
    max_tokens: int | None = count(None, "tokens that a sequence may ask for; as many as have room unless given")
    replicas: int | None = count(None, "processes with a model each, under Ray Serve; this process unless given")

    @property
    def name(self) -> str:
        """The name that clients call the model by: that of its folder."""
        return os.path.basename(os.path.abspath(self.model))

    def keys(self) -> list[bytes]:
        """The keys that open the server; none: it is open."""
        if self.api_key_file is None:
            return []
        wrong = ""
        try:
            text = Path(self.api_key_file).read_text("utf-8-sig")
            found = [key for line in text.split("\n") if (key := line.strip()) and key[0] != "#"]  # a comment
            if not found or any(len(key.split()) > 1 for key in found):  # lines are not shown: they are secret
                wrong = "a line of it has a space between words" if found else "it has no keys"
        except (OSError, ValueError) as error:
            wrong = f"it cannot be read as text in UTF-8 ({error})"
        if wrong:
            what = f"api_key_file is {self.api_key_file}: {wrong}"
            raise InvalidValueError(f"{what}; name a file with one key, without spaces, on each line")
        return [key.encode() for key in found]
