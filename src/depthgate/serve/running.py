"""Servers around the application: uvicorn in this process, or Ray Serve with several."""

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
from depthgate.loading import load
from depthgate.serve.config import ServeConfig


def build(config: ServeConfig) -> Any:
    """The application, with its model loaded."""
    from depthgate.serve.app_starlette import App

    keys = config.keys()  # before a model is loaded for nothing
    return App(load(config.model).to(resolve_device(config.device)), config, keys)


def bound(host: str, port: int) -> socket.socket:
    """A socket with an address, which nobody can connect to yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        raise DepthgateError(f"cannot listen on {host}, port {port} ({error.strerror}): name another") from None
    return found


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
            self.should_exit |= app.stopping and not app.busy
            return await super().on_tick(counter)

    limits: Any = {"lifespan": "off", "ws": "none", "timeout_graceful_shutdown": 5}  # seconds for the last bytes
    server = Server(uvicorn.Config(app, log_level="error", access_log=False, server_header=False, **limits))
    server.run([address])
    if server.force_exit:
        return 130
    app.worker.close()
    return 0


def replicate(config: ServeConfig, ready: Callable[[], None]) -> int:
    """Serve from several processes with a model each, under Ray Serve, until a signal comes; the exit code."""
    import ray
    from ray import serve

    class Replica:
        app: Any

        def check_health(self) -> None:
            """Raise where the engine has stopped: Ray then starts another replica."""
            self.app.worker.check(0)

    paths = {name: os.path.abspath(path) for name in ("model", "api_key_file") if (path := getattr(config, name))}
    config = replace(config, **paths)  # replicas have other working folders
    how: Any = {
        "num_replicas": config.replicas,
        "max_ongoing_requests": config.rows + config.queue,
        "graceful_shutdown_timeout_s": config.timeout,
        "ray_actor_options": {"num_gpus": int(resolve_device(config.device) == "cuda")},
    }
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
    stop = threading.Event()
    try:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(http_options={"host": config.host, "port": config.port})
        deployment: Any = serve.deployment(serve.ingress(lambda: build(config))(Replica), **how)
        serve.run(deployment.bind(), name="depthgate", route_prefix="/")
        with handled(lambda *_: stop.set(), signal.SIGINT, signal.SIGTERM):
            ready()
            stop.wait()
    finally:
        serve.delete("depthgate")  # and nothing else that may run on the cluster
        ray.shutdown()
    return 0
