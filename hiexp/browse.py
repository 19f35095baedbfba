"""Read the rollouts of a run: trajectories in a terminal, page by page, or as one HTML page.

    python -m hiexp.tracking show runs/hiexp                       # every kept step
    python -m hiexp.tracking show runs/hiexp --step 30 | grep ...  # plain text in a pipe
    python -m hiexp.tracking show runs/hiexp --html rollouts.html

What a model or a document wrote is shown, never obeyed: control characters are spelled out and markup is escaped.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hiexp.config import ConfigError, read_yaml
from hiexp.data import read_samples
from hiexp.model import load_tokenizer
from hiexp.report import write_page
from hiexp.report_views import attempt_view, experience_shown, experience_tree, labelled, legend_of_sources
from hiexp.tracking import iter_trajectories
from hiexp.trajectory import Source, Trajectory

Kept = tuple[int, Trajectory]
"""step and trajectory"""

MAX_ON_PAGE = 400
"""trajectories of the newest steps that an HTML page holds; a browser is slow with more"""
COLOURS = {
    Source.PROMPT: "2",
    Source.EXPERIENCE: "33",
    Source.POLICY: "36",
    Source.DOCUMENT: "32",
    Source.NOTICE: "35",
}
"""terminal colours by author: faint, yellow, cyan, green, magenta"""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m hiexp.tracking", description="Look at what a run left behind.")
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="page through trajectories")
    show.add_argument("run", metavar="RUN", help="folder of a run, or a file of trajectories")
    show.add_argument("--step", type=int, help="only this training step")
    show.add_argument("--html", metavar="FILE", help="write a page instead (no network, no scripts)")
    show.add_argument("--plain", action="store_true", help="neither colours nor a pager")
    show.add_argument("--tokenizer", metavar="FOLDER", help="default: the model of the run's config.yaml")
    arguments = parser.parse_args(argv)
    try:
        _show(arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def text_view(step: int, trajectory: Trajectory, tokenizer: Any, question: str = "", colours: bool = False) -> str:
    """One trajectory as text: how it ended, what each turn did and was shown, then every segment with its author."""
    tokens = f"{trajectory.num_response_tokens} of {trajectory.num_tokens} tokens by the policy"
    ended = f"{trajectory.status.value.replace('_', ' ')}, reward {trajectory.reward:.3f}"
    name = f"step {step}  {trajectory.sample_id}  attempt {trajectory.member}"
    title = f"{name}  {ended}  {trajectory.num_searches} searches  {tokens}"
    tone = "1;32" if trajectory.reward >= 1 else "1;31"
    lines = [_paint(printable(title), tone, colours)]
    facts = {"question": question, "answer": trajectory.answer, "experience": ", ".join(experience_shown(trajectory))}
    lines += [f"  {name}: {printable(text)}" for name, text in facts.items() if text]
    for number, turn in enumerate(trajectory.turns, 1):
        found = "; ".join(document.title for document in turn.documents)
        cases = ", ".join(turn.cases)
        parts = (f"found: {found}" if found else "", f"cases: {cases}" if cases else "", turn.notice)
        line = "  ".join([f"  turn {number}: {turn.action} {turn.argument!r}", *filter(None, parts)])
        lines.append(printable(line))
    for label, segment in labelled(trajectory):
        text = printable(tokenizer.decode(list(segment.token_ids)))
        lines.append(_paint(f"[{label}] {text}", COLOURS[segment.source], colours))
    return "\n".join(lines) + "\n"


def printable(text: str) -> str:
    """Control and formatting characters, with which a text could steer a terminal, are spelled out."""
    spelled = (c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    return "".join(spelled)


def html_view(kept: Iterable[Kept], tokenizer: Any, questions: Mapping[str, str], hek: str | None) -> list[str]:
    """Parts of a page: links that filter by status and by reward (CSS `:target`), the trajectories, the HEK."""
    shown: deque[Kept] = deque(maxlen=MAX_ON_PAGE)
    total = 0
    for one in kept:
        shown.append(one)
        total += 1
    counts = Counter(name for _, one in shown for name in _classes(one))
    links = [f'<a href="#show-all">all ({len(shown)})</a>']
    links += [f'<a href="#show-{name}">{name.replace("_", " ")} ({count})</a>' for name, count in counts.items()]
    parts = ["".join(f'<span id="show-{name}"></span>' for name in ("all", *counts)), f"<nav>{''.join(links)}</nav>"]
    if len(shown) < total:
        parts.append(f'<p class="soft">The newest {len(shown)} of {total} trajectories; --step shows others.</p>')
    parts += [legend_of_sources(), '<div class="list">']
    for step, one in shown:
        head = f"step {step}: {one.sample_id}, attempt {one.member}"
        question = f"<br>{escape(questions[one.sample_id])}" if one.sample_id in questions else ""
        tone = "good" if one.reward >= 1 else "bad"
        facts = f"{one.status.value.replace('_', ' ')}, reward {one.reward:.2f}, {one.num_searches} searches"
        summary = f'<b>{escape(head)}</b> <span class="{tone}">{facts}</span>{question}'
        view = attempt_view(head, one, tokenizer)
        parts.append(f'<details class="{" ".join(_classes(one))}"><summary>{summary}</summary>{view}</details>')
    return [*parts, "</div>", f"<h2>Experience</h2>{experience_tree(hek)}" if hek else ""]


def _show(arguments: argparse.Namespace) -> None:
    files, folder = _files(Path(arguments.run))
    config = read_yaml(folder / "config.yaml") if (folder / "config.yaml").is_file() else {}
    tokenizer = _tokenizer(arguments.tokenizer, folder, config)
    questions = _questions(config)
    kept = _chosen(files, arguments.step)
    if arguments.html:
        hek = str((config.get("hek") or {}).get("path") or "")
        page = html_view(kept, tokenizer, questions, hek if Path(hek).is_dir() and hek else None)
        write_page(arguments.html, f"Trajectories of {folder.name}", page, FILTERS)
        print(f"wrote {arguments.html}")
        return
    is_terminal = sys.stdout.isatty() and not arguments.plain
    colours = is_terminal and "NO_COLOR" not in os.environ
    texts = (text_view(step, one, tokenizer, questions.get(one.sample_id, ""), colours) + "\n" for step, one in kept)
    _page(texts) if is_terminal and shutil.which("less") else sys.stdout.writelines(texts)
    sys.stdout.flush()


def _files(run: Path) -> tuple[list[Path], Path]:
    """(files of trajectories, run folder)."""
    if run.is_file():
        return [run], run.parent
    files = sorted(run.glob("trajectories*.jsonl"))
    if not files:
        raise ConfigError(f"{run} holds no trajectories; train.py writes them with train.show_every above 0")
    return files, run


def _chosen(files: Sequence[Path], step: int | None) -> Iterator[Kept]:
    """Read one at a time; ConfigError at the end if there was none of `step`."""
    seen: set[int] = set()
    for kept in (kept for file in files for kept in iter_trajectories(file)):
        seen.add(kept[0])
        if step is None or kept[0] == step:
            yield kept
    if step is not None and step not in seen:
        steps = ", ".join(map(str, sorted(seen)[-20:])) or "none"
        raise ConfigError(f"--step {step} was not kept; the last that were: {steps} (train.show_every)")


def _tokenizer(wanted: str | None, folder: Path, config: Mapping[str, Any]) -> Any:
    path = wanted or (config.get("model") or {}).get("path") or ""
    if not wanted and not Path(path).is_dir() and (folder / "policy").is_dir():
        path = str(folder / "policy")
    try:
        return load_tokenizer(path)
    except ConfigError as error:
        raise ConfigError(f"{error}; name the folder of its tokenizer with --tokenizer") from error


def _questions(config: Mapping[str, Any]) -> dict[str, str]:
    """id -> question, from those files of the run's settings that are still there."""
    paths = [(config.get("data") or {}).get(split) for split in ("train", "dev", "test")]
    return {
        sample.id: sample.question for path in paths if path and Path(path).is_file() for sample in read_samples(path)
    }


def _classes(trajectory: Trajectory) -> tuple[str, str]:
    reward = trajectory.reward
    return trajectory.status.value, "right" if reward >= 1 else "partly_right" if reward > 0 else "without_reward"


def _page(texts: Iterable[str]) -> None:
    with subprocess.Popen(["less", "-R"], stdin=subprocess.PIPE, text=True) as pager:
        assert pager.stdin is not None
        try:
            pager.stdin.writelines(texts)
            pager.stdin.close()
        except BrokenPipeError:
            pass  # closed before the end


def _paint(text: str, colour: str, colours: bool) -> str:
    """Line by line, as a pager forgets the colour at the end of each."""
    return "\n".join(f"\033[{colour}m{line}\033[0m" for line in text.split("\n")) if colours else text


_NAMES = ("answered", "out_of_turns", "truncated", "broken", "running", "right", "partly_right", "without_reward")
FILTERS = "".join(f"#show-{name}:target~.list>details:not(.{name})" + "{display:none}\n" for name in _NAMES)
"""One rule per link: its anchor stands before the list, and is the target when the link was followed."""
