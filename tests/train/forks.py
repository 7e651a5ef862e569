"""The command line in copies of one process that has torch loaded: seconds for all of them instead of for each.

Run as a script, it reads scenes from stdin, a line of JSON each, and answers with exit code and stderr of each.
"""

import functools
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
NO_ROOT = "--bounding-set=-dac_override,-dac_read_search"  # without these, file modes bind root as anyone
ENV = ("HOME", "XDG_CACHE_HOME")


def run(scene: dict, bound_by_modes: bool = False) -> tuple[int, str]:
    """Exit code and stderr of a command line.

    A scene has `argv`, and maybe `env`, `close` (numbers of streams), `out` and `log` (files as stdout and stderr),
    `pipe` (both go to a reader who has left) and `limit` (the most bytes a file may get).
    """
    server = _server(bound_by_modes)
    env = {name: os.environ.get(name, "") for name in ENV} | scene.get("env", {})
    server.stdin.write(json.dumps(scene | {"env": env}) + "\n")
    server.stdin.flush()
    code, errors = json.loads(server.stdout.readline())
    return code, errors


@functools.cache
def _server(bound_by_modes: bool) -> subprocess.Popen:
    """It ends with this process, when it finds no more to read."""
    before = ["setpriv", NO_ROOT] if bound_by_modes and os.getuid() == 0 else []
    command = [*before, sys.executable, "-m", "tests.train.forks"]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _play(scene: dict) -> tuple[int, str]:
    with tempfile.NamedTemporaryFile() as log:
        child = os.fork()
        if not child:
            code = 99
            try:
                code = _child(scene, log.name)
            except SystemExit as stop:
                code = stop.code
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status), Path(log.name).read_text(errors="replace")


def _child(scene: dict, log: str) -> int:
    from depthgate.cli import main

    os.environ.update(scene["env"])
    os.dup2(os.open(scene.get("log", log), os.O_WRONLY | os.O_APPEND), 2)
    os.dup2(os.open(scene.get("out", os.devnull), os.O_WRONLY), 1)
    if scene.get("pipe"):
        reading, writing = os.pipe()
        os.close(reading)
        os.dup2(writing, 1)
        os.dup2(writing, 2)
    for number in scene.get("close", ()):
        os.close(number)
    if "limit" in scene:
        resource.setrlimit(resource.RLIMIT_FSIZE, (scene["limit"], resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        return main(scene["argv"])
    except Exception:
        import traceback

        traceback.print_exc()
        return 1


if __name__ == "__main__":
    import torch

    import depthgate.commands.train
    import depthgate.train.evaluate
    import depthgate.view  # noqa: F401  (loaded before the copies are made)
    from depthgate.cli import build_parser

    build_parser()
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(_play(json.loads(line))), flush=True)
