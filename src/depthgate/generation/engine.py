"""An engine that many requests share: they join while others run, and leave when they are done.

`turn` is called again and again. It lets waiting requests in where there are rows and pages for them, reads a chunk of
their prompts, and makes a step of all rows that run. Where pages run out, the newest request goes
back to the queue, and later reads again what it has written: its tokens stay the same, since they depend on its prompt
and seed alone.
"""

import os
import threading
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain

import torch
from torch import Tensor

from depthgate.errors import InvalidValueError, TooLongError, check_count
from depthgate.generation.batch import TRASH, Batch, Taken, Unread
from depthgate.generation.config import Sampling
from depthgate.generation.plain import tokens_at_once
from depthgate.generation.prompts import Prompts
from depthgate.generation.sampling import NOT_FINITE, Likely, likely, used_filters
from depthgate.generation.text import Event, Generation, Prompt, Writing, check_stops, read_prompts
from depthgate.model import Decoder

_PAGE, _MOST_ROWS = 256, 64
_CHUNKS = 32  # of tokens of prompts that are read at once while no request is written
_AHEAD = 3  # steps that a GPU has before it while the first of them is read
_MOST_LIKELY = 20  # tokens whose log-probabilities a request may ask for


class Request(Writing):
    """One continuation: its result fills up as events come."""

    def __init__(self, number: int, result: Generation, model: Decoder, sampling: Sampling, top: int | None) -> None:
        super().__init__(number, result, model, sampling)
        self.top, self.seed = top, sampling.seeds(1)[0]
        self.owners: tuple[object, ...] = (self,)  # who asked for it: a client, what it asked for
        self.row: int | None = None
        self.fault: Exception | None = None  # why it ended with "error"
        self.pages: list[list[int]] = []  # of each group of layers: all that every token goes through, each routed one
        self.lengths: list[int] = []  # entries in them

    @property
    def ids(self) -> list[int]:
        return self.result.prompt_tokens + self.result.tokens


class Engine:
    """Rows and pages for the requests of one model. `submit` and `cancel` may be called from any thread, `turn` from
    one at a time."""

    def __init__(
        self,
        model: Decoder,
        *,
        rows: int = _MOST_ROWS,
        memory: int | None = None,
        chunk: int | None = None,
        page: int = _PAGE,
    ) -> None:
        """rows: requests that run at once. memory: tokens that they can have together; unless given, all that the rows
        can hold and half of the free memory has room for. chunk: tokens of prompts that are read in a turn;
        unless given 512, on CUDA 2,048. page: tokens of a page."""
        if why := cannot_run(model):
            raise InvalidValueError(why)
        config = model.config
        self.model, self.rows = model, check_count(rows, "rows")
        self.chunk = tokens_at_once(chunk, model.embed.weight.device)
        self.page = min(check_count(page, "page"), config.context)
        longest = self._pages(config.context)
        if memory is None:
            memory = max(self.page, min(rows * longest * self.page, _tokens_in_half_of_memory(model)))
        dense = check_count(memory, "memory", minimum=self.page) // self.page
        self.most = min(config.context, dense * self.page)  # tokens that one request may have
        # Twice what a routed layer takes on average, and a page that is not full in each row; but at least enough for
        # one request that enters it with every token.
        routed = max(min(longest, dense), min(dense, int(2 * config.capacity * dense) + rows)) * len(config.routed)
        self.batch = Batch(model, rows, dense, routed, self.page)
        self.prompts = Prompts(self.batch)
        self.ahead = _AHEAD if self.batch.device.type == "cuda" else 0
        self._free = [list(range(pages, TRASH, -1)) for pages in (dense, routed)]
        self._queue, self._cancelled = deque[Request](), deque[Request]()
        self._reading: tuple[list[Request], Unread] | None = None
        self._active: list[Request] = []  # by row
        self._lately = deque[tuple[object, ...]](maxlen=_MOST_ROWS)  # owners of those that were let in last
        self._flying: deque[tuple[list[Request], Taken]] = deque()  # steps that were begun, and not read yet
        self._lock, self._count = threading.Lock(), 0

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Requests that are read or written."""
        return len(self._active) + (len(self._reading[0]) if self._reading else 0)

    @property
    def kv_bytes(self) -> int:
        """Memory of the pages that hold keys and values now."""
        return sum(
            layer.kv[0].nbytes * len(request.pages[layer.group])
            for request in self._active
            for layer in self.batch.layers
        )

    def submit(self, prompt: Prompt, sampling: Sampling, logprobs: int | None = None) -> Request:
        """Add a request to the end of the queue. `logprobs`: also find the log-probability of each token, and of so
        many of the likeliest."""
        (result,) = read_prompts(self.model, [prompt])
        check_stops(self.model, sampling)
        return self.add(result, sampling, logprobs)

    def add(
        self, result: Generation, sampling: Sampling, logprobs: int | None = None, owners: tuple[object, ...] = ()
    ) -> Request:
        """`submit` a prompt that was read, whose result is to be filled. The first that waits of the owner with the
        fewest that run or ran lately comes next; where owners have as many, their next owners decide."""
        if sampling.beams > 1:
            raise InvalidValueError(f"beams is {sampling.beams}: an engine samples; search with dg.generate")
        if logprobs is not None:
            check_count(logprobs, "logprobs", 0, _MOST_LIKELY)
        with self._lock:
            request = Request(self._count, result, self.model, sampling, logprobs)
            self._count += 1
        request.owners = owners or request.owners
        if len(request.ids) + request.most > self.most:
            raise TooLongError(
                f"the prompt has {len(request.ids)} tokens and may grow by {request.most}, and there is memory for "
                f"{self.most}: lower max_new_tokens, or give the engine more memory"
            )
        self._queue.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request in the next turn, unless it is finished by then."""
        self._cancelled.append(request)

    @torch.inference_mode()
    def turn(self) -> list[Event]:
        """Work for as long as a step takes, and return the tokens that came of it; none if there is nothing to do."""
        found, alone = [*self._drop_cancelled()], not self._active
        found += self._read()
        if alone and found:
            return found  # first tokens wait for no step, where no other request does
        if any(len(each.result.tokens) + len(self._flying) >= each.most for each in self._active):
            found += self._land_all()  # a request that may be complete makes no further step
        found += self._make_room()
        if self._active:
            taken = self.batch.step(used_filters(each.sampling for each in self._active), _most(self._active))
            self._flying.append((list(self._active), taken))
        while len(self._flying) > (self.ahead if self._active else 0):
            found += self._land()
        return found

    def _drop_cancelled(self) -> Iterator[Event]:
        while self._cancelled:
            request = self._cancelled.popleft()
            if request.result.finish is not None:
                continue
            if request in self._queue:
                self._queue.remove(request)
            yield self._end(request, "cancelled")

    def _read(self) -> Iterator[Event]:
        """Read a chunk of the prompts that come next, and begin to write where they were read whole."""
        self._reading = self._reading or self._let_in()
        if self._reading is None:
            return
        requests, state = self._reading
        parts = []
        for request in requests:
            at, known = request.lengths[0], len(request.result.depths)  # it knows more if it was sent back
            parts.append(request.ids[at : min(at + self.chunk, known)] or request.ids[at : at + self.chunk])
        pages = [request.pages for request in requests]
        logits, entered = self.prompts.read(parts, pages, requests[0].lengths, state)
        depths = (entered.sum(0) + len(self.model.layers) - len(entered)).tolist()
        for request, part, ways, routed in zip(requests, parts, depths, entered.sum(2).T.tolist(), strict=True):
            request.lengths = [a + b for a, b in zip(request.lengths, [len(part), *routed], strict=True)]
            if request.lengths[0] > len(request.result.depths):
                request.result.note(ways[: len(part)], routed)
        if all(request.lengths[0] == len(request.ids) for request in requests):
            self._reading = None
            yield from self._begin(requests, logits, state)

    def _let_in(self) -> tuple[list[Request], Unread] | None:
        """Requests of the queue that there are rows and pages for: one, or several that fit into a chunk, and into more
        of them where nothing else would wait meanwhile."""
        taken: list[Request] = []
        longest, most = 0, self.chunk * (1 if self._active else _CHUNKS)
        groups, owners = 1 + len(self.model.config.routed), [*self._lately, *(each.owners for each in self._active)]
        served = Counter(chain.from_iterable(owners))
        while self._queue and len(self._active) + len(taken) < self.rows:
            request = self._next(served)
            size = len(request.ids)
            longest, need = max(longest, size), self._pages(size + 1)
            several = longest <= self.chunk and (len(taken) + 1) * longest <= most
            if taken and (not several or request.result.depths or taken[0].result.depths):
                break
            if need > len(self._free[0]) or need * (groups - 1) > len(self._free[1]):
                break
            self._queue.remove(request)
            self._lately.append(request.owners)
            served.update(request.owners)
            request.lengths = [0] * groups
            request.pages = [[self._free[group > 0].pop() for _ in range(need)] for group in range(groups)]
            taken.append(request)
        return (taken, self.prompts.unread(len(taken))) if taken else None

    def _next(self, served: Counter[object]) -> Request:
        """The request of the queue that comes next: one that was sent back, which stands first, or of the owner who has
        the fewest that run or ran lately."""
        queue = self._queue.copy()
        idle = (each for each in queue if each.result.depths or not served[each.owners[0]])
        return next(idle, None) or min(queue, key=lambda each: [served[owner] for owner in each.owners])

    def _begin(self, requests: Sequence[Request], logits: Tensor, state: Unread) -> Iterator[Event]:
        """Give rows to requests that were read, pick their first tokens, and take back pages that nothing entered."""
        for request in requests:
            for group, (pages, length) in enumerate(zip(request.pages, request.lengths, strict=True)):
                self._free[group > 0] += pages[self._pages(length) :]
                del pages[self._pages(length) :]
            request.row = len(self._active)
            self._active.append(request)
        known = [(each.pages, each.lengths, (each.seed, len(each.result.tokens)), each.sampling) for each in requests]
        tokens = self.batch.begin(logits, state, *map(list, zip(*known, strict=True)))
        finite, found = logits.amax(-1).isfinite(), likely(logits, tokens, _most(requests))
        yield from self._write(requests, tokens.tolist(), finite.tolist(), found)

    def _make_room(self) -> Iterator[Event]:
        """Have a place for one more entry in every group of every row; where there are no pages left, the newest
        requests go back to the queue."""
        for request in sorted(self._active, key=lambda each: each.number):
            for group in range(len(request.lengths)):
                while request.row is not None and not self._grow(request, group, request.lengths[group] + 1):
                    yield from self._land_all()
                    if not self._free[group > 0]:
                        read = self._reading[0] if self._reading else ()
                        newest = max((*self._active, *read), key=lambda each: each.number)
                        self._release(newest)
                        self._queue.appendleft(newest)

    def _grow(self, request: Request, group: int, entries: int) -> bool:
        """Give a request pages for so many entries, and one for each step that is under way; False if there are not
        enough."""
        pages, free = request.pages[group], self._free[group > 0]
        while len(pages) < self._pages(min(entries + len(self._flying), self.model.config.context)):
            if not free:
                return False
            pages.append(free.pop())
            if request.row is not None:
                self.batch.set_pages(request.row, group, len(pages) - 1, pages[-1:])
        return True

    def _pages(self, entries: int) -> int:
        return -(-entries // self.page)

    def _land_all(self) -> Iterator[Event]:
        while self._flying:
            yield from self._land()

    def _land(self) -> Iterator[Event]:
        """Read what the oldest step under way has found, for the requests that have not left since it began."""
        requests, taken = self._flying.popleft()
        tokens, finite, layers = taken.read()
        dense = len(self.model.layers) - len(self.model.config.routed)
        for request, entered in zip(requests, layers, strict=False):
            if request.row is not None:
                request.result.note([dense + sum(entered)], entered)
                request.lengths = [a + b for a, b in zip(request.lengths, [1, *entered], strict=True)]
        yield from self._write(requests, tokens, finite, taken.likely)

    def _write(
        self, requests: Sequence[Request], tokens: Sequence[int], finite: Sequence[int], found: Likely | None
    ) -> Iterator[Event]:
        """Add tokens to the results of requests that have not left."""
        top, done = found.read() if found else [], list[Request]()
        for n, (request, token, good) in enumerate(zip(requests, tokens, finite, strict=False)):
            if request.row is None:
                continue
            logprob, likeliest = top[n] if request.top is not None else (None, ())
            try:
                if not good:
                    raise InvalidValueError(NOT_FINITE.format(f"request {request.number}"))
                event = request.add(token, logprob, tuple(likeliest[: request.top]))
            except Exception as error:  # also of a tokenizer: it ends this request alone
                request.fault = error
                event = self._end(request, "error")
            if event.finish is not None:
                done.append(request)
            yield event
        for request in reversed(done):  # the last row needs no other in its place
            self._release(request)

    def _end(self, request: Request, finish: str) -> Event:
        """The last event of a request that ends without a token."""
        with suppress(Exception):  # of a tokenizer that has failed
            request.close()
        if request.pages and (finish == "error" or request.row is None):  # its logits are bad, or not known
            self.batch.clean(request.pages)
        request.result.finish = finish
        self._release(request)
        return Event(request.number, -1, "", 0, finish)

    def _release(self, request: Request) -> None:
        """Give back the row and the pages of a request, if it has any."""
        for group, pages in enumerate(request.pages):
            self._free[group > 0] += pages
        request.pages = []
        if request.row is None:
            if self._reading and request in self._reading[0]:
                self._reading = None  # a request that is read for more than a turn is read alone
            return
        self.batch.drop(request.row)
        last = self._active.pop()
        if last is not request:  # the last row takes its place
            self._active[request.row], last.row = last, request.row
        request.row = None


def _most(requests: Iterable[Request]) -> int | None:
    """The most log-probabilities that one of the requests asks for."""
    return max((request.top for request in requests if request.top is not None), default=None)


def _tokens_in_half_of_memory(model: Decoder) -> int:
    """Tokens whose keys and values take half of the free memory of the model's device."""
    config, weight = model.config, model.embed.weight
    layers = config.layers - len(config.routed) * max(0, 1 - 2 * config.capacity)  # that a token has pages for
    size = 2 * (config.kv_heads or config.heads) * config.head_size * weight.element_size() * layers
    machine = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = torch.cuda.mem_get_info(weight.device)[0] if weight.is_cuda else machine
    return int(free / 2 / size)


def cannot_run(model: Decoder) -> str:
    """The reason why an engine cannot run a model where it is; "" if it can."""
    weight = model.embed.weight
    if weight.is_cuda and find_spec("triton") is None:
        return "the engine's kernels need triton: pip install triton"
    if weight.is_cuda and torch.cuda.get_device_capability(weight.device) < (8, 0):
        return "the engine's kernels need a GPU of compute capability 8.0 or later"
    if weight.is_cuda and weight.dtype is torch.float64:
        return "the engine's kernels do not compute in float64: use float32 or bfloat16"
    return ""


def run(model: Decoder, todo: Sequence[Generation], sampling: Sampling, chunk: int | None) -> Generator[Event]:
    """Tokens of some requests as they come, by an engine of their own; `todo` fills up with the results. Where it is
    interrupted or closed, the text that was held back is added."""
    context, rows = model.config.context, min(len(todo), _MOST_ROWS)
    page = min(_PAGE, context)
    grown = sorted(min(context, len(each.prompt_tokens) + sampling.max_new_tokens) for each in todo)[-rows:]
    memory = sum(-(-tokens // page) * page for tokens in grown)
    engine = Engine(model, rows=rows, memory=memory, chunk=chunk, page=page)
    seeds = sampling.seeds(len(todo))
    own = [sampling if seed == sampling.seed else replace(sampling, seed=seed) for seed in seeds]
    requests = [engine.add(each, one) for each, one in zip(todo, own, strict=True)]
    try:
        while engine.waiting or engine.running:
            for event in engine.turn():
                if (fault := requests[event.request].fault) is not None:
                    raise fault
                yield event
    finally:
        for request in requests:
            if request.result.finish is None:
                request.close()
