"""A model that was really trained, a little, and real servers of it on ports of their own."""

import threading
from contextlib import contextmanager

import openai
import pytest

import depthgate as dg
from depthgate.commands.serve import bound, build
from depthgate.serve.config import ServeConfig
from depthgate.serve.listen_uvicorn import listen
from tests.train.tiny import train, write_data

TEMPLATE = (
    "{% for message in messages %}<|endoftext|>{{ message.role }}: {{ message.content | trim }}\n{% endfor %}"
    "{% if messages[-1].role == 'assistant' %}{{ raise_exception('it is your turn') }}{% endif %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class Server:
    """A server in a thread of this process."""

    def __init__(self, folder, **options):
        config = ServeConfig(model=folder, port=0, device="cpu", **options)
        address, ready = bound(config.host, 0), threading.Event()
        self.app = build(config, config.keys())
        self.port = address.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.code = None
        self.thread = threading.Thread(target=self._run, args=(address, ready.set))
        self.thread.start()
        ready.wait()

    def _run(self, *given):
        self.code = listen(self.app, *given)

    def client(self, kind=openai.OpenAI, key="none"):
        return kind(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def stop(self):
        self.app.stopping = True  # as the first signal does
        self.thread.join()
        return self.code

    @contextmanager
    def held(self, fault=None):
        """Let the engine wait before its next turn, until the block ends; then go on, or with a fault."""
        go, turn = threading.Event(), self.app.engine.turn
        self.app.engine.turn = lambda: (go.wait(), (fault or turn)())[1]
        try:
            yield
        finally:
            self.app.engine.turn = turn
            go.set()


@pytest.fixture(scope="package")
def folder(tmp_path_factory):
    """The folder of a run: two layers, of which the second is routed; bytes; a context of 256; a chat template."""
    home = tmp_path_factory.mktemp("serve")
    shape = ("--model.pattern=dense,mod", "--model.context=256", "--lr=0.02")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home / "home"))
        assert train(home / "tiny", write_data(home / "text.jsonl"), 80, *shape) == 0
    (home / "tiny" / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    return str(home / "tiny")


@pytest.fixture(scope="package")
def model(folder):
    return dg.load(folder)


@pytest.fixture(scope="package")
def server(folder):
    found = Server(folder)
    yield found
    assert found.stop() == 0


@pytest.fixture
def start(folder):
    """A function that starts servers with options; they are stopped when the test ends."""
    found = []

    def started(**options):
        found.append(Server(folder, **options))
        return found[-1]

    yield started
    for each in found:
        each.stop()
