"""The thread that turns the engine, and the jobs of clients, which wait for its tokens in the event loop."""

import asyncio
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from depthgate.generation.engine import Engine, Request
from depthgate.generation.text import Event
from depthgate.serve.asked import RequestError
from depthgate.serve.metrics import Metrics

MOST_UNREAD = 4096  # tokens of each sequence that a client may be behind


class Job:
    """The continuations that one client waits for; used in the event loop alone."""

    def __init__(self, worker: "Worker", arrived: float, deadline: float) -> None:
        self.worker, self.arrived, self.deadline = worker, arrived, deadline
        self.requests: dict[int, Request] = {}
        self.told: dict[int, float] = {}  # when the last token of each came
        self._finished = 0
        self._unread: list[Event] = []
        self._error: RequestError | None = None
        self._news = asyncio.Event()

    def tell(self, event: Event) -> None:
        """Take in a token."""
        self._unread.append(event)
        self._finished += event.finish is not None
        self._news.set()
        if event.finish == "error":
            self.fail(RequestError(500, "the model's logits are not finite: check its weights"))
        elif len(self._unread) > MOST_UNREAD * len(self.requests):
            self.fail(RequestError(408, "the answer is read too slowly: it was cancelled"))

    def fail(self, error: RequestError) -> None:
        """End with an error, which the client gets in place of what it has not read."""
        self._error = error
        self._news.set()
        self.close()

    def close(self) -> None:
        """Cancel what has not finished."""
        self.worker.cancel(self)

    async def news(self) -> list[Event]:
        """The tokens since the last call, at least one; none: all were there."""
        try:
            async with asyncio.timeout_at(self.deadline):
                while self._finished < len(self.requests) and not self._unread and not self._error:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise RequestError(504, "the answer takes longer than the server allows: ask for less") from None
        if self._error:
            raise self._error
        news, self._unread = self._unread, []
        return news


class Worker:
    """An engine and the thread that turns it; all but the thread itself runs in the event loop."""

    def __init__(self, engine: Engine, most: int, metrics: Metrics) -> None:
        self.engine, self.metrics = engine, metrics
        self.most = most  # sequences that may run and wait
        self.failed: str | None = None  # why the engine has stopped
        self.jobs: dict[int, Job] = {}  # by the numbers of their requests
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake, self._open = threading.Event(), True
        self._thread = threading.Thread(target=self._run, name="depthgate engine", daemon=True)
        self._thread.start()

    def check(self, wanted: int) -> None:
        """Refuse so many continuations if there is no place for them."""
        if self.failed is not None:
            raise RequestError(503, f"the engine has stopped ({self.failed}): restart the server")
        if wanted > self.most:
            raise RequestError(400, f"{wanted} sequences are too many: ask for at most {self.most} at a time")
        if len(self.jobs) + wanted > self.most:
            raise RequestError(429, "too many sequences are waiting: try again later", code="queue_full")

    def submit(self, wanted: list[tuple[Any, ...]], arrived: float, deadline: float) -> Job:
        """A job of continuations, each given by the arguments of Engine.add; all of them are taken, or none."""
        self.check(len(wanted))
        self._loop = asyncio.get_running_loop()
        job = Job(self, arrived, deadline)
        try:
            for each in wanted:
                request = self.engine.add(*each)
                job.requests[request.number], self.jobs[request.number] = request, job
        except BaseException:
            job.close()
            raise
        self._wake.set()
        return job

    def cancel(self, job: Job) -> None:
        """Take back what has not finished: its rows are free after the engine's next turn."""
        for number, request in job.requests.items():
            if self.jobs.pop(number, None) is not None:
                self.engine.cancel(request)
        self._wake.set()

    def close(self) -> None:
        """End the thread when its turn is over."""
        self._open = False
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._open:
                self._wake.clear()  # before the turn: what comes during it must not be missed
                if events := self.engine.turn():
                    self._in_loop(self._deliver, events)
                elif not self.engine.running and not self.engine.waiting:
                    self._wake.wait()
        except Exception as error:
            self.failed = f"{type(error).__name__}: {str(error)[:200]}"
            self._in_loop(self._fail)
            raise

    def _in_loop(self, call: Callable[..., None], *given: Any) -> None:
        with suppress(RuntimeError):  # the loop was closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(call, *given)

    def _deliver(self, events: Iterable[Event]) -> None:
        now = asyncio.get_running_loop().time()
        for event in events:
            if (job := self.jobs.get(event.request)) is None:  # it was cancelled meanwhile
                continue
            self.metrics.token(now, job.arrived, job.told.get(event.request))
            job.told[event.request] = now
            if event.finish is not None:
                del self.jobs[event.request]
                self.metrics.finished(job.requests[event.request].result, self.engine.model.config.layers)
            job.tell(event)

    def _fail(self) -> None:
        for job in set(self.jobs.values()):
            job.fail(RequestError(500, f"the engine failed: {self.failed}"))
