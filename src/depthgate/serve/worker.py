"""The engine at work: the jobs of clients, who wait for tokens in the event loop, and figures of what was done."""

import asyncio
import traceback
from collections import defaultdict
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product

from depthgate.generation.config import Sampling
from depthgate.generation.engine import Engine, Request
from depthgate.generation.text import Event, Generation
from depthgate.serve.protocol import RequestError

MOST_UNREAD = 4096  # tokens of each sequence that a client may be behind
_SECONDS = ("0.001", "0.0025", "0.005", "0.01", "0.025", "0.05", "0.1", "0.25", "0.5", "1", "5", "30", "+Inf")


class Job:
    """The continuations that one client waits for."""

    def __init__(self, worker: "Worker", arrived: float, client: object) -> None:
        self.worker, self.client, self.arrived = worker, client, arrived
        self.deadline = arrived + worker.timeout
        self.requests: dict[int, Request] = {}
        self.told: dict[int, float] = {}  # when the last token of each came
        self.unread: asyncio.Queue[Event | RequestError] = asyncio.Queue()
        late = RequestError(504, "the answer takes longer than the server allows: ask for less")
        self._timer = asyncio.get_running_loop().call_at(self.deadline, self.fail, late)

    def fail(self, error: RequestError) -> None:
        """End with an error, which the client gets in place of what it has not read."""
        self.unread.put_nowait(error)
        self.close()

    def close(self) -> None:
        """Cancel what has not finished: its rows are free after the engine's next turn."""
        self._timer.cancel()
        for number, request in self.requests.items():
            if self.worker.jobs.pop(number, None) is not None:
                self.worker.engine.cancel(request)

    async def news(self) -> AsyncIterator[list[Event]]:
        """Tokens until all are there, those together that came since the last time."""
        left = len(self.requests)
        while left:
            news: list[Event] = []
            while not news or not self.unread.empty():
                found = await self.unread.get()
                if isinstance(found, RequestError):
                    raise found
                news.append(found)
                left -= found.finish is not None
            yield news


class Worker:
    """An engine, which turns in a thread of its own while there is something to do."""

    def __init__(self, engine: Engine, queue: int, timeout: float) -> None:
        """queue: sequences that may wait, half of them of one client. timeout: seconds that a job may take."""
        self.engine, self.queue, self.timeout = engine, queue, timeout
        self.metrics: defaultdict[str, float] = defaultdict(float)  # by their names in Prometheus' text format
        self.failed: str | None = None  # why the engine has stopped
        self.jobs: dict[int, Job] = {}  # by the numbers of their requests
        self._thread = ThreadPoolExecutor(1, "depthgate engine")
        self._turning: asyncio.Task[None] | None = None

    def check(self, wanted: int, client: object = None) -> None:
        """Raise an error if there is not room for this many more continuations, in all or of a client."""
        if self.failed is not None:
            raise RequestError(503, f"the engine has stopped ({self.failed}): restart the server")
        rows, half = self.engine.rows, (self.queue + 1) // 2
        if wanted > rows + half:
            raise RequestError(400, f"{wanted} sequences are too many: ask for at most {rows + half} at a time")
        jobs = [*self.jobs.values()]  # as of now: another thread may change them
        mine = sum(job.client == client for job in jobs)
        left = max(0, rows - (len(jobs) - mine)) + half  # places that others do not have
        if len(jobs) + wanted > rows + self.queue or mine + wanted > left:
            raise RequestError(429, "too many sequences are waiting: try again later", code="queue_full")

    def submit(
        self, prompts: list[Generation], samplings: list[Sampling], top: int | None, arrived: float, client: object
    ) -> Job:
        """A job that continues each prompt with each of the options; all of it is taken, or nothing."""
        self.check(len(prompts) * len(samplings), client)
        job = Job(self, arrived, client)
        try:
            for prompt, sampling in product(prompts, samplings):
                result = Generation(prompt.prompt, prompt.prompt_tokens)
                request = self.engine.add(result, sampling, top, owners=(client, job))
                job.requests[request.number], self.jobs[request.number] = request, job
        except Exception:
            job.close()
            raise
        finally:
            if self._turning is None or self._turning.done():
                self._turning = asyncio.create_task(self._turn())
        return job

    async def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self.engine.running or self.engine.waiting:
                for event in await loop.run_in_executor(self._thread, self.engine.turn):
                    if event.request in self.jobs:  # it was not cancelled meanwhile
                        self._deliver(event, self.jobs[event.request], loop.time())
        except Exception as error:
            traceback.print_exc()
            self.failed = f"{type(error).__name__}: {str(error)[:200]}"
            for job in set(self.jobs.values()):
                job.fail(RequestError(500, f"the engine failed: {self.failed}"))

    def _deliver(self, event: Event, job: Job, now: float) -> None:
        name = "token_latency_seconds" if event.request in job.told else "time_to_first_token_seconds"
        self._took(name, now - job.told.get(event.request, job.arrived))
        job.told[event.request] = now
        job.unread.put_nowait(event)
        if event.finish is not None:
            del self.jobs[event.request]
            self._count(job.requests[event.request].result)
        if event.finish == "error":
            job.fail(RequestError(500, str(job.requests[event.request].fault)))
        elif job.unread.qsize() > MOST_UNREAD * len(job.requests):
            job.fail(RequestError(408, "the answer is read too slowly: it was cancelled"))

    def _took(self, name: str, seconds: float) -> None:
        for most in _SECONDS:
            self.metrics[f'{name}_bucket{{le="{most}"}}'] += seconds <= float(most)
        self.metrics[f"{name}_sum"] += seconds
        self.metrics[f"{name}_count"] += 1

    def _count(self, result: Generation) -> None:
        layers = self.engine.model.config.layers * len(result.depths)
        self.metrics["prompt_tokens_total"] += len(result.prompt_tokens)
        self.metrics["generated_tokens_total"] += len(result.tokens)
        self.metrics["layers_total"] += layers
        self.metrics["layers_skipped_total"] += layers - sum(result.depths)
