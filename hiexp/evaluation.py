"""From attempts to scores: means with intervals, per family and per number of hops, and the tables made of them.

`summarise` counts every question once; `describe_setting` is stored with each result, because numbers of different
corpora, protocols or decodings cannot be compared. Scores are in [0, 1] in JSON and in percent in Markdown.
"""

import hashlib
import itertools
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hiexp.data import Sample
from hiexp.eval_config import Decoding, EvalConfig
from hiexp.metrics import METRICS, SCORER_VERSION, bootstrap_interval
from hiexp.records import Attempt, attempt_of, outcome_of
from hiexp.tracking import write_json
from hiexp.trajectory import Trajectory, groups_of


@dataclass(frozen=True)
class Interval:
    """A mean over questions with its 95% bootstrap interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Slice:
    """The scores of some questions: all of them, or those of one family."""

    num_questions: int
    num_samples: int
    scores: dict[str, Interval]
    answer_words: float
    """mean over the attempts that have an answer: cover match rises with it"""
    no_answer_frac: float
    searches: float
    tokens: float
    policy_tokens: float
    statuses: dict[str, float]
    """fraction of attempts that ended so"""
    requests: float
    """times a model was asked, per attempt"""
    prompt_tokens: float
    """read by a model, per attempt, over all its requests"""
    seconds: float
    """per attempt; 0 = not measured"""
    cost: float | None
    """of all attempts together; None where there are no prices"""
    num_scored: dict[str, int]
    """attempts that have the score: fewer than num_samples where a judge gave no verdict"""


@dataclass(frozen=True)
class EvalResult:
    overall: Slice
    by_family: dict[str, Slice]
    by_family_group: dict[str, Slice]
    by_hops: dict[str, Slice]
    """without the questions whose number is not stated"""
    attempts: tuple[Attempt, ...]

    def to_json(self) -> dict[str, Any]:
        """Everything but the attempts, which have a file of their own."""
        return {name: value for name, value in asdict(self).items() if name != "attempts"}


def evaluate(
    trajectories: Sequence[Trajectory], samples: Sequence[Sample], cfg: EvalConfig, group_size: int = 1
) -> EvalResult:
    """Score `group_size` adjacent siblings per sample, groups in the order of `samples`.

    ValueError unless every sample has exactly its trajectories: none dropped with a last batch, none counted
    twice.
    """
    if not samples:
        raise ValueError("there are no samples to evaluate")
    groups = groups_of(trajectories, group_size)
    got, wanted = [group[0].sample_id for group in groups], [sample.id for sample in samples]
    if got != wanted or len(set(wanted)) != len(wanted):
        off = (Counter(got) - Counter(wanted)) + (Counter(wanted) - Counter(set(got)))
        raise ValueError(
            f"{len(groups)} groups of trajectories for {len(samples)} samples; missing, repeated, misplaced: "
            f"{', '.join(sorted(off)[:5]) or 'the order differs'}"
        )
    attempts = []
    for group, sample in zip(groups, samples, strict=True):
        for trajectory in group:
            outcome = outcome_of(trajectory)
            attempts.append(attempt_of(outcome, sample, score_answer(outcome.answer, sample.answers, cfg.metrics)))
    return summarise(attempts, samples, cfg)


def score_answer(answer: str, golds: Sequence[str], metrics: Sequence[str]) -> dict[str, float]:
    """The text metrics of an answer, by name."""
    return {name: METRICS[name](answer, golds) for name in metrics}


def summarise(attempts: Sequence[Attempt], samples: Sequence[Sample], cfg: EvalConfig) -> EvalResult:
    """Means over the attempts, which come in the order of `samples`, as many for each; ValueError otherwise."""
    counts = Counter(attempt.id for attempt in attempts)
    wanted = [sample.id for sample in samples]
    if set(counts.values()) != {len(attempts) // len(wanted)} or list(counts) != wanted:
        raise ValueError(f"{len(attempts)} attempts do not stand in the order of {len(wanted)} questions, evenly")
    by = [_split(attempts, cfg, field) for field in ("family", "family_group", "hops")]
    return EvalResult(_slice(attempts, cfg), *by, attempts=tuple(attempts))


def difference(first: Sequence[Attempt], second: Sequence[Attempt], metric: str, seed: int = 0) -> Interval:
    """How much higher `second` scores, paired by question (tighter than two separate intervals)."""
    before, after = _per_question(first, metric), _per_question(second, metric)
    if {attempt.id for attempt in first} != {attempt.id for attempt in second}:
        raise ValueError("the two results are of different questions")
    gains = [after[question] - before[question] for question in before if question in after]
    if not gains:
        raise ValueError(f"no question has the score {metric} in both results")
    return Interval(sum(gains) / len(gains), *bootstrap_interval(gains, seed))


def describe_setting(
    *,
    model: str,
    hek: str | Path | None,
    protocol: str,
    template: str,
    corpus: str,
    encoder: str,
    search: Mapping[str, Any],
    pipeline: Mapping[str, Any],
    top_k: int,
    samples: Iterable[Sample],
    decoding: Decoding,
    seed: int,
    rollout: Mapping[str, Any],
    thresholds: Mapping[str, Any],
) -> dict[str, Any]:
    """What a result depends on. `template` is a rendered prompt, `corpus` its hash, `encoder` names the retriever.

    `search` is the rest of `describe_search`: the index, the reranker.
    """
    return {
        "model": model,
        "hek": "none" if hek is None else _hash(p.read_text("utf-8") for p in _hek_files(Path(hek))),
        "protocol": protocol,
        "template": _hash([template]),
        "corpus": corpus,
        "encoder": encoder,
        "search": dict(search),
        "pipeline": dict(pipeline),
        "top_k": top_k,
        "questions": _hash(f"{s.id}\0{s.question}\0{s.answers}" for s in samples),
        "decoding": {**asdict(decoding), "seed": seed},
        "rollout": dict(rollout),
        "thresholds": dict(thresholds),
        "scorer": SCORER_VERSION,
    }


def compare_settings(
    first: Mapping[str, Any], second: Mapping[str, Any], ignore: Collection[str] = ("model", "hek")
) -> list[str]:
    """Differences to warn about before two results are compared; `ignore` is what is being compared."""
    keys = [key for key in {**first, **second} if key not in ignore]
    return [
        f"{key}: {first.get(key, 'not stated')} versus {second.get(key, 'not stated')}"
        for key in keys
        if first.get(key) != second.get(key)
    ]


def write_results(
    folder: str | Path,
    results: Mapping[str, EvalResult],
    settings: Mapping[str, Mapping[str, Any]],
    about: Mapping[str, Mapping[str, Any]],
) -> None:
    """Write evaluation.json and evaluation.md; warns when settings of arms that belong side by side differ.

    `about` says what each arm is: benchmark, method, hek, decoding, label, model.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    arms = list(results)
    for one, arm in itertools.pairwise(arms):
        if all(about[one].get(key) == about[arm].get(key) for key in ("benchmark", "method")):
            for line in compare_settings(settings[one], settings[arm], ("model", "hek", "decoding")):
                warnings.warn(f"{one} and {arm} cannot be compared: {line}", stacklevel=2)
    whole = {arm: {**about[arm], "setting": dict(settings[arm]), **results[arm].to_json()} for arm in arms}
    write_json(path / "evaluation.json", {"arms": whole})
    (path / "evaluation.md").write_text(to_markdown(results), encoding="utf-8")


def file_name(arm: str) -> str:
    """The arm as a part of the names of its files."""
    return re.sub(r"[^\w.+-]+", "_", arm)


def overall_table(results: Mapping[str, EvalResult]) -> str:
    """A row per arm, over all its questions, in Markdown; percent with 95% intervals."""
    return _table({arm: {"": result.overall} for arm, result in results.items()})


def to_markdown(results: Mapping[str, EvalResult]) -> str:
    """The table of all questions, then one per family group, per number of hops and per family."""
    parts = ["## All questions\n", overall_table(results)]
    for title, field in (("family group", "by_family_group"), ("hops", "by_hops"), ("family", "by_family")):
        slices = {arm: getattr(result, field) for arm, result in results.items()}
        if any(set(named) - {""} for named in slices.values()):
            parts += [f"\n## By {title}\n", _table(slices)]
    return "\n".join(parts)


def _split(attempts: Sequence[Attempt], cfg: EvalConfig, field: str) -> dict[str, Slice]:
    names = sorted({getattr(attempt, field) for attempt in attempts} - {0})
    return {str(name): _slice([a for a in attempts if getattr(a, field) == name], cfg) for name in names}


def _slice(attempts: Sequence[Attempt], cfg: EvalConfig) -> Slice:
    scores = {}
    for name in dict.fromkeys(name for attempt in attempts for name in attempt.scores):
        values = list(_per_question(attempts, name).values())
        scores[name] = Interval(sum(values) / len(values), *bootstrap_interval(values, cfg.seed))
    costs = [attempt.cost for attempt in attempts if attempt.cost is not None]
    statuses = Counter(attempt.status for attempt in attempts)
    return Slice(
        num_questions=len({attempt.id for attempt in attempts}),
        num_samples=len(attempts),
        scores=scores,
        answer_words=_mean([a for a in attempts if a.prediction], lambda a: a.answer_words),
        no_answer_frac=_mean(attempts, lambda a: not a.prediction),
        searches=_mean(attempts, lambda a: a.searches),
        tokens=_mean(attempts, lambda a: a.tokens),
        policy_tokens=_mean(attempts, lambda a: a.policy_tokens),
        statuses={status: count / len(attempts) for status, count in sorted(statuses.items())},
        requests=_mean(attempts, lambda a: a.requests),
        prompt_tokens=_mean(attempts, lambda a: a.prompt_tokens),
        seconds=_mean(attempts, lambda a: a.seconds),
        cost=sum(costs) if costs else None,
        num_scored={name: sum(name in attempt.scores for attempt in attempts) for name in scores},
    )


def _per_question(attempts: Sequence[Attempt], metric: str) -> dict[str, float]:
    """Mean over the samples of each question: questions, not samples, are independent."""
    values: dict[str, list[float]] = {}
    for attempt in attempts:
        if metric in attempt.scores:  # a judge may have failed to give a verdict
            values.setdefault(attempt.id, []).append(attempt.scores[metric])
    return {question: sum(scores) / len(scores) for question, scores in values.items()}


def _mean(attempts: Sequence[Attempt], value: Callable[[Attempt], float]) -> float:
    return sum(value(attempt) for attempt in attempts) / max(len(attempts), 1)


def _table(slices: Mapping[str, Mapping[str, Slice]]) -> str:
    """Rows are arms within names (families); one unnamed row per arm if there are no names."""
    names = sorted({name for named in slices.values() for name in named})
    rows = [(name, arm, slices[arm][name]) for name in names for arm in slices if name in slices[arm]]
    metrics = list(dict.fromkeys(metric for *_, row in rows for metric in row.scores))
    header = ["", "arm", "questions", "samples", *metrics, "answer words", "searches", "no answer"]
    lines = [header, ["---"] * len(header)]
    for name, arm, row in rows:
        scores = [_percent(row.scores[metric]) if metric in row.scores else "" for metric in metrics]
        numbers = [f"{row.answer_words:.1f}", f"{row.searches:.1f}", f"{100 * row.no_answer_frac:.0f}%"]
        lines.append([_cell(name), _cell(arm), str(row.num_questions), str(row.num_samples), *scores, *numbers])
    start = 0 if any(names) else 1
    return "".join("| " + " | ".join(line[start:]) + " |\n" for line in lines)


def _percent(value: Interval) -> str:
    return f"{100 * value.mean:.1f} [{100 * value.low:.1f}, {100 * value.high:.1f}]"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _hek_files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("header.json"), *folder.glob("level*.jsonl")])


def _hash(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:16]
