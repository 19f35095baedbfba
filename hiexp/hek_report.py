"""The account of how a HEK was made: what each stage took in, and why it turned something down."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hiexp.experience import Experience


@dataclass
class LevelReport:
    """The clustering of one level's entries."""

    level: int
    threshold: float
    """cosine similarity"""
    how: str
    """given, calibrated, or why neither"""
    sizes: list[int]
    """of every cluster, single entries included"""
    coverage: float = 0.0
    """share of level-1 entries with an ancestor in the next level"""


@dataclass
class BuildReport:
    """Filled in while a HEK is built; `to_json` and `to_markdown` show it."""

    prompts: str = ""
    linkage: str = ""
    source_model: str = ""
    questions: int = 0
    all_right: int = 0
    all_wrong: int = 0
    pairs: int = 0
    replies: dict[int, Counter[str]] = field(default_factory=dict)
    """by level: accepted, and every reason for which a reply was turned down; an attempt counts once"""
    given_up: dict[int, int] = field(default_factory=dict)
    """by level: pairs or clusters for which no attempt gave an acceptable reply"""
    merged: int = 0
    """level-1 entries that joined a near duplicate"""
    levels: list[LevelReport] = field(default_factory=list)
    entries: dict[int, int] = field(default_factory=dict)
    stop: str = ""
    warnings: list[str] = field(default_factory=list)

    def finish(self, levels: Mapping[int, Sequence[Experience]]) -> None:
        """Count the entries of the finished store and what its levels cover."""
        self.entries = {level: len(entries) for level, entries in levels.items()}
        parents = {entry.id: entry.parent_id for entries in levels.values() for entry in entries}
        for report in self.levels:
            reached = 0
            for entry in levels[1]:
                ancestor: str | None = entry.id
                for _ in range(report.level):
                    ancestor = parents[ancestor] if ancestor is not None else None
                reached += ancestor is not None
            report.coverage = reached / len(levels[1]) if levels[1] else 0.0
        if not levels[1]:
            reasons = ", ".join(f"{reason} {n}" for reason, n in self.replies.get(1, Counter()).most_common())
            self.warnings.append(f"the HEK is empty: no lesson from {self.pairs} pairs was usable ({reasons})")
        elif not levels.get(2):
            self.warnings.append(f"the HEK has no patterns (level 2): {self.stop}")

    def to_json(self) -> dict[str, Any]:
        """Plain values only; the size distribution of each level's clusters is under `size_counts`."""
        by_level = {
            "replies": {str(level): dict(counts) for level, counts in self.replies.items()},
            "given_up": {str(level): count for level, count in self.given_up.items()},
            "entries": {str(level): count for level, count in self.entries.items()},
        }
        levels = [
            vars(level) | {"size_counts": {str(k): n for k, n in sorted(Counter(level.sizes).items())}}
            for level in self.levels
        ]
        return vars(self) | by_level | {"levels": levels, "warnings": list(self.warnings)}

    def to_markdown(self) -> str:
        """Tables for a reader."""
        lines = [f"- **Warning: {warning}**" for warning in self.warnings]
        lines += [
            "## From questions to pairs",
            "",
            f"Reflector: {self.source_model}; prompts: {self.prompts}.",
            "",
            "| questions | always right | never right | pairs of right and wrong |",
            "|---|---|---|---|",
            f"| {self.questions} | {self.all_right} | {self.all_wrong} | {self.pairs} |",
            "",
            "## Replies of the reflector",
            "",
            "| level | outcome | replies |",
            "|---|---|---|",
        ]
        for level, counts in sorted(self.replies.items()):
            lines += [f"| {level} | {reason} | {count} |" for reason, count in counts.most_common()]
            lines.append(f"| {level} | given up after all attempts | {self.given_up.get(level, 0)} |")
        lines += [
            "",
            f"Near duplicates merged at level 1: {self.merged}.",
            "",
            f"## Levels (linkage: {self.linkage})",
            "",
            "| level | entries | threshold | how | clusters: number x size | level-1 entries covered above |",
            "|---|---|---|---|---|---|",
        ]
        clustered = {report.level: report for report in self.levels}
        for level, count in sorted(self.entries.items()):
            lines.append(f"| {level} | {count} | {_clusters(clustered.get(level))} |")
        return "\n".join([*lines, "", f"Stopped: {self.stop}.", ""])


def _clusters(report: LevelReport | None) -> str:
    if report is None:
        return "- | - | - | -"
    sizes = ", ".join(f"{n} x {size}" for size, n in sorted(Counter(report.sizes).items(), reverse=True))
    return f"{report.threshold:.3f} | {report.how} | {sizes or '-'} | {report.coverage:.0%}"
