"""The server under uvicorn, told to stop while it searches, and left alone by clients that say nothing.

The backend is held by a file: nothing here depends on how long anything takes. Must fail when: what was taken before a
stop is not answered, or is for longer than is allowed; idle connections or a search without end keep the server; the
process ends with an error; a connection without a request, or with a part of one, stays.
"""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MISSING = [name for name in ("fastapi", "uvicorn", "prometheus_client") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (requirements-search.txt)"),
]
SERVER = """
import json, sys, time
from pathlib import Path
from hiexp.search_server import ServeConfig, listen, run
from hiexp.search_types import ScoredDocument, ScoredSearch
from hiexp.trajectory import Document

class Held(ScoredSearch):
    def search_scored(self, queries, top_k):
        while "held" in queries[0] and not Path(sys.argv[1]).exists():
            time.sleep(0.01)
        return [[ScoredDocument(query, 1.0, Document("", query * 10))] for query in queries]

cfg = ServeConfig(port=0, **json.loads(sys.argv[2]))
with listen(cfg) as listener:
    run(cfg, Held(), listener)
print("ended", flush=True)
"""
PATIENCE = 60
"""seconds after which something that must happen has not"""


@contextmanager
def held_server(gate, **settings):
    command = [sys.executable, "-c", SERVER, str(gate), json.dumps(settings)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("serving"), line + process.stderr.read()
            yield process, int(line.rsplit(":", 1)[1])
        finally:
            process.kill()


def request(query):
    body = json.dumps({"queries": [query]}).encode()
    return b"POST /queries HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def answer(connection):
    """(status, JSON) of a response."""
    with connection.makefile("rb") as file:
        status = int(file.readline().split()[1])
        length = 0
        while (line := file.readline().strip().lower()) != b"":
            if line.startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        return status, json.loads(file.read(length))


def metric(port, name):
    with connect(port) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        with connection.makefile("rb") as file:
            lines = file.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"hiexp_search_{name} "))


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.02)


def refuses(port):
    try:
        connect(port).close()
    except ConnectionRefusedError:
        return True
    return False


def is_closed_by_the_server(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_stop_answers_what_was_taken(tmp_path):
    with held_server(tmp_path / "gate") as (process, port):
        searching, waiting, half, idle, kept = (connect(port) for _ in range(5))
        kept.sendall(request("free"))
        assert answer(kept)[0] == 200
        searching.sendall(request("held"))
        until(lambda: metric(port, "batches") == 2)
        waiting.sendall(request("next"))
        whole = request("half")
        half.sendall(whole[:-4])
        until(lambda: metric(port, "waiting") == 1)
        process.send_signal(signal.SIGTERM)
        until(lambda: refuses(port))
        assert is_closed_by_the_server(idle) and is_closed_by_the_server(kept)
        assert process.poll() is None, "it still searches"
        half.sendall(whole[-4:])
        (tmp_path / "gate").touch()
        for connection, query in ((searching, "held"), (waiting, "next"), (half, "half")):
            status, said = answer(connection)
            assert (status, said["queries"]) == (200, [query]) and query * 10 in said["answers"][0][0]
            assert is_closed_by_the_server(connection)
        assert process.wait(PATIENCE) == 0
        assert process.stdout.read() == "ended\n" and process.stderr.read() == ""


def test_what_was_sent_before_a_stop_was_taken(tmp_path):
    """Whether or not the server has begun to read it: it is stopped as long as that takes."""
    (tmp_path / "gate").touch()
    with held_server(tmp_path / "gate") as (process, port), ThreadPoolExecutor(40) as pool:
        connections = [connect(port) for _ in range(40)]
        os.kill(process.pid, signal.SIGSTOP)
        for number, connection in enumerate(connections):
            connection.sendall(request(f"q{number}"))
        late = [connect(port) for _ in range(10)]  # the system accepts them
        for connection in late:
            connection.sendall(request("late"))
        time.sleep(0.3)  # its timers are due as well, when it goes on
        os.kill(process.pid, signal.SIGTERM)
        os.kill(process.pid, signal.SIGCONT)
        for number, (status, said) in enumerate(pool.map(answer, connections)):
            assert (status, said["queries"]) == (200, [f"q{number}"])
        assert [answer(connection)[0] for connection in late] == [200] * 10
        assert process.wait(PATIENCE) == 0


def test_a_search_without_end_does_not_keep_the_server(tmp_path):
    with held_server(tmp_path / "never", grace_seconds=1) as (process, port):
        searching, waiting, half = (connect(port) for _ in range(3))
        searching.sendall(request("held"))
        until(lambda: metric(port, "batches") == 1)
        waiting.sendall(request("next"))
        half.sendall(request("half")[:-4])
        until(lambda: metric(port, "waiting") == 1)
        process.send_signal(signal.SIGTERM)
        for connection in (searching, waiting, half):
            status, said = answer(connection)
            assert status == 503 and "the server was stopped" in said["error"]
        assert process.wait(PATIENCE) == 0
        told = process.stderr.read().strip().splitlines()
        assert len(told) == 1 and "timeout graceful shutdown exceeded" in told[0]


def test_connections_that_say_nothing_are_closed(tmp_path):
    with held_server(tmp_path / "gate", idle_seconds=2) as (_, port):
        kept, again = connect(port), connect(port)
        for connection in (kept, again):
            connection.sendall(request("free"))
            assert answer(connection)[0] == 200
        silent, part, busy = (connect(port) for _ in range(3))
        part.sendall(request("a")[:20])
        again.sendall(request("a")[:20])
        busy.sendall(request("held"))
        for connection in (silent, part, kept, again):
            assert is_closed_by_the_server(connection)
        (tmp_path / "gate").touch()
        status, said = answer(busy)
        assert (status, said["queries"]) == (200, ["held"]), "one that is searched is waited for"
