"""From the results of the lab study to what can be said: arms, paired differences over cells, claims and verdicts.

A cell is a pair of warm start and seed. A difference is taken within a cell and its interval is a t-interval over the
cells that both sides have; no interval is adjusted for how many there are. Cells of one warm start share a policy, and
those of one seed share a world, so the means per warm start stand beside each difference.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from hiexp.paired import Paired, paired
from hiexp.run_panel import CONDITIONED, Metrics, at_equal_reward, stability_panel

Cell = tuple[int, int]
"""(warm start, seed)"""
Side = tuple[str, str]
"""(arm, "on" or "off": tested with experience or without)"""
HOME = ("in_domain", "paraphrase", "held_out")
SPLITS = (*HOME, "second_world")
MACRO = "macro"
"""mean over all families of the world that the arm was trained in, each counted once"""
FEW = 3
"""pairs below which no verdict is given"""
MARGIN = 0.02
"""how much worse `at least as good` may be"""


PAPER = ("as in the paper", "opposite")
"""what is said of a claim that is met, and of one whose opposite is"""


@dataclass
class Results:
    """scores[arm, hek, decoding][cell][split][question] is the mean EM of the attempts at it."""

    scores: dict[tuple[str, str, str], dict[Cell, dict[str, dict[str, float]]]] = field(default_factory=dict)
    shown: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """share of the attempts that were shown any experience, by side"""

    def add(self, line: Mapping[str, Any]) -> None:
        key, cell = (line["arm"], line["hek"], line["decoding"]), (line["warm"], line["seed"])
        self.scores.setdefault(key, {}).setdefault(cell, {})[line["split"]] = line["scores"]
        self.shown.setdefault((line["arm"], line["hek"]), []).append(line["shown"])

    def value(self, side: Side, cell: Cell, split: str = MACRO, decoding: str = "sampled") -> float | None:
        """Mean EM of a split, or the macro mean; None where the cell has not finished."""
        parts = self.scores.get((*side, decoding), {}).get(cell, {})
        if split != MACRO:
            return fmean(parts[split].values()) if parts.get(split) else None
        families: dict[str, list[float]] = {}
        for name, em in (pair for home in HOME for pair in parts.get(home, {}).items()):
            families.setdefault(name.split("-")[0], []).append(em)
        return fmean(fmean(values) for values in families.values()) if families else None

    def cells(self, *sides: Side) -> list[Cell]:
        """Those that have sampled results of every side."""
        found = [set(self.scores.get((*side, "sampled"), {})) for side in sides]
        return sorted(set.intersection(*found)) if found else []


def read_results(paths: Iterable[Path]) -> Results:
    results = Results()
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            results.add(json.loads(line))
    return results


@dataclass(frozen=True)
class Row:
    """A difference in EM and what is said of it."""

    says: str
    first: Side
    second: Side
    found: Paired
    per_warm_start: dict[int, float]
    verdict: str = ""

    def to_json(self) -> dict[str, Any]:
        return {name: None if value != value else value for name, value in asdict(self.found).items()} | {
            "says": self.says,
            "of": list(self.first),
            "against": list(self.second),
            "per_warm_start": self.per_warm_start,
            "verdict": self.verdict,
        }


def compare(
    results: Results, says: str, of: Side, against: Side, split: str = MACRO, decoding: str = "sampled"
) -> Row | None:
    """`of` minus `against` over the cells that both have; None without any."""
    pairs = {
        cell: (before, after)
        for cell in results.cells(of, against)
        if (before := results.value(against, cell, split, decoding)) is not None
        and (after := results.value(of, cell, split, decoding)) is not None
    }
    if not pairs:
        return None
    warm: dict[int, list[float]] = {}
    for (start, _), (before, after) in pairs.items():
        warm.setdefault(start, []).append(after - before)
    found = paired([before for before, _ in pairs.values()], [after for _, after in pairs.values()])
    return Row(says, of, against, found, {start: fmean(gains) for start, gains in warm.items()})


def verdict(found: Paired, margin: float = 0.0, words: tuple[str, str] = PAPER) -> str:
    """Whether the interval agrees with what is claimed: `second` above `first` (or not worse than by `margin`)."""
    if found.pairs < FEW or math.isnan(found.low):
        return "too few pairs"
    yes, no = words
    if found.low > -margin:
        return yes if not margin else f"{yes} (not worse by {100 * margin:.0f} points)"
    return no if found.high < 0 else "not shown"


@dataclass(frozen=True)
class Claim:
    """A sentence and the comparisons that ask for it; `controls` carry no verdict."""

    number: str
    says: str
    rows: tuple[tuple[str, Side, Side], ...]
    controls: tuple[tuple[str, Side, Side], ...] = ()
    margin: float = 0.0
    words: tuple[str, str] = PAPER


OFF, ON = "off", "on"
GRPO = ("grpo", OFF)
CLAIMS = (
    Claim(
        "i",
        "in training: E2+E1 > E2 > E3+E1 > E3 > GRPO",
        (
            ("E2+E1 > E2", ("e2_e1", ON), ("e2", ON)),
            ("E2 > E3+E1", ("e2", ON), ("e3_e1", ON)),
            ("E3+E1 > E3", ("e3_e1", ON), ("e3", ON)),
            ("E3 > GRPO", ("e3", ON), GRPO),
            ("E2+E1 > GRPO", ("e2_e1", ON), GRPO),
        ),
        (
            ("E2+E1, HEK taken away, against GRPO", ("e2_e1", OFF), GRPO),
            ("GRPO, HEK only when tested", ("grpo", ON), GRPO),
            ("E2+E1 against GRPO at its learning rate", ("e2_e1", ON), ("grpo_same", OFF)),
            ("that, HEK taken away", ("e2_e1", OFF), ("grpo_same", OFF)),
            ("E2+E1 against GRPO for its CPU time", ("e2_e1", ON), ("grpo_cpu", OFF)),
            ("half of the groups without, against GRPO", ("half", ON), GRPO),
            ("half of the groups without, HEK taken away", ("half", OFF), GRPO),
            ("half, taken away, against GRPO with half of the groups", ("half", OFF), ("grpo_half", OFF)),
            ("half, against GRPO for the CPU time of E2+E1", ("half", ON), ("grpo_cpu", OFF)),
            ("half the groups are worth it: GRPO against its half", GRPO, ("grpo_half", OFF)),
            ("E2+E1 against lessons of other questions", ("e2_e1", ON), ("shuffled", ON)),
            ("E2+E1 against filler", ("e2_e1", ON), ("filler", ON)),
            ("filler, then taken away, against GRPO", ("filler", OFF), GRPO),
            ("lessons of other questions, taken away, against GRPO", ("shuffled", OFF), GRPO),
        ),
    ),
    Claim(
        "ii",
        "untrained: E2+E1 > E3+E1 > none",
        (
            ("E2+E1 > none", ("free_e2_e1", ON), ("base", OFF)),
            ("E3+E1 > none", ("free_e3_e1", ON), ("base", OFF)),
            ("E2+E1 > E3+E1", ("free_e2_e1", ON), ("free_e3_e1", ON)),
        ),
        (
            ("E1 alone", ("free_e1", ON), ("base", OFF)),
            ("E2 alone", ("free_e2", ON), ("base", OFF)),
            ("E3 alone", ("free_e3", ON), ("base", OFF)),
            ("against lessons of other questions", ("free_e2_e1", ON), ("free_shuffled", ON)),
            ("against filler", ("free_e2_e1", ON), ("free_filler", ON)),
            ("filler against none", ("free_filler", ON), ("base", OFF)),
            ("the right plans (upper bound) against its own", ("free_oracle", ON), ("free_e2_e1", ON)),
        ),
    ),
    Claim(
        "iii",
        "HiExp helps GRPO and GSPO alike",
        (
            ("GRPO: with E2+E1 > without", ("e2_e1", ON), GRPO),
            ("GSPO: with E2+E1 > without", ("gspo_e2_e1", ON), ("gspo", OFF)),
        ),
        (
            ("GSPO: with E2+E1, taken away", ("gspo_e2_e1", OFF), ("gspo", OFF)),
            ("GSPO against GRPO", ("gspo", OFF), GRPO),
        ),
    ),
    Claim(
        "iv",
        "own experience is as good as a teacher's",
        (
            ("trained: own >= teacher's", ("e2_e1", ON), ("by_teacher", ON)),
            ("untrained: own >= teacher's", ("free_e2_e1", ON), ("free_teacher", ON)),
        ),
        (("trained, taken away", ("e2_e1", OFF), ("by_teacher", OFF)),),
        margin=MARGIN,
    ),
)

BETTER = Claim(
    "better",
    "GRPO at the same CPU time, and first the right attempts behind the HEK (RFT)",
    (
        ("RFT, then GRPO > GRPO for its CPU time", ("rft_same", OFF), ("grpo_long", OFF)),
        ("that, HEK when tested", ("rft_same", ON), ("grpo_long", OFF)),
        ("RFT, then E2 > GRPO for its CPU time", ("rft_e2", ON), ("grpo_long", OFF)),
        ("that, HEK taken away", ("rft_e2", OFF), ("grpo_long", OFF)),
        ("what the lessons add: RFT, then E2 > RFT, then GRPO", ("rft_e2", ON), ("rft_same", OFF)),
        ("that too, HEK taken away", ("rft_e2", OFF), ("rft_same", OFF)),
    ),
    (
        ("RFT, then GRPO at a rate of its own, against GRPO for its CPU time", ("rft_grpo", OFF), ("grpo_long", OFF)),
        ("RFT, then GRPO, against GRPO", ("rft_same", OFF), GRPO),
        ("RFT, then GRPO: HEK only when tested", ("rft_same", ON), ("rft_same", OFF)),
        ("RFT alone against GRPO", ("rft", OFF), GRPO),
        ("RFT alone: with HEK against without", ("rft", ON), ("rft", OFF)),
        ("GRPO for that CPU time: HEK only when tested", ("grpo_long", ON), ("grpo_long", OFF)),
        ("GRPO for that CPU time against GRPO", ("grpo_long", OFF), GRPO),
    ),
    words=("better", "worse"),
)
DOSE = Claim(
    "dose",
    "how much of it, and when: each against GRPO",
    tuple(
        row
        for arm, says in (
            ("half", "half of the groups without"),
            ("half_e2", "half without, patterns alone"),
            ("half_e3_e1", "half without, strategies and cases"),
            ("half_uplift", "half without, only to questions that gained"),
            ("eighth", "an eighth without"),
            ("anneal", "from all to none"),
            ("closed", "an eighth without, the HEK refreshed"),
        )
        for row in ((says, (arm, ON), GRPO), (f"{says}, taken away", (arm, OFF), GRPO))
    ),
    (
        ("GSPO, half of the groups without, against GSPO", ("gspo_half", ON), ("gspo", OFF)),
        ("GSPO, half of the groups without, taken away", ("gspo_half", OFF), ("gspo", OFF)),
    ),
    words=("better", "worse"),
)
LESSON = Claim(
    "lesson",
    "which lesson is found, and what it says",
    (
        ("untrained: wider clusters against E2", ("free_coarse", ON), ("free_e2", ON)),
        ("untrained: found from farther away, against E2", ("free_loose", ON), ("free_e2", ON)),
        ("untrained: advice without titles against E2", ("free_advice", ON), ("free_e2", ON)),
        ("trained: wider clusters against E2", ("e2_coarse", ON), ("e2", ON)),
        ("trained: found from farther away, against E2", ("e2_loose", ON), ("e2", ON)),
        ("trained: advice without titles against E2", ("e2_advice", ON), ("e2", ON)),
        ("trained: E2 against GRPO", ("e2", ON), GRPO),
        ("that, taken away", ("e2", OFF), GRPO),
    ),
    (
        ("untrained: titles without advice against none", ("free_titles", ON), ("base", OFF)),
        ("untrained: titles with the advice of others against E2+E1", ("free_mismatched", ON), ("free_e2_e1", ON)),
        ("trained: titles with the advice of others against E2+E1", ("mismatched", ON), ("e2_e1", ON)),
        ("trained: the right plans against E2+E1", ("oracle", ON), ("e2_e1", ON)),
        ("trained: the right plans, taken away, against GRPO", ("oracle", OFF), GRPO),
        ("trained: a question sees its own lesson, against E2+E1", ("leak", ON), ("e2_e1", ON)),
        ("trained: a question sees its own lesson, taken away", ("leak", OFF), ("e2_e1", OFF)),
    ),
    words=("better", "worse"),
)
OURS = (DOSE, LESSON, BETTER)
"""of the full set: no claim of the paper"""

BY_SPLIT = (
    ("E2+E1 > GRPO", ("e2_e1", ON), GRPO),
    ("E2+E1, HEK taken away, against GRPO", ("e2_e1", OFF), GRPO),
    ("half of the groups without, against GRPO", ("half", ON), GRPO),
    ("half of the groups without, HEK taken away", ("half", OFF), GRPO),
    ("filler, then taken away, against GRPO", ("filler", OFF), GRPO),
    ("GSPO: with E2+E1 > without", ("gspo_e2_e1", ON), ("gspo", OFF)),
    ("trained: own >= teacher's", ("e2_e1", ON), ("by_teacher", ON)),
    ("GRPO, HEK only when tested", ("grpo", ON), GRPO),
    ("untrained: E2+E1 > none", ("free_e2_e1", ON), ("base", OFF)),
    ("untrained: the right plans > none", ("free_oracle", ON), ("base", OFF)),
    ("RFT, then GRPO > GRPO for its CPU time", ("rft_same", OFF), ("grpo_long", OFF)),
    ("RFT, then E2 > GRPO for its CPU time", ("rft_e2", ON), ("grpo_long", OFF)),
    ("RFT, then E2 > RFT, then GRPO", ("rft_e2", ON), ("rft_same", OFF)),
)
"""comparisons that are shown for every test split"""


def claim_rows(results: Results, claim: Claim, split: str = MACRO, decoding: str = "sampled") -> list[Row]:
    """Its comparisons with a verdict, then the controls without."""
    rows = []
    for has_verdict, group in ((True, claim.rows), (False, claim.controls)):
        for says, of, against in group:
            if row := compare(results, says, of, against, split, decoding):
                word = verdict(row.found, claim.margin, claim.words) if has_verdict else ""
                rows.append(Row(row.says, row.first, row.second, row.found, row.per_warm_start, word))
    return rows


def mean_over(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95% t-interval; nan bounds for one value."""
    found = paired([0.0] * len(values), values)
    return found.difference, found.low, found.high


PANEL = (
    "reward_mean", "dev_area", "reward_max_drop", "within_group_var", "zero_signal_groups", "all_right_groups",
    "all_wrong_groups", "advantage_var", "grad_norm_mean", "grad_norm_var", "grad_norm_spikes", "grad_clipped",
    "grad_cosine", "noise_scale", "entropy_start", "entropy_end", "entropy_half_life", "kl_max", "clip_frac",
)  # fmt: skip
"""numbers of the stability panel that the report shows"""


def stability_rows(
    of: Mapping[Cell, Metrics], against: Mapping[Cell, Metrics]
) -> tuple[dict[str, Paired], dict[str, tuple[Paired, float]]]:
    """Two arms over the cells that both have: the panel's numbers, and the gaps at equal mean reward.

    The second is name -> (gaps of the cells, mean share of steps that had a counterpart): steps of both runs of a cell
    are compared within bins of mean reward, so that an arm is not called calm for having less to learn.
    """
    cells = sorted(of.keys() & against.keys())
    panels = {cell: (stability_panel(against[cell]), stability_panel(of[cell])) for cell in cells}
    plain = {}
    for name in PANEL:
        pairs = [(a[name], b[name]) for a, b in panels.values() if name in a and name in b]
        if pairs:
            plain[name] = paired([a for a, _ in pairs], [b for _, b in pairs])
    matched = {}
    for name, key in CONDITIONED.items():
        gaps = [gap for cell in cells if (gap := at_equal_reward([against[cell]], [of[cell]], key))]
        if gaps:
            over = paired([0.0] * len(gaps), [gap for gap, _ in gaps])
            matched[name] = (over, fmean(share for _, share in gaps))
    return plain, matched


def stability_verdict(plain: Mapping[str, Paired], matched: Mapping[str, tuple[Paired, float]]) -> str:
    """Of the direct measures: variance of the gradient norm, noise scale, and the gradient norm at equal reward.

    One that too few cells have (a noise scale needs a gradient that points somewhere) is left out.
    """
    found = [plain[name] for name in ("grad_norm_var", "noise_scale") if name in plain]
    found += [matched["grad_norm"][0]] if "grad_norm" in matched else []
    found = [one for one in found if one.pairs >= FEW]
    if not found:
        return "too few pairs"
    lower, higher = sum(one.high < 0 for one in found), sum(one.low > 0 for one in found)
    if lower == len(found):
        return "as in the paper"
    return "opposite" if higher == len(found) else f"not shown ({lower} of {len(found)} lower, {higher} higher)"
