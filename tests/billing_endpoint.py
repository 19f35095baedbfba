"""A chat endpoint on the loopback that misbehaves as told and keeps a ledger of what it charged for.

It charges for a reply that it wrote out whole, and for nothing else: what a real one charges for a reply that the
client no longer waits for, nobody can know.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CHARGED = ("", "stream", "filter", "length", "silent")
FREE = ("429", "500", "slow", "cut", "cut_stream", "html", "empty", "null", "drop", "azure")


class Ledger:
    """`fault(body, n)` for the n-th request of a body names a kind of reply; `say(body)` is the text of a good one."""

    def __init__(self, say: Callable[[dict[str, Any]], str], fault: Callable[[dict[str, Any], int], str]) -> None:
        self.say, self.fault, self.lock, self.url = say, fault, threading.Lock(), ""
        self.bodies: list[dict[str, Any]] = []
        self.charged: list[str] = []
        """bodies, as sorted JSON, of the replies that were charged for"""
        self.tokens = 0
        self.most: int | None = None
        """after so many charged replies requests are held until `over`, and then dropped"""
        self.over = threading.Event()

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        key = json.dumps(body, sort_keys=True)
        with self.lock:
            self.bodies.append(body)
            number = sum(one == body for one in self.bodies)
        kind, text = self.fault(body, number), self.say(body)
        if kind in ("drop", "slow"):
            threading.Event().wait(3 if kind == "slow" else 0)
            return
        read, written = sum(len(one["content"].split()) for one in body["messages"]), len(text.split())
        status, headers, data = self._reply(kind, text, {"prompt_tokens": read, "completion_tokens": written})
        if kind in CHARGED:
            with self.lock:
                is_held = self.most is not None and len(self.charged) >= self.most
                if not is_held:
                    self.charged.append(key)
                    self.tokens += read + written
            if is_held:
                self.over.wait(60)
                return
        handler.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)

    def _reply(self, kind: str, text: str, usage: dict[str, int]) -> tuple[int, dict[str, str], bytes]:
        if kind in ("429", "500"):
            return int(kind), {"Retry-After": "0.05"} if kind == "429" else {}, b"busy"
        if kind == "azure":
            return 400, {}, b'{"error": {"code": "content_filter", "message": "The prompt was filtered"}}'
        if kind == "html":
            return 200, {}, b"<html>maintenance</html>"
        if kind == "empty":
            return 200, {}, json.dumps({"choices": [], "usage": usage}).encode()
        if kind == "null":
            return 200, {}, b'{"choices": [{"message": {"content": null}}]}'
        if kind in ("stream", "cut_stream"):
            half = len(text) // 2
            parts: list[Any] = [{"choices": [{"delta": {"role": "assistant"}}]}]
            parts += [{"choices": [{"delta": {"content": part}}]} for part in (text[:half], text[half:])]
            parts += [{"choices": [{"delta": {}, "finish_reason": "stop"}]}, {"choices": [], "usage": usage}]
            parts = parts[:2] if kind == "cut_stream" else parts
            events = [f"data: {json.dumps(part)}\n\n" for part in parts] + ["data: [DONE]\n\n"] * (kind == "stream")
            return 200, {"Content-Type": "text/event-stream"}, b": hello\n\n" + "".join(events).encode()
        finish = {"filter": "content_filter", "length": "length"}.get(kind, "stop")
        content = None if kind == "silent" else text
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish}
        data = json.dumps({"choices": [choice], "usage": usage}).encode()
        if kind == "cut":
            return 200, {"Content-Length": str(len(data)), "Connection": "close"}, data[: len(data) // 2]
        return 200, {}, data


@contextmanager
def billing(say: Callable[[dict[str, Any]], str], fault: Callable[[dict[str, Any], int], str]) -> Iterator[Ledger]:
    ledger = Ledger(say, fault)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.close_connection = True
            with suppress(BrokenPipeError, ConnectionResetError):
                ledger.handle(self)

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    ledger.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield ledger
    finally:
        ledger.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
