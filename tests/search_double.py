"""A search server on the loopback that answers as told, faults included, and remembers what it was asked."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Fault = str
"""hang (no answer), drip (one byte at a time), close (no answer, connection closed), half (closed inside the answer)"""


class Double:
    """`reply(body, n)` for the n-th request gives a JSON value, (status, headers, text), or the name of a Fault."""

    def __init__(self, reply: Callable[[Any, int], Any]) -> None:
        self.reply, self.lock = reply, threading.Lock()
        self.bodies: list[Any] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.connections = self.now = self.widest = 0
        self.url = ""
        self.health: Any = None
        """what GET /health says; None = 404"""
        self.released = threading.Event()

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            self.bodies.append(body)
            self.paths.append(handler.path)
            self.headers.append(dict(handler.headers))
            self.times.append(time.monotonic())
            number = len(self.bodies)
            self.now += 1
            self.widest = max(self.widest, self.now)
        try:
            said = self.reply(body, number)
        finally:
            with self.lock:
                self.now -= 1
        if isinstance(said, str):
            return self._fail(handler, said)
        status, headers, text = said if isinstance(said, tuple) else (200, {}, json.dumps(said))
        data = text if isinstance(text, bytes) else text.encode()
        handler.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)

    def _fail(self, handler: BaseHTTPRequestHandler, fault: Fault) -> None:
        handler.close_connection = True
        if fault == "hang":
            self.released.wait(30)
        if fault == "drip":
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            while not self.released.wait(0.05):
                handler.wfile.write(b" ")
                handler.wfile.flush()
        if fault == "half":
            handler.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"result"')


@contextmanager
def serving(reply: Callable[[Any, int], Any]) -> Iterator[Double]:
    double = Double(reply)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            with double.lock:
                double.connections += 1
            super().setup()

        def do_GET(self) -> None:
            data = json.dumps(double.health).encode()
            self.send_response(404 if double.health is None or self.path != "/health" else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self) -> None:
            try:
                double.handle(self)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    double.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield double
    finally:
        double.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
