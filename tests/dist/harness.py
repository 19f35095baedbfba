"""Run a function in several processes on gloo, as torchrun would, and get what each rank returned.

    def worker(ctx: Context, number: int) -> int:      # module level; arguments and result are pickled
        return ctx.rank + number

    assert run_ranks(worker, 2, 10) == [10, 11]        # AssertionError with the traceback of a rank that failed
    outcomes = launch(worker, 2, 10)                   # the same, but failures are returned as Outcomes

A rank gets torchrun's environment and `init(timeout_s)`, so its waits for others end before `limit_s`, after which all
are killed and the stack of each is in the error. The processes fork from a server that has imported torch and
transformers once: a launch costs a fraction of a second, the first a few seconds. One thread each.
"""

import faulthandler
import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

PRELOAD = ["torch", "torch.distributed.fsdp", "transformers.models.qwen2.modeling_qwen2", "hiexp.fsdp"]


@dataclass
class Outcome:
    result: Any = None
    error: str = ""
    code: int | None = None


def run_ranks(
    worker: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 20, limit_s: float = 60
) -> Any:
    outcomes = launch(worker, world_size, *args, timeout_s=timeout_s, limit_s=limit_s)
    errors = [f"rank {rank}: {outcome.error}" for rank, outcome in enumerate(outcomes) if outcome.error]
    # A rank that lost its peer fails too; the one whose error is not about a connection comes first.
    errors.sort(key=lambda error: "gloo" in error.lower() or "connection" in error.lower())
    assert not errors, "\n".join(errors)
    return [outcome.result for outcome in outcomes]


def launch(
    worker: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 20, limit_s: float = 60
) -> list[Outcome]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port, outcomes, open_ = _free_port(), [Outcome() for _ in range(world_size)], {}
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
            stack = f"{folder}/{rank}"
            inputs = (worker, args, environment, timeout_s, limit_s, stack, sender)
            process = context.Process(target=_child, args=inputs, daemon=True)
            process.start()
            sender.close()
            open_[receiver] = (rank, process)
        deadline = time.monotonic() + limit_s + 2
        while open_ and (ready := wait(list(open_), max(0.0, deadline - time.monotonic()))):
            for receiver in ready:
                rank, process = open_.pop(receiver)
                _finish(outcomes[rank], receiver, process, max(1.0, deadline - time.monotonic()))
        for rank, process in open_.values():
            process.kill()
            process.join()
            outcomes[rank] = Outcome(None, f"not done after {limit_s} s\n{Path(folder, str(rank)).read_text()}", None)
    return outcomes


def _finish(outcome: Outcome, receiver: Any, process: Any, limit_s: float) -> None:
    try:
        outcome.result, outcome.error = pickle.loads(receiver.recv_bytes())
    except EOFError:
        outcome.error = "ended without a word"
    process.join(limit_s)
    if process.is_alive():
        process.kill()
        outcome.error = outcome.error or "returned, but its process did not end"
    outcome.code = process.exitcode
    if outcome.code and not outcome.error:
        outcome.error = f"exit code {outcome.code}"


def _child(
    worker: Any, args: Any, environment: dict[str, Any], timeout_s: float, limit_s: float, stack: str, sender: Any
) -> None:
    import torch

    from hiexp.distributed import close, init

    torch.set_num_threads(1)
    os.environ |= {name: str(value) for name, value in environment.items()} | {"MASTER_ADDR": "127.0.0.1"}
    with Path(stack).open("w") as file:
        faulthandler.dump_traceback_later(limit_s, file=file)
        try:
            ctx = init(timeout_s)
            result = worker(ctx, *args)
            close(ctx)
        except BaseException:
            sender.send_bytes(pickle.dumps((None, traceback.format_exc())))
            raise SystemExit(1) from None
        # By value: a tensor sent as multiprocessing does it would be gone with this process.
        sender.send_bytes(pickle.dumps((result, "")))
        faulthandler.cancel_dump_traceback_later()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
