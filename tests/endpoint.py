"""A chat endpoint on the loopback that answers as told and remembers what it was asked."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Endpoint:
    """`reply(prompt, seed, n)` for the n-th request of this (prompt, seed) gives a text, or (status, headers, body)."""

    def __init__(self, reply: Callable[[str, int, int], Any]) -> None:
        self.reply, self.lock = reply, threading.Lock()
        self.asked: list[tuple[str, int]] = []
        self.answered: list[tuple[str, int]] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.now = self.widest = 0
        self.url = ""

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        key = (body["messages"][0]["content"], body["seed"])
        with self.lock:
            self.now += 1
            self.widest = max(self.widest, self.now)
            self.asked.append(key)
            self.bodies.append(body | {"path": handler.path})
            self.headers.append(dict(handler.headers))
            self.times.append(time.monotonic())
            number = self.asked.count(key)
        try:
            said = self.reply(*key, number)
        finally:
            with self.lock:
                self.now -= 1
        if isinstance(said, str):
            with self.lock:
                self.answered.append(key)
            usage = {"prompt_tokens": len(key[0].split()), "completion_tokens": len(said.split())}
            said = (200, {}, json.dumps({"choices": [{"message": {"content": said}}], "usage": usage}))
        status, headers, text = said
        data = text if isinstance(text, bytes) else text.encode()
        handler.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)


@contextmanager
def serve(reply: Callable[[str, int, int], Any]) -> Iterator[Endpoint]:
    endpoint = Endpoint(reply)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                endpoint.handle(self)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        do_GET = do_POST

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    endpoint.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
