"""The two views of the report that hold text of models: the HEK as a tree, and trajectories coloured by author."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hiexp.data import Sample
from hiexp.experience import LEVELS
from hiexp.trajectory import Segment, Source, Status, Trajectory

MAX_ROOTS, MAX_QUESTIONS, MAX_PER_ARM = 60, 24, 2
"""Trees, questions, and attempts of an arm at a question on the page; what is left out is counted there."""

AUTHORS = {
    Source.PROMPT: "prompt",
    Source.EXPERIENCE: "experience (HEK)",
    Source.POLICY: "policy: the only text that is trained",
    Source.DOCUMENT: "document",
    Source.NOTICE: "notice: the environment",
}


def experience_tree(folder: str | Path | None) -> str:
    """Strategies (E3) over patterns (E2) over cases (E1) over the questions they stem from."""
    entries = _read_entries(Path(folder)) if folder is not None else {}
    if not entries:
        return '<p class="soft">No experience was built or used.</p>'
    counts = [sum(e["level"] == level for e in entries.values()) for level in LEVELS]
    roots = sorted(
        (e for e in entries.values() if e.get("parent_id") not in entries), key=lambda e: (-e["level"], e["id"])
    )
    html = [
        f'<p class="soft">Strategies (E3): {counts[2]}. Patterns (E2): {counts[1]}. Cases (E1): {counts[0]}. A title '
        "says when the lesson applies; retrieval compares titles, the policy is shown title and text.</p>"
    ]
    html += [_entry(entry, entries, is_open=i == 0) for i, entry in enumerate(roots[:MAX_ROOTS])]
    if len(roots) > MAX_ROOTS:
        html.append(f'<p class="soft">{len(roots) - MAX_ROOTS} more trees are in {escape(str(folder))}.</p>')
    return "".join(html)


def legend_of_sources() -> str:
    items = "".join(
        f'<li><i class="box {source.value}"></i><span>{name}</span></li>' for source, name in AUTHORS.items()
    )
    return f'<ul class="legend">{items}</ul>'


def trajectory_view(trajectories: Mapping[str, Sequence[Trajectory]], samples: Iterable[Sample], tokenizer: Any) -> str:
    """One fold per question with the arms side by side; questions that more arms tried come first."""
    by_id = {sample.id: sample for sample in samples}
    asked: dict[str, dict[str, list[Trajectory]]] = {}
    for arm, attempts in trajectories.items():
        for attempt in attempts:
            asked.setdefault(attempt.sample_id, {}).setdefault(arm, []).append(attempt)
    if not asked:
        return '<p class="soft">No trajectories were kept.</p>'
    order = sorted(asked, key=lambda sample_id: -len(asked[sample_id]))
    html = [
        _question(by_id.get(sample_id), sample_id, asked[sample_id], tokenizer, is_open=i == 0)
        for i, sample_id in enumerate(order[:MAX_QUESTIONS])
    ]
    total = sum(len(attempts) for attempts in trajectories.values())
    shown = sum(min(len(a), MAX_PER_ARM) for sample_id in order[:MAX_QUESTIONS] for a in asked[sample_id].values())
    if shown < total:
        html.append(f'<p class="soft">{shown} of {total} trajectories are shown.</p>')
    return "".join(html)


def attempt_view(title: str, trajectory: Trajectory, tokenizer: Any) -> str:
    """One trajectory: how it ended, its segments coloured by author, the experience it was shown."""
    tone = "good" if trajectory.reward >= 1 else "bad"
    ended = (
        escape(trajectory.answer) if trajectory.status is Status.ANSWERED else trajectory.status.value.replace("_", " ")
    )
    facts = f"reward {trajectory.reward:.2f}, {trajectory.num_searches} searches"
    links = ", ".join(f'<a href="#{escape(entry)}">{escape(entry)}</a>' for entry in experience_shown(trajectory))
    segments = "".join(
        f'<div class="seg {segment.source.value}"><em>{label}</em>'
        f"{escape(tokenizer.decode(list(segment.token_ids)).strip(chr(10)))}</div>"
        for label, segment in labelled(trajectory)
    )
    return (
        f'<div class="attempt"><header><b>{escape(title)}</b><span class="{tone}">{ended or "blank answer"}</span> '
        f'<span class="soft">{facts}</span></header>{segments}'
        + (f'<p class="lineage">experience shown: {links}</p>' if links else "")
        + "</div>"
    )


def labelled(trajectory: Trajectory) -> Iterator[tuple[str, Segment]]:
    """Segments with the name of their author; what the policy wrote is counted."""
    written = 0
    for segment in trajectory.segments:
        written += segment.source is Source.POLICY
        count = f" {written}" if segment.source is Source.POLICY else ""
        yield f"{segment.source.value}{count}", segment


def experience_shown(trajectory: Trajectory) -> list[str]:
    """Ids in order, each once."""
    return list(dict.fromkeys([*trajectory.strategies, *(case for turn in trajectory.turns for case in turn.cases)]))


def _read_entries(folder: Path) -> dict[str, dict[str, Any]]:
    """Records by id; without the embeddings, so that the page needs no encoder."""
    entries = {}
    for level in LEVELS:
        file = folder / f"level{level}.jsonl"
        if file.is_file():
            with file.open(encoding="utf-8") as lines:
                entries |= {record["id"]: record for record in map(json.loads, lines)}
    return entries


def _entry(entry: Mapping[str, Any], entries: Mapping[str, Mapping[str, Any]], is_open: bool = False) -> str:
    children = [entries[child] for child in entry.get("child_ids", ()) if child in entries]
    children = [child for child in children if child["level"] < entry["level"]]  # a damaged store has no endless tree
    tags = "".join(
        f'<span class="tag">{escape(str(tag))}</span>' for tag in (entry.get("type"), *entry.get("tags", ())) if tag
    )
    questions = [escape(question) for _, question in entry.get("qa_groups", ())]
    if children:
        inside = "".join(_entry(child, entries) for child in children)
        note = f'<p class="lineage">from {len(children)} of level E{entry["level"] - 1}, {len(questions)} questions</p>'
    else:
        inside, note = "", '<p class="lineage">from: ' + "<br>".join(questions) + "</p>"
    return (
        f'<details id="{escape(entry["id"])}"{" open" if is_open else ""}><summary>'
        f'<span class="level l{entry["level"]}">E{entry["level"]}</span><b>{escape(entry["title"])}</b>{tags}</summary>'
        f"<p>{escape(entry['description'])}</p>{note}{inside}</details>"
    )


def _question(
    sample: Sample | None, sample_id: str, arms: Mapping[str, list[Trajectory]], tokenizer: Any, is_open: bool
) -> str:
    question = sample.question if sample else sample_id
    gold = f' <span class="soft">answer: {escape(" | ".join(sample.answers))}</span>' if sample else ""
    family = f'<span class="tag">{escape(sample.family)}</span>' if sample and sample.family else ""
    attempts = [
        attempt_view(arm, trajectory, tokenizer) for arm, tried in arms.items() for trajectory in tried[:MAX_PER_ARM]
    ]
    return (
        f"<details{' open' if is_open else ''}><summary><b>{escape(question)}</b>{gold}{family}</summary>"
        f'<div class="attempts">{"".join(attempts)}</div></details>'
    )
