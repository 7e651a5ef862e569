"""Code in copies of one process that has transformers loaded and knows nothing of depthgate: seconds for all of them
instead of for each.

Run as a script, it reads scenes from stdin, a line of JSON each, and answers with exit code, stdout and stderr of each.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[2]


def run(code: str, *argv: str) -> SimpleNamespace:
    """Exit code and output of some code."""
    server = _server()
    server.stdin.write(json.dumps([code, argv]) + "\n")
    server.stdin.flush()
    returncode, stdout, stderr = json.loads(server.stdout.readline())
    return SimpleNamespace(returncode=returncode, stdout=stdout, stderr=stderr)


@functools.cache
def _server() -> subprocess.Popen:
    """It ends with this process, when it finds no more to read."""
    command = [sys.executable, "-m", "tests.hf.elsewhere"]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _play(code: str, argv: list[str]) -> tuple[int, str, str]:
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        child = os.fork()
        if not child:
            for path, number in ((os.devnull, 0), (out, 1), (err, 2)):
                os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
            sys.argv[1:] = argv
            returncode = 1
            try:
                exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
                returncode = 0
            except BaseException:  # SystemExit too: the code has no other way to say what it found
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(returncode)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status), out.read_text(), err.read_text()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"HF_HOME": cache, "HF_HUB_OFFLINE": "1"}
        import torch
        import transformers

        torch.set_num_threads(1)
        for name in ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM", "LlamaForCausalLM", "GenerationMixin"):
            getattr(transformers, name)
        for line in sys.stdin:
            print(json.dumps(_play(*json.loads(line))), flush=True)
