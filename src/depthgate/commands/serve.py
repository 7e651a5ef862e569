"""`depthgate serve`: a server until it is told to stop, under uvicorn in this process or Ray Serve in several."""

import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from depthgate.device import resolve_device
from depthgate.errors import DepthgateError
from depthgate.files import handled
from depthgate.loading import load_decoder
from depthgate.serve.config import ServeConfig


def run(config: ServeConfig, as_json: bool) -> int:
    """Serve; print where, as soon as requests are taken. The exit code: 0, or 130 where requests were cut off."""
    address = bound(config.host, config.port)  # first: a model takes long to load
    port = address.getsockname()[1]
    url = f"http://{f'[{config.host}]' if ':' in config.host else config.host}:{port}"

    def ready() -> None:
        told = json.dumps({"url": url, "model": config.name}) if as_json else f"{config.name} is served on {url}/v1"
        print(told, flush=True)

    try:
        if config.replicas is None:
            return listen(build(config, config.keys()), address, ready)
        address.close()
        return replicate(config, port, ready)
    except ImportError as error:
        missing = str(error.name).partition(".")[0]
        extra = "serve" if config.replicas is None else "serve,ray"
        raise DepthgateError(f"{missing} is missing: pip install 'depthgate[{extra}]'") from None


def bound(host: str, port: int) -> socket.socket:
    """A socket with an address, which takes no connections yet."""
    try:
        found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
    except OSError as error:
        raise DepthgateError(f"cannot listen on {host}, port {port} ({error.strerror}): name another") from None
    return found


def build(config: ServeConfig, keys: list[bytes]) -> Any:
    """The application, with its model loaded."""
    from depthgate.serve.app_starlette import App

    return App(load_decoder(config.model).to(resolve_device(config.device)), config, keys)


def listen(app: Any, address: socket.socket, ready: Callable[[], None]) -> int:
    """Serve until a signal comes and all requests that were taken are answered, or a second signal; the exit code."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            ready()

        def handle_exit(self, *_: Any) -> None:
            self.force_exit = self.should_exit = app.stopping
            app.stopping = True

        async def on_tick(self, counter: int) -> bool:
            self.should_exit |= app.stopping and not self.server_state.tasks
            return await super().on_tick(counter)

    limits: Any = {"lifespan": "off", "ws": "none", "timeout_graceful_shutdown": 5}  # seconds for the last bytes
    limits |= {
        "http": "h11",
        "h11_max_incomplete_event_size": 2**16,
    }  # bytes of a request's head; httptools has no limit
    server = Server(uvicorn.Config(app, log_level="error", access_log=False, server_header=False, **limits))
    server.run([address])
    return 130 if server.force_exit else 0


def replicate(config: ServeConfig, port: int, ready: Callable[[], None]) -> int:
    """Serve from several processes with a model each, under Ray Serve, until a signal comes; the exit code."""
    import ray
    from ray import serve

    class Replica:
        app: Any

        def check_health(self) -> None:
            """Raise where the engine has stopped: Ray then starts another replica."""
            self.app.worker.check(0)

    here, keys = replace(config, model=os.path.abspath(config.model)), config.keys()  # replicas have other folders
    ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
    stop = threading.Event()
    try:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(http_options={"host": config.host, "port": port})
        deployment: Any = serve.deployment(
            serve.ingress(lambda: build(here, keys))(Replica),
            num_replicas=config.replicas,
            max_ongoing_requests=config.rows + config.queue,
            graceful_shutdown_timeout_s=config.timeout,
            ray_actor_options={"num_gpus": int(resolve_device(config.device) == "cuda")},
        )
        serve.run(deployment.bind(), name="depthgate", route_prefix="/")
        with handled(lambda *_: stop.set(), signal.SIGINT, signal.SIGTERM):
            ready()
            stop.wait()
    finally:
        serve.delete("depthgate")  # and nothing else that may run on the cluster
        ray.shutdown()
    return 0
