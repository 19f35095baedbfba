"""From finished trajectories to scores: means with intervals, per family, and the tables and files made of
them.

`evaluate` counts every question once; `describe_setting` is stored with each result, because numbers of
different corpora, protocols or decodings cannot be compared. Scores are in [0, 1] in JSON and in percent in
Markdown.
"""

import hashlib
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hiexp.config import ConfigError, lookup
from hiexp.data import Sample
from hiexp.metrics import METRICS, SCORER_VERSION, bootstrap_interval
from hiexp.rewards import has_answer
from hiexp.tracking import write_json
from hiexp.trajectory import Trajectory, groups_of


@dataclass(frozen=True)
class Decoding:
    """How attempts are drawn: temperature 0 is greedy, as in engine.Sampling."""

    name: str
    temperature: float
    top_p: float
    samples: int
    """attempts at each question"""


@dataclass(frozen=True)
class EvalConfig:
    """How a model is evaluated."""

    greedy: bool = True
    """one attempt at each question with the likeliest tokens"""
    samples_per_question: int = 0
    """besides, so many attempts drawn with the two settings below"""
    temperature: float = 1.0
    """of the sampled attempts"""
    top_p: float = 0.95
    """of the sampled attempts"""
    metrics: tuple[str, ...] = ("em", "f1", "cem", "cem_bound", "cem_tokset")
    """names from metrics.py"""
    seed: int = 0
    """of the samples, and of the draws behind the intervals"""

    def __post_init__(self) -> None:
        for name in self.metrics:
            lookup(METRICS, name, "metric")
        if not self.metrics:
            raise ConfigError(f"metrics is empty; name some of {', '.join(METRICS)}")
        if self.samples_per_question < 0 or not (self.greedy or self.samples_per_question):
            raise ConfigError(
                f"greedy={self.greedy} with samples_per_question={self.samples_per_question} evaluates nothing; set "
                "greedy=true or samples_per_question to at least 1"
            )
        if not (self.temperature > 0 and 0 < self.top_p <= 1):
            raise ConfigError(
                f"need temperature > 0 and 0 < top_p <= 1, got {self.temperature} and {self.top_p}; "
                "for the likeliest token set greedy=true"
            )

    @property
    def decodings(self) -> list[Decoding]:
        """Greedy first, then sampled, as far as they are asked for."""
        greedy = [Decoding("greedy", 0.0, 1.0, 1)] if self.greedy else []
        sampled = Decoding("sampled", self.temperature, self.top_p, self.samples_per_question)
        return [*greedy, *([sampled] if self.samples_per_question else [])]


@dataclass(frozen=True)
class Interval:
    """A mean over questions with its 95% bootstrap interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Attempt:
    """One scored trajectory: a line of the per-sample file."""

    id: str
    member: int
    family: str
    family_group: str
    prediction: str
    answers: tuple[str, ...]
    scores: dict[str, float]
    status: str
    searches: int
    answer_words: int
    tokens: int
    """everything, the prompt included"""
    policy_tokens: int


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


@dataclass(frozen=True)
class EvalResult:
    overall: Slice
    by_family: dict[str, Slice]
    by_family_group: dict[str, Slice]
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
    attempts = tuple(
        _attempt(trajectory, sample, cfg) for group, sample in zip(groups, samples, strict=True) for trajectory in group
    )
    overall = _slice(attempts, cfg)
    assert (overall.num_questions, overall.num_samples) == (len(samples), len(trajectories))
    return EvalResult(overall, _split(attempts, cfg, "family"), _split(attempts, cfg, "family_group"), attempts)


def difference(first: Sequence[Attempt], second: Sequence[Attempt], metric: str, seed: int = 0) -> Interval:
    """How much higher `second` scores, paired by question (tighter than two separate intervals)."""
    before, after = _per_question(first, metric), _per_question(second, metric)
    if before.keys() != after.keys():
        raise ValueError("the two results are of different questions")
    gains = [after[question] - before[question] for question in before]
    return Interval(sum(gains) / len(gains), *bootstrap_interval(gains, seed))


def read_attempts(path: str | Path) -> list[Attempt]:
    """The lines of a samples_<arm>.jsonl."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [Attempt(**json.loads(line)) for line in lines]


def describe_setting(
    *,
    model: str,
    hek: str | Path | None,
    protocol: str,
    template: str,
    corpus: str,
    encoder: str,
    search: Mapping[str, Any],
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
    folder: str | Path, results: Mapping[str, EvalResult], settings: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write evaluation.json, evaluation.md and samples_<arm>.jsonl; warns when settings of the arms differ."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    arms = list(results)
    for arm in arms[1:]:
        for line in compare_settings(settings[arms[0]], settings[arm], ("model", "hek", "decoding")):
            warnings.warn(f"{arms[0]} and {arm} cannot be compared: {line}", stacklevel=2)
    whole = {arm: {"setting": dict(settings[arm]), **results[arm].to_json()} for arm in arms}
    write_json(path / "evaluation.json", whole)
    (path / "evaluation.md").write_text(to_markdown(results), encoding="utf-8")
    for arm, result in results.items():
        lines = [json.dumps(asdict(attempt), ensure_ascii=False) + "\n" for attempt in result.attempts]
        name = re.sub(r"[^\w.-]+", "_", arm)
        (path / f"samples_{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def to_markdown(results: Mapping[str, EvalResult]) -> str:
    """One table of all questions, then one per family group and per family; percent with 95% intervals."""
    parts = ["## All questions\n", _table({arm: {"": result.overall} for arm, result in results.items()})]
    for title, field in (("family group", "by_family_group"), ("family", "by_family")):
        slices = {arm: getattr(result, field) for arm, result in results.items()}
        if any(set(named) - {""} for named in slices.values()):
            parts += [f"\n## By {title}\n", _table(slices)]
    return "\n".join(parts)


def _attempt(trajectory: Trajectory, sample: Sample, cfg: EvalConfig) -> Attempt:
    prediction = trajectory.answer if has_answer(trajectory) else ""
    return Attempt(
        id=sample.id,
        member=trajectory.member,
        family=sample.family,
        family_group=sample.family_group,
        prediction=prediction,
        answers=sample.answers,
        scores={name: METRICS[name](prediction, sample.answers) for name in cfg.metrics},
        status=trajectory.status.value,
        searches=trajectory.num_searches,
        answer_words=len(prediction.split()),
        tokens=trajectory.num_tokens,
        policy_tokens=trajectory.num_response_tokens,
    )


def _split(attempts: Sequence[Attempt], cfg: EvalConfig, field: str) -> dict[str, Slice]:
    names = sorted({getattr(attempt, field) for attempt in attempts})
    return {name: _slice([a for a in attempts if getattr(a, field) == name], cfg) for name in names}


def _slice(attempts: Sequence[Attempt], cfg: EvalConfig) -> Slice:
    scores = {}
    for name in cfg.metrics:
        values = list(_per_question(attempts, name).values())
        scores[name] = Interval(sum(values) / len(values), *bootstrap_interval(values, cfg.seed))
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
    )


def _per_question(attempts: Sequence[Attempt], metric: str) -> dict[str, float]:
    """Mean over the samples of each question: questions, not samples, are independent."""
    values: dict[str, list[float]] = {}
    for attempt in attempts:
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
