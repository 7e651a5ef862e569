"""An application behind uvicorn: limits on connections, and how it ends."""

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD = 10.0  # seconds in which the head of a request must come, unless requests have less
MOST = min(2048, os.sysconf("SC_OPEN_MAX") // 2)  # connections; those not yet counted have the other half
LAST = 5  # seconds for the last bytes of the last answers


class Line(H11Protocol):
    """A connection, which is cut off where there are too many, or where nothing is answered and no request comes."""

    late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {"cut": transport.abort}
        if len(self.connections) > MOST:
            transport.abort()
        self._wait()

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)  # stops the timer of uvicorn
        except h11.LocalProtocolError:  # a body that goes wrong after its answer
            self.transport.abort()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.late is not None:
            self.late.cancel()

    def _wait(self) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and self.late is not None:
            self.late.cancel()
            self.late = None
        elif not answering and self.late is None:
            app: Any = self.config.app
            self.late = self.loop.call_later(min(HEAD, app.config.timeout), self.transport.abort)


class Server(uvicorn.Server):
    """A server that stops when it has answered all that it took."""

    def __init__(self, app: Any, ready: Callable[[], None]) -> None:
        limits: Any = {"lifespan": "off", "ws": "none", "backlog": max(1, MOST // 8)}
        limits["h11_max_incomplete_event_size"] = 2**16  # bytes of a request's head; httptools has no limit
        self.app, self.ready = app, ready
        limits |= {"http": Line, "log_level": "error", "access_log": False, "server_header": False}
        super().__init__(uvicorn.Config(app, **limits))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()

    def handle_exit(self, *_: Any) -> None:
        self.force_exit = self.should_exit = self.app.stopping
        self.app.stopping = True

    async def on_tick(self, counter: int) -> bool:
        self.should_exit |= self.app.stopping and not self.server_state.tasks
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(0 if self.force_exit else LAST, self._cut)
        await super().shutdown(sockets)
        if self.server_state.tasks:  # their clients are gone
            await asyncio.wait(self.server_state.tasks, timeout=1)

    def _cut(self) -> None:
        for line in self.server_state.connections:
            line.transport.abort()


def listen(app: Any, address: socket.socket, ready: Callable[[], None]) -> int:
    """Serve until a signal comes and all requests that were taken are answered, or a second signal; the exit code."""
    server = Server(app, ready)
    server.run([address])
    return 130 if server.force_exit else 0
