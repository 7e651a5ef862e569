"""Serves one page to this machine, made anew whenever what it shows has changed. Nothing else is served."""

import hashlib
import sys
import time
from collections.abc import Callable, Hashable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock

from depthgate.errors import DepthgateError
from depthgate.view.page import page, paragraph
from depthgate.view.tokens import visible

HOST = "127.0.0.1"


class Page:
    """The page as bytes with a tag of its content; made again when `state` says something new, but for a tenth of the
    time at most: the run that is watched may need the machine. Where that fails, `wrong` says why, and the page too:
    a run may be in the middle of anything, and is looked at again."""

    def __init__(self, state: Callable[[], Hashable], made: Callable[[], str]) -> None:
        self.state, self.made, self.lock = state, made, Lock()
        self.seen: Hashable = None
        self.body, self.tag, self.wrong, self.rest = b"", "", "", 0.0

    def now(self) -> tuple[bytes, str, str]:
        with self.lock:
            state = self.state()
            start = time.monotonic()
            if not self.tag or ((self.wrong or state != self.seen) and start >= self.rest):
                self.body = self._made().encode(errors="replace")
                self.seen, self.tag = state, f'"{hashlib.sha256(self.body).hexdigest()[:32]}"'
                end = time.monotonic()
                self.rest = end + 9 * (end - start)
            return self.body, self.tag, self.wrong

    def _made(self) -> str:
        before = self.wrong
        try:
            made = self.made()
            self.wrong = ""
            return made
        except Exception as error:  # whatever it is, the next look may find it mended
            why = str(error) if isinstance(error, DepthgateError) else f"{type(error).__name__}: {error}"
            self.wrong = f"cannot be read at the moment: {visible(why, kept=' ')}"
        if self.wrong != before:
            print(self.wrong, file=sys.stderr, flush=True)
        return page("depthgate view", {"": paragraph(self.wrong)}, live=True)


def server(shown: Page, port: int) -> ThreadingHTTPServer:
    """Listening already, on this machine alone; port 0 takes any that is free."""

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "depthgate", ""

        def do_GET(self) -> None:
            # Another page in the same browser can reach this port under a name of its own, and is not answered.
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            if host not in (HOST, "localhost"):
                return self.send_error(HTTPStatus.FORBIDDEN)
            if self.path != "/":
                return self.send_error(HTTPStatus.NOT_FOUND)
            body, tag, wrong = shown.now()
            same = not wrong and self.headers.get("If-None-Match") == tag
            self.send_response(
                HTTPStatus.SERVICE_UNAVAILABLE if wrong else HTTPStatus.NOT_MODIFIED if same else HTTPStatus.OK
            )
            self.send_header("ETag", tag)
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            if not same:
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if not same:
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Nobody wants a line for every look."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True  # a browser that holds a connection open does not hold the command

        def handle_error(self, *args: object) -> None:
            """A browser that goes away in the middle of an answer is no event."""

    try:
        return Server((HOST, port), Handler)
    except OSError as error:
        raise DepthgateError(
            f"port {port} cannot be used ({error.strerror}): --port 0 takes any that is free"
        ) from None


def serve(shown: Page, port: int) -> None:
    """Until Ctrl-C."""
    with server(shown, port) as listening:
        print(f"http://{HOST}:{listening.server_address[1]}/  (Ctrl-C ends it)", flush=True)
        try:
            listening.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("ended")
