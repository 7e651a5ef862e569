"""`depthgate serve`: a server until it is told to stop, under uvicorn in this process or Ray Serve in several."""

import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
            from depthgate.serve.listen_uvicorn import listen

            app = build(config, config.keys())
            with named(config.host, port):
                address.listen()  # another process may have got the port meanwhile
            return listen(app, address, ready)
        address.close()
        return replicate(config, port, ready)
    except ImportError as error:
        missing = str(error.name).partition(".")[0]
        extra = "serve" if config.replicas is None else "serve,ray"
        raise DepthgateError(f"{missing} is missing: pip install 'depthgate[{extra}]'") from None


def bound(host: str, port: int) -> socket.socket:
    """A socket with an address, which takes no connections yet."""
    with named(host, port):
        found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
    return found


@contextmanager
def named(host: str, port: int) -> Iterator[None]:
    """Have an error name the address that cannot be listened on."""
    try:
        yield
    except OSError as error:
        raise DepthgateError(f"cannot listen on {host}, port {port} ({error.strerror}): name another") from None


def build(config: ServeConfig, keys: list[bytes]) -> Any:
    """The application, with its model loaded."""
    from depthgate.serve.app_starlette import App

    return App(load_decoder(config.model).to(resolve_device(config.device)), config, keys)


def replicate(config: ServeConfig, port: int, ready: Callable[[], None]) -> int:
    """Serve from several processes with a model each, under Ray Serve, until a signal comes; the exit code."""
    import ray
    from ray import serve

    class Replica:
        app: Any

        def check_health(self) -> None:
            """Raise where the engine has stopped: Ray then starts another replica."""
            self.app.worker.check(0)

        def stop(self) -> bool:
            """Take no further requests; true while some are worked on."""
            self.app.stopping = True
            return bool(self.app.worker.jobs)

    here, keys = replace(config, model=os.path.abspath(config.model)), config.keys()  # replicas have other folders
    ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
    stop, now = threading.Event(), threading.Event()  # the first signal, and a second
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
        running = serve.run(deployment.bind(), name="depthgate", route_prefix="/")
        with handled(lambda *_: (now if stop.is_set() else stop).set(), signal.SIGINT, signal.SIGTERM):
            ready()
            stop.wait()
            while True in running.broadcast("stop").results(return_exceptions=True) and not now.wait(0.2):
                pass  # without their route, new requests would get 404
    finally:
        serve.delete("depthgate", _blocking=not now.is_set())  # and nothing else that may run on the cluster
        ray.shutdown()
    return 130 if now.is_set() else 0
