"""Options of `depthgate serve`. Imports no torch."""

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
    api_key_file: str | None = option(None, "file of keys, one a line, of which clients must show one")
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
        return Path(self.model).absolute().name

    def keys(self) -> list[bytes]:
        """The keys that open the server; none: it is open."""
        if self.api_key_file is None:
            return []
        path = Path(self.api_key_file)
        found = path.read_bytes().split() if path.exists() else []
        if not found:
            raise InvalidValueError(f"api_key_file is {path}: it has no keys; name a file with one on each line")
        return found
