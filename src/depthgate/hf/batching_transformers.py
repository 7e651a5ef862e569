"""Continuous batching of converted models: what `transformers serve` and `generate_batch` of transformers ask for, done
by our engine. Sampling follows the generation config that it is started with."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from depthgate.errors import DepthgateError
from depthgate.generation.config import Sampling
from depthgate.generation.engine import Engine, Request
from depthgate.generation.text import Event
from depthgate.hf.decoder_weights import to_decoder
from depthgate.model import Decoder

_MEMORY = 2**16  # tokens of keys and values; more where one sequence may be longer


@dataclass
class _Wanted:
    """A request under way."""

    name: str
    request: Request
    ends: set[int]
    streaming: bool
    tokens: list[int] = field(default_factory=list)

    def output(self, status: RequestStatus, error: str | None = None) -> GenerationOutput:
        return GenerationOutput(self.name, self.request.result.prompt_tokens, [*self.tokens], [], error, status)


class Manager:
    """Stands where transformers has its ContinuousBatchingManager."""

    warmed_up = True

    def __init__(self, model: Any, config: Any) -> None:
        if (config.num_return_sequences or 1) > 1 or (config.num_beams or 1) > 1:
            raise DepthgateError("continuous batching gives one sampled text a request: leave beams and copies out")
        decoder: Decoder = to_decoder(model).eval()
        self.engine, self.config = Engine(decoder, memory=max(_MEMORY, decoder.config.context)), config
        self.fatal_error: Exception | None = None
        self.background_thread_status = self  # where newer versions look for the error
        self._wanted: dict[int, _Wanted] = {}  # by number
        self._handlers: dict[str, tuple[Callable[[GenerationOutput], None], asyncio.AbstractEventLoop]] = {}
        self._outputs: deque[GenerationOutput] = deque()  # that nobody has asked for yet
        self._news, self._wake = threading.Condition(), threading.Event()
        self._thread, self._open, self._count = threading.Thread(), False, 0

    def start(self) -> None:
        """Begin to compute."""
        if not self.is_running():
            self._open, self._thread = True, threading.Thread(target=self._run, name="depthgate engine", daemon=True)
            self._thread.start()

    def is_running(self) -> bool:
        """True while requests are computed, or waited for."""
        return self._thread.is_alive()

    def warmup(self) -> None:
        """Do nothing: the engine warms up by itself."""

    def stop(self, block: bool = True, timeout: float | None = None, hard_stop: bool = False, **_: Any) -> None:
        """Take no further requests; those that run are finished, or cancelled if it is to be hard."""
        self._open = False
        if hard_stop:
            for each in [*self._wanted.values()]:
                self.engine.cancel(each.request)
        self._wake.set()
        if block and self.is_running():
            self._thread.join(timeout)

    destroy = stop

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        eos_token_id: int | list[int] | None = None,
        **options: Any,
    ) -> str:
        """Add a prompt to the queue; the name of the request. `options` are those of Sampling."""
        if not self._open:
            raise DepthgateError("the engine is not running: start the manager")
        ends = self.config.eos_token_id if eos_token_id is None else eos_token_id
        room = max(1, self.engine.most - len(input_ids))
        most = max_new_tokens or self.config.max_new_tokens or room
        seed = int(torch.randint(2**62, ()))  # so that torch.manual_seed holds
        options.pop("record_timestamps", None)
        sampling = Sampling(**{**_sampling(self.config), **options, "max_new_tokens": min(most, room), "seed": seed})
        with self._news:  # so that its tokens wait until it is known
            self._count += 1
            request = self.engine.submit(list(input_ids), sampling)
            each = _Wanted(
                request_id or f"req_{self._count}", request, {*(ends if isinstance(ends, list) else [ends])}, streaming
            )
            self._wanted[request.number] = each
        self._wake.set()
        return each.name

    def add_requests(self, inputs: Iterable[Sequence[int]], **options: Any) -> list[str]:
        """Add several prompts; the names of the requests."""
        return [self.add_request(ids, **options) for ids in inputs]

    def cancel_request(self, request_id: str) -> None:
        """End a request; nothing more comes of it."""
        with self._news:
            for each in [each for each in self._wanted.values() if each.name == request_id]:
                del self._wanted[each.request.number]
                self.engine.cancel(each.request)
        self._wake.set()

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The next output, of one request or of any; None if the time is up or nothing more will come."""

        def found() -> GenerationOutput | None:
            return next((out for out in self._outputs if request_id in (None, out.request_id)), None)

        with self._news:
            self._news.wait_for(lambda: found() or not self.is_running(), timeout)
            output = found()
            if output is not None:
                self._outputs.remove(output)
            return output

    def request_id_iter(self, request_id: str | None) -> Iterator[GenerationOutput]:
        """The outputs of one request until it is finished; of all that there are, for None."""
        while (output := self.get_result(request_id)) is not None:
            yield output
            if request_id is not None and output.is_finished():
                return

    def __iter__(self) -> Iterator[GenerationOutput]:
        return self.request_id_iter(None)

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        """Have the outputs of a request handed to a function in this event loop."""
        with self._news:
            self._handlers[request_id] = callback, asyncio.get_running_loop()
            early = [output for output in self._outputs if output.request_id == request_id]
            for output in early:
                self._outputs.remove(output)
                self._send(output)

    def _run(self) -> None:
        try:
            while self._open or self._wanted:
                self._wake.clear()  # before the turn: what comes during it must not be missed
                events = self.engine.turn()
                with self._news:
                    for event in events:
                        self._take(event)
                if not self._wanted and self._open:
                    self._wake.wait()
        except Exception as error:
            self.fatal_error, self._open = error, False
            with self._news:
                for each in self._wanted.values():
                    self._send(each.output(RequestStatus.FAILED, str(error)))
        finally:
            with self._news:
                self._news.notify_all()

    def _take(self, event: Event) -> None:
        each = self._wanted.get(event.request)
        if each is None:  # it was cancelled
            return
        if event.finish in ("error", "cancelled"):
            del self._wanted[event.request]
            self._send(each.output(RequestStatus.FAILED, f"the request ended: {event.finish}"))
            return
        each.tokens.append(event.token)
        if event.finish is not None or event.token in each.ends:
            del self._wanted[event.request]
            self.engine.cancel(each.request)  # has no effect if it is finished
            self._send(each.output(RequestStatus.FINISHED))
        elif each.streaming:
            self._send(each.output(RequestStatus.DECODING))

    def _send(self, output: GenerationOutput) -> None:
        callback, loop = self._handlers.get(output.request_id, (None, None))
        if callback is None or loop is None:
            self._outputs.append(output)
            self._news.notify_all()
            return
        if output.is_finished():
            del self._handlers[output.request_id]
        loop.call_soon_threadsafe(callback, output)


def _sampling(config: Any) -> dict[str, Any]:
    """The options of Sampling that a generation config asks for; its values may be None."""
    if not config.do_sample:
        return {"temperature": 0, "repetition_penalty": config.repetition_penalty or 1.0}
    named = {name: getattr(config, name) for name in ("temperature", "top_p", "min_p", "repetition_penalty")}
    return {name: value for name, value in named.items() if value is not None} | {"top_k": config.top_k or None}
