"""What a training run says about itself while it lasts: metrics.jsonl, TensorBoard, a line per step, optionally wandb.

metrics.jsonl is the record; everything else is a view that may fail without stopping the run. Only the process that
was given `enabled=True` (rank 0) writes; the others' logs are silent.
"""

import importlib
import importlib.util
import json
import math
import secrets
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from tqdm import tqdm

from hiexp.config import ConfigError, read_yaml
from hiexp.redact import redact
from hiexp.tracking import append_trajectories, cut_after
from hiexp.trajectory import Trajectory

LINE_SECONDS = 5.0
"""Steps that follow each other faster share a printed line."""
STEP_LINE = {
    "reward": ("reward/mean", ".3f"),
    "searches": ("rollout/searches", ".2f"),
    "tokens": ("rollout/tokens", ".0f"),
    "loss": ("loss/total", ".4f"),
    "grad norm": ("optim/grad_norm", ".3g"),
}
"""word on the printed line -> logged metric and its format"""


@dataclass(frozen=True)
class LogConfig:
    wandb: str = ""
    """Weights & Biases project that gets the numbers too (WANDB_MODE=offline: into the run folder); "" = none"""

    def check(self) -> None:
        """ConfigError if a package is missing; call it before any expensive work."""
        if self.wandb and importlib.util.find_spec("wandb") is None:
            raise ConfigError(f"log.wandb={self.wandb}: wandb is not installed; pip install wandb, or set log.wandb=")


class RunLog:
    """The log of one run, a line of metrics.jsonl per step, on disk as soon as `log` returns.

    Starts anew, or goes on after `resume_step` (the last step that counts): what an interrupted run wrote about later
    steps is cut off. Values that are not finite are null in the file, since JSON has no word for them.
    """

    def __init__(
        self,
        folder: str | Path,
        resume_step: int | None = None,
        enabled: bool = True,
        cfg: LogConfig = LogConfig(),
    ) -> None:
        self.folder, self.enabled = Path(folder), enabled
        self._views: dict[str, Any] = {}
        if not enabled:
            return
        cfg.check()
        self.folder.mkdir(parents=True, exist_ok=True)
        last = -1 if resume_step is None else resume_step
        for name in ("metrics.jsonl", "trajectories.jsonl"):
            cut_after(self.folder / name, last)
        self._file = (self.folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._line, self._said, self._before = "", -math.inf, time.perf_counter()
        self._open(_TENSORBOARD, lambda: _open_tensorboard(self.folder, last + 1))
        if cfg.wandb:
            self._open(_WANDB, lambda: _open_wandb(self.folder, cfg.wandb))

    def log(
        self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        """Numbers of a finished step, and distributions for TensorBoard (`rollout_histograms`)."""
        if not self.enabled:
            return
        values = {key: float(value) for key, value in metrics.items()}
        line = {key: value if math.isfinite(value) else None for key, value in values.items()}
        with _on_disk(self.folder):
            self._file.write(json.dumps({"step": step, **line}) + "\n")
            self._file.flush()
        self._say(step, values)
        self._use(_TENSORBOARD, lambda writer: _write_numbers(writer, step, values, histograms or {}))
        self._use(_WANDB, lambda run: run.log({k: v for k, v in line.items() if v is not None}, step=step))

    def show(self, step: int, trajectories: Sequence[Trajectory], tokenizer: Any) -> None:
        """Add the step's trajectories to trajectories.jsonl, and its best and its worst to TensorBoard as text."""
        if not self.enabled:
            return
        with _on_disk(self.folder):
            append_trajectories(self.folder / "trajectories.jsonl", trajectories, step)
        self._use(_TENSORBOARD, lambda writer: _write_samples(writer, step, trajectories, tokenizer))

    def close(self) -> None:
        if not self.enabled:
            return
        self._print()
        self._file.close()
        self._use(_TENSORBOARD, lambda writer: writer.close())
        self._use(_WANDB, lambda run: run.finish())

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _say(self, step: int, values: Mapping[str, float]) -> None:
        now = time.perf_counter()
        words = [f"{word} {values[key]:{form}}" for word, (key, form) in STEP_LINE.items() if key in values]
        self._line = "  ".join([f"step {step}", *words, f"{now - self._before:.1f} s"])
        self._before = now
        if now - self._said >= LINE_SECONDS:
            self._print()

    def _print(self) -> None:
        if self._line:
            tqdm.write(self._line, file=sys.stdout)  # above a progress bar, if one is on the terminal
            sys.stdout.flush()
            self._line, self._said = "", time.perf_counter()

    def _open(self, view: str, call: Callable[[], Any]) -> None:
        try:
            self._views[view] = call()
        except Exception as error:
            self._lose(view, error)

    def _use(self, view: str, call: Callable[[Any], Any]) -> None:
        if view in self._views:
            try:
                call(self._views[view])
            except Exception as error:
                self._lose(view, error)

    def _lose(self, view: str, error: Exception) -> None:
        """A view that fails is told of once and then left alone."""
        self._views.pop(view, None)
        warnings.warn(redact(f"no {view} logs from here on ({error}); metrics.jsonl goes on"), stacklevel=4)


@contextmanager
def _on_disk(folder: Path) -> Iterator[None]:
    """The record itself cannot be written: ConfigError. What was logged before is on the disk."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(
            f"cannot write to out={folder} ({reason}); free some space and give the same command again to go on"
        ) from error


def rollout_histograms(trajectories: Sequence[Trajectory], advantages: Sequence[float]) -> dict[str, list[float]]:
    """Distributions over the step's trajectories; `advantages` has one value for each."""
    return {
        "distribution/reward": [one.reward for one in trajectories],
        "distribution/advantage": list(advantages),
        "distribution/response_tokens": [float(one.num_response_tokens) for one in trajectories],
        "distribution/searches": [float(one.num_searches) for one in trajectories],
    }


def _open_tensorboard(folder: Path, first_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # slow to import

    # steps of an interrupted run in the same folder are hidden, not drawn twice
    return SummaryWriter(str(folder / "tb"), purge_step=first_step, flush_secs=10)


def _write_numbers(
    writer: Any, step: int, values: Mapping[str, float], histograms: Mapping[str, Sequence[float]]
) -> None:
    for key, value in values.items():
        writer.add_scalar(key, value, step)
    for key, members in histograms.items():
        if finite := [member for member in members if math.isfinite(member)]:
            writer.add_histogram(key, numpy.asarray(finite), step)


def _write_samples(writer: Any, step: int, trajectories: Sequence[Trajectory], tokenizer: Any) -> None:
    for name, choose in (("best", max), ("worst", min)) if trajectories else ():
        chosen = choose(trajectories, key=lambda one: one.reward)
        head = f"{chosen.sample_id}, {chosen.status.value}, reward {chosen.reward:.3f}"
        text = redact(f"{head}\n{chosen.render(tokenizer)}")
        # four spaces: shown letter by letter, not read as Markdown
        writer.add_text(f"trajectory/{name}", "\n".join(f"    {line}" for line in text.splitlines()), step)


def _open_wandb(folder: Path, project: str) -> Any:
    wandb = importlib.import_module("wandb")  # optional package
    name, config = folder / "wandb_id", folder / "config.yaml"
    if not name.exists():
        name.write_text(secrets.token_hex(8))  # a resumed run goes on under its old id
    # neither the command line nor the console nor the code goes to the service: they may hold what is redacted here
    settings = wandb.Settings(console="off", disable_git=True, save_code=False, x_disable_meta=True)
    return wandb.init(
        project=project,
        id=name.read_text().strip(),
        name=folder.name,
        dir=str(folder),
        config=read_yaml(config) if config.exists() else {},
        resume="allow",
        settings=settings,
    )


_TENSORBOARD, _WANDB = "TensorBoard", "wandb"
