"""Replicas under Ray Serve: one that is killed takes only its own requests with it."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import openai
import psutil
import pytest

import depthgate as dg
from tests.serve.test_refusals import PROMPT, ask

ASKED = {"model": "tiny", "prompt": "the quick", "max_tokens": 150, "temperature": 0.9}


def replicas(process):
    """The processes of replicas."""
    found = psutil.Process(process.pid).children(recursive=True)
    return {each.pid for each in found if each.is_running() and each.name().startswith("ray::ServeRepli")}


@pytest.mark.skipif(not os.environ.get("DEPTHGATE_SLOW"), reason="half a minute of Ray: run with DEPTHGATE_SLOW=1")
def test_a_killed_replica_loses_only_its_own_requests_and_a_signal_none(folder, model):
    command = [sys.executable, "-m", "depthgate", "serve", "--model", folder, "--port=0", "--device=cpu", "--json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    with subprocess.Popen([*command, "--replicas=2"], env=env, text=True, stdout=subprocess.PIPE) as process:
        try:
            url = json.loads(process.stdout.readline())["url"]
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            texts = [
                dg.generate(model, "the quick", max_new_tokens=150, temperature=0.9, seed=i)[0].text for i in range(8)
            ]

            def said(seed):
                try:
                    parts = list(client.completions.create(**ASKED, seed=seed, stream=True))
                except openai.APIError:
                    return None  # it was the killed one's
                return "".join(part.choices[0].text for part in parts)

            with ThreadPoolExecutor(8) as pool:
                assert list(pool.map(said, range(8))) == texts
                victim, other = sorted(replicas(process))
                under_way = pool.map(said, range(8))
                os.kill(victim, signal.SIGKILL)
                found = list(under_way)
            assert all(text in (None, right) for text, right in zip(found, texts, strict=True))
            while said(0) is None:  # until it is known to be gone
                pass
            assert [said(i) for i in range(8)] == texts
            assert other in replicas(process)
            stream = client.completions.create(**ASKED, seed=0, n=120, stream=True)  # for some seconds
            parts = [next(stream)]
            process.send_signal(signal.SIGTERM)
            process.port, seen = int(url.rpartition(":")[2]), {200}
            while 503 not in seen:
                seen.add(ask(process, "/health", method="GET")[0])
            assert seen == {200, 503}
            assert ask(process, body=PROMPT)[0] == 503
            parts += stream
            assert "".join(part.choices[0].text for part in parts if part.choices[0].index == 0) == texts[0]
            assert process.wait() == 0
        finally:
            process.kill()
