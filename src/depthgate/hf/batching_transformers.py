"""Continuous batching of converted models: what `transformers serve` and `generate_batch` of transformers ask for, done
by our engine. Sampling follows the generation config that it is started with."""

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.generation.config import Sampling
from depthgate.generation.engine import Engine, Request
from depthgate.generation.text import Event
from depthgate.hf.decoder_weights import to_decoder

_OPTIONS = {"max_new_tokens", "eos_token_id", "streaming", "record_timestamps"}  # the last has no effect
# Options of a generation config that change tokens, and that the engine does not have.
_UNKNOWN = (
    *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "no_repeat_ngram_size"),
    *("min_new_tokens", "min_length", "forced_bos_token_id", "forced_eos_token_id", "typical_p", "stop_strings"),
    *("epsilon_cutoff", "eta_cutoff", "guidance_scale", "exponential_decay_length_penalty", "penalty_alpha"),
)


class Manager:
    """Stands where transformers has its ContinuousBatchingManager, whose methods these are."""

    warmed_up = True

    def __init__(self, model: Any, config: Any) -> None:
        if (config.num_return_sequences or 1) > 1 or (config.num_beams or 1) > 1:
            raise DepthgateError("continuous batching gives one sampled text a request: leave beams and copies out")
        if wrong := [name for name in _UNKNOWN if getattr(config, name, None) not in (None, 0, 1.0, [], {})]:
            raise DepthgateError(f"continuous batching does not know {wrong[0]}: take it out of the generation config")
        self.engine, self.config = Engine(to_decoder(model).eval()), config
        self.fatal_error: Exception | None = None
        self.background_thread_status = self  # where transformers looks for the error
        self._wanted: dict[int, tuple[Request, GenerationOutput, list[int], bool]] = {}  # with ends, and if it streams
        self._handlers: dict[str, Callable[[GenerationOutput], object]] = {}
        self._outputs: list[GenerationOutput] = []  # that were not asked for yet
        self._refused = 0
        self._news, self._open = threading.Condition(), False  # the first guards all of this
        self._thread = threading.Thread(target=self._run, name="depthgate engine", daemon=True)

    def start(self) -> None:
        self._open = True
        self._thread.start()

    def is_running(self) -> bool:
        return bool(self._open or self._wanted)

    def stop(self, block: bool = True, timeout: float | None = None, **_: Any) -> None:
        """Take no further requests; those that run are finished."""
        with self._news:
            self._open = False
            self._news.notify_all()
        if block and self._thread.is_alive():
            self._thread.join(timeout)

    destroy = stop

    def add_request(self, input_ids: Sequence[int], request_id: str | None = None, **options: Any) -> str:
        """Add a prompt to the queue. Options: max_new_tokens, eos_token_id and streaming."""
        if unknown := options.keys() - _OPTIONS:
            raise DepthgateError(f"{min(unknown)} is not an option of a request: set it in the generation config")
        ends, room = options.get("eos_token_id"), max(1, self.engine.most - len(input_ids))
        ends = self.config.eos_token_id if ends is None else ends
        most = min(room, options.get("max_new_tokens") or self.config.max_new_tokens or room)
        seed = int(torch.randint(2**62, ()))  # so that torch.manual_seed holds
        sampling = Sampling(**_sampling(self.config), max_new_tokens=most, seed=seed)
        with self._news:
            if not self._open:
                raise DepthgateError("the engine is not running: start the manager")
            request = self.engine.submit(list(input_ids), sampling)
            output = GenerationOutput(request_id or f"req_{request.number}", request.result.prompt_tokens)
            ends = ends if isinstance(ends, list) else [ends]
            self._wanted[request.number] = request, output, ends, options.get("streaming", False)
            self._news.notify_all()
        return str(output.request_id)

    def add_requests(self, inputs: Iterable[Sequence[int]], **options: Any) -> list[str]:
        """Add prompts to the queue; one that is refused has an output that says why, and the others go on."""
        return [self._added(ids, options) for ids in inputs]

    def _added(self, ids: Sequence[int], options: dict[str, Any]) -> str:
        try:
            return self.add_request(ids, **options)
        except InvalidValueError as error:
            with self._news:
                self._refused += 1
                name = f"refused_{self._refused}"
                self._send(GenerationOutput(name, [*ids], error=str(error), status=RequestStatus.FAILED))
            return name

    def cancel_request(self, request_id: str) -> None:
        with self._news:
            for request, output, *_ in [*self._wanted.values()]:
                if output.request_id == request_id:
                    del self._wanted[request.number]
                    self.engine.cancel(request)

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
        loop = asyncio.get_running_loop()
        with self._news:
            self._handlers[request_id] = lambda output: loop.call_soon_threadsafe(callback, output)
            early, self._outputs = self._outputs, []
            for output in early:
                self._send(output)

    def _run(self) -> None:
        try:
            while self.is_running():
                events = self.engine.turn()
                with self._news:
                    for event in events:
                        self._take(event)
                    self._news.wait_for(lambda: self._wanted or not self._open)
        except Exception as error:
            self.fatal_error = error
        with self._news:
            self._open = False
            for _, output, *_ in self._wanted.values():
                self._send(replace(output, status=RequestStatus.FAILED, error=str(self.fatal_error)))
            self._wanted.clear()
            self._news.notify_all()

    def _take(self, event: Event) -> None:
        if event.request not in self._wanted:  # it was cancelled
            return
        request, output, ends, streams = self._wanted[event.request]
        done, fault = event.finish is not None or event.token in ends, request.fault
        output.generated_tokens += [] if fault else [event.token]
        if done:
            del self._wanted[event.request]
            self.engine.cancel(request)  # has no effect if it is finished
        if done or streams:
            status = RequestStatus.FAILED if fault else RequestStatus.FINISHED if done else RequestStatus.DECODING
            tokens = list(output.generated_tokens)  # not those which grow
            self._send(replace(output, generated_tokens=tokens, status=status, error=str(fault) if fault else None))

    def _send(self, output: GenerationOutput) -> None:
        if handler := self._handlers.get(output.request_id):
            handler(output)
        else:
            self._outputs.append(output)
            self._news.notify_all()
        if output.is_finished():
            self._handlers.pop(output.request_id, None)


def _sampling(config: Any) -> dict[str, Any]:
    """The options of Sampling that a generation config asks for; its values may be None."""
    if not config.do_sample:
        return {"temperature": 0, "repetition_penalty": config.repetition_penalty or 1.0}
    named = {name: getattr(config, name) for name in ("temperature", "top_p", "min_p", "repetition_penalty")}
    return {name: value for name, value in named.items() if value is not None} | {"top_k": config.top_k or None}
