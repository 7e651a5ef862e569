"""Continuous batching of converted models: what `transformers serve` and `generate_batch` of transformers ask for, done
by our engine. Sampling follows the generation config that it is started with."""

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
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
        self._wanted: dict[int, tuple[Request, GenerationOutput, list[int], bool]] = {}  # with ends, and if it streams
        self._handlers: dict[str, tuple[Callable[[GenerationOutput], None], asyncio.AbstractEventLoop]] = {}
        self._outputs: list[GenerationOutput] = []  # that nobody has asked for yet
        self._news, self._wake = threading.Condition(), threading.Event()
        self._thread, self._open, self._running = threading.Thread(), False, False

    def start(self) -> None:
        """Begin to compute."""
        if not self.is_running():
            self._thread = threading.Thread(target=self._run, name="depthgate engine", daemon=True)
            self._open = self._running = True
            self._thread.start()

    def is_running(self) -> bool:
        """True while requests are computed, or waited for."""
        return self._running

    def stop(self, block: bool = True, timeout: float | None = None, hard_stop: bool = False, **_: Any) -> None:
        """Take no further requests; those that run are finished, or cancelled if it is to be hard."""
        self._open = False
        for each in [*self._wanted.values()] if hard_stop else []:
            self.engine.cancel(each[0])
        self._wake.set()
        if block and self._thread.is_alive():
            self._thread.join(timeout)

    destroy = stop

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,  # noqa: ARG002
        eos_token_id: int | list[int] | None = None,
        **options: Any,
    ) -> str:
        """Add a prompt to the queue; the name of the request. `options` are those of Sampling."""
        if not self._open:
            raise DepthgateError("the engine is not running: start the manager")
        ends = self.config.eos_token_id if eos_token_id is None else eos_token_id
        room = max(1, self.engine.most - len(input_ids))
        most = min(room, max_new_tokens or self.config.max_new_tokens or room)
        seed = int(torch.randint(2**62, ()))  # so that torch.manual_seed holds
        with self._news:  # its tokens wait until it is known
            sampling = Sampling(**{**_sampling(self.config), **options, "max_new_tokens": most, "seed": seed})
            request = self.engine.submit(list(input_ids), sampling)
            output = GenerationOutput(request_id or f"req_{request.number}", request.result.prompt_tokens)
            self._wanted[request.number] = request, output, ends if isinstance(ends, list) else [ends], streaming
        self._wake.set()
        return str(output.request_id)

    def add_requests(self, inputs: Iterable[Sequence[int]], **options: Any) -> list[str]:
        """Add several prompts; the names of the requests."""
        return [self.add_request(ids, **options) for ids in inputs]

    def cancel_request(self, request_id: str) -> None:
        """End a request; nothing more comes of it."""
        with self._news:
            for request, output, *_ in [*self._wanted.values()]:
                if output.request_id == request_id:
                    del self._wanted[request.number]
                    self.engine.cancel(request)
        self._wake.set()

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The next output, of one request or of any; None if the time is up or nothing more will come."""

        def places() -> list[int]:
            return [i for i, output in enumerate(self._outputs) if request_id in (None, output.request_id)]

        with self._news:
            self._news.wait_for(lambda: places() or not self.is_running(), timeout)
            return self._outputs.pop(places()[0]) if places() else None

    def request_id_iter(self, request_id: str | None) -> Iterator[GenerationOutput]:
        """The outputs of one request until it is finished; for None, of all until the end."""
        while (output := self.get_result(request_id)) is not None:
            yield output
            if request_id is not None and output.is_finished():
                return

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        """Have the outputs of a request handed to a function in this event loop."""
        with self._news:
            self._handlers[request_id] = callback, asyncio.get_running_loop()
            early, self._outputs = self._outputs, []
            for output in early:
                self._send(output)

    def _run(self) -> None:
        try:
            while self._open or self._wanted:
                self._wake.clear()  # before the turn: what comes during it must not be missed
                events = self.engine.turn()
                with self._news:
                    for event in events:
                        self._take(event)
                if self._open and not self._wanted:
                    self._wake.wait()
        except Exception as error:
            self.fatal_error, self._open = error, False
            with self._news:
                for _, output, *_ in self._wanted.values():
                    self._send(replace(output, status=RequestStatus.FAILED, error=str(error)))
        with self._news:
            self._running = False
            self._news.notify_all()

    def _take(self, event: Event) -> None:
        if event.request not in self._wanted:  # it was cancelled
            return
        request, output, ends, streaming = self._wanted[event.request]
        failed, done = event.finish in ("error", "cancelled"), event.finish is not None or event.token in ends
        output.generated_tokens += [] if failed else [event.token]
        if done:
            del self._wanted[event.request]
            self.engine.cancel(request)  # has no effect if it is finished
        if done or streaming:
            status = RequestStatus.FAILED if failed else RequestStatus.FINISHED if done else RequestStatus.DECODING
            self._send(replace(output, status=status, error=event.finish if failed else None))

    def _send(self, output: GenerationOutput) -> None:
        output.generated_tokens = list(output.generated_tokens)  # no longer that which grows
        if output.request_id not in self._handlers:
            self._outputs.append(output)
            self._news.notify_all()
            return
        callback, loop = self._handlers[output.request_id]
        if output.is_finished():
            del self._handlers[output.request_id]
        loop.call_soon_threadsafe(callback, output)


def _sampling(config: Any) -> dict[str, Any]:
    """The options of Sampling that a generation config asks for; its values may be None."""
    if not config.do_sample:
        return {"temperature": 0, "repetition_penalty": config.repetition_penalty or 1.0}
    named = {name: getattr(config, name) for name in ("temperature", "top_p", "min_p", "repetition_penalty")}
    return {name: value for name, value in named.items() if value is not None} | {"top_k": config.top_k or None}
