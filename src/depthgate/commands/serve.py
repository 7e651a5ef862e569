"""`depthgate serve`: a server until it is told to stop."""

import json
import sys
from dataclasses import replace

from depthgate.errors import DepthgateError
from depthgate.serve.config import ServeConfig
from depthgate.serve.running import bound, build, listen, replicate


def run(config: ServeConfig, as_json: bool) -> int:
    """Serve; print where, as soon as requests are taken. The exit code: 0, or 130 where requests were cut off."""
    address = bound(config.host, config.port)  # first: a model takes long to load
    config = replace(config, port=address.getsockname()[1])
    url = f"http://{f'[{config.host}]' if ':' in config.host else config.host}:{config.port}"
    if config.api_key_file is None and not config.host.startswith(("127.", "localhost", "::1")):
        print(f"depthgate: warning: anybody who reaches {url} may use it: give --api-key-file", file=sys.stderr)

    def ready() -> None:
        told = json.dumps({"url": url, "model": config.name}) if as_json else f"{config.name} is served on {url}/v1"
        print(told, flush=True)

    try:
        if config.replicas is None:
            return listen(build(config), address, ready)
        address.close()
        return replicate(config, ready)
    except ImportError as error:
        raise DepthgateError(
            f"{str(error.name).partition('.')[0]} is missing: pip install 'depthgate[serve,ray]'"
        ) from None
