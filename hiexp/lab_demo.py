"""The demo: runs the stages of the lab as separate processes, two at a time, and puts their results on one page.

Every stage is a command that a user could type; it is printed before it runs and its output is kept in logs/. Nothing
is computed here that the scripts do not compute: this file starts them, waits, and collects.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hiexp.config import ConfigError
from hiexp.data import read_samples
from hiexp.hek_prompts import PROMPTS
from hiexp.model import load_tokenizer
from hiexp.report import write_report
from hiexp.tracking import Timer, finish_run, open_run_folder, read_metrics, read_trajectories

ROOT = Path(__file__).resolve().parents[1]
ARMS = {"base": ("base", "hek_off"), "base_hek": ("base", "hek_on"), "grpo": ("grpo", ""), "grpo_hiexp": ("hiexp", "")}


class Stages:
    """Runs commands as processes, at most two at once, and shows one line of what they are doing."""

    def __init__(self, out: Path, config: str, overrides: Sequence[str]) -> None:
        self.out, self.config, self.overrides = out, config, overrides
        self.running: dict[str, Path] = {}
        self.started = time.perf_counter()

    def script(self, name: str, script: str, settings: Sequence[str]) -> None:
        """Run `script` with the lab's settings; RuntimeError with the end of its log if it fails."""
        command = [sys.executable, script, self.config, f"out={self.out / name}", *settings, *self.overrides]
        log = self.out / "logs" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        print(f"{self.clock()} {name}: {' '.join(command[1:])}", flush=True)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        with log.open("w") as stream:
            self.running[name] = log
            code = subprocess.run(command, cwd=ROOT, stdout=stream, stderr=stream, env=environment, check=False).returncode
        del self.running[name]
        if code:
            raise RuntimeError(f"{name} failed (exit code {code}), the end of {log}:\n{log.read_text()[-2000:]}")
        print(f"{self.clock()} {name}: done", flush=True)

    def clock(self) -> str:
        return f"[{time.perf_counter() - self.started:5.0f} s]"

    def status(self) -> str:
        """The newest line of each running stage's log."""
        lines = []
        for name, log in list(self.running.items()):
            text = log.read_text(errors="replace").replace("\r", "\n").strip().splitlines() if log.exists() else []
            lines.append(text[-1][:90] if text else name)
        return f"{self.clock()} " + " | ".join(lines)
