"""uvicorn, stopped and kept free of dead connections as a search server must be.

A stop (SIGTERM, Ctrl-C) answers what was taken: requests that have reached this process are read first, then nothing
new is accepted, idle connections close, the others when their answer is sent. What is not answered in the time that
uvicorn's settings allow is cancelled. The process then ends by itself, with 0. A second Ctrl-C does not wait.
"""

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import uvicorn  # pyright: ignore[reportMissingImports]

TURNS = 10
"""of the event loop without a new connection, after which all that lay in the system's buffers is read and begun"""
LONGEST_TURNS = 1.0
"""seconds after which they end although more connections come"""
LAST_WORDS = 2.0
"""seconds for the refusals of cancelled requests"""


class Server(uvicorn.Server):
    """Says when it listens, answers what it took, and closes connections that send no whole request."""

    def __init__(self, settings: uvicorn.Config, idle_seconds: float, ready: Callable[[], None]) -> None:
        """`ready` is called when a stop is handled and requests are answered."""
        super().__init__(settings)
        self._idle_seconds, self._ready = idle_seconds, ready
        self._idle: WeakKeyDictionary[Any, tuple[Any, float]] = WeakKeyDictionary()  # connection -> last cycle, since

    def run_until_stopped(self, listener: socket.socket) -> None:
        """Serve; what uvicorn does with a signal when all is done, which is to raise it again, ends nothing here."""
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._told_to_stop) for number in signals}
        try:
            self.run(sockets=[listener])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _told_to_stop(self, *_: Any) -> None:
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def on_tick(self, counter: int) -> bool:
        if counter % 5 == 0:
            self._close_idle()
        return await super().on_tick(counter)

    def _close_idle(self) -> None:
        """uvicorn has a timer between requests alone, and the first byte of the next one stops it."""
        now = time.monotonic()
        for connection in list(self.server_state.connections):
            cycle = getattr(connection, "cycle", None)
            if cycle is not None and not cycle.response_complete:
                self._idle.pop(connection, None)
                continue
            known, since = self._idle.setdefault(connection, (cycle, now))
            if known is not cycle:
                self._idle[connection] = (cycle, now)
            elif now - since > self._idle_seconds:
                connection.transport.abort()  # close() would wait for a client that does not read

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._read_what_came()
        for server in self.servers:
            server.close()
        await self._read_what_came()
        await super().shutdown(sockets)
        tasks = set(self.server_state.tasks)
        if tasks and not self.force_exit:
            await asyncio.wait(tasks, timeout=LAST_WORDS)

    async def _read_what_came(self) -> None:
        """A loop may accept one connection a turn, and reads from it some turns later."""
        end, known, quiet = time.monotonic() + LONGEST_TURNS, -1, 0
        while quiet < TURNS and time.monotonic() < end:
            await asyncio.sleep(0)
            now = len(self.server_state.connections)
            known, quiet = now, quiet + 1 if now == known else 0
