"""When a retrieved experience is shown, and why: fixed thresholds, standardised scores, a learned gate.

    fixed    cosine >= threshold (the paper)
    zscore   z > z*, where z standardises a query's cosines over fixed keys, and z* is the conformal quantile of the
             best z that a source question reaches among entries that are not its own: of the questions for which a
             store holds nothing, about a share alpha is shown something
    gate     logistic regression on FEATURES, fitted to what an entry did for a query (uplift)

Cosines of many encoders lie in a narrow band (0.7 to 1.0 for e5), and some queries and some titles are near to
everything; z removes what belongs to the query, CSLS what belongs to the title. hek.py applies this to a store.
"""

import dataclasses
import json
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression

from hiexp.config import ConfigError
from hiexp.data import records
from hiexp.experience import Experience

FEATURES = ("cosine", "z", "margin", "level", "title_words", "sources")
"""What the gate sees of a query and an entry; margin in units of z, to the best entry of another cluster."""
BACKGROUND = 1024
"""keys that a query's cosines are standardised over, at most"""
QUESTIONS = 1024
"""source questions that calibrate a level, at most"""
NEIGHBOURS = 10
"""k of CSLS"""
SLACK = 1e-6
"""A float32 cosine that should equal the threshold may miss it by this much."""
Z_SLACK = 1e-4
"""The same for z, a cosine divided by a small spread."""
FAR = 10.0
"""A margin is cut to this many units either way; without another cluster it is this."""
SMALL = 1e-4
"""A spread below this is rounding: the background is equally near."""


@dataclass(frozen=True)
class Record:
    """What showing an entry for a query did: the reward with it minus the reward without."""

    query: str
    entry: str
    uplift: float
    sample_id: str = ""


def read_records(path: str | Path) -> list[Record]:
    """JSON lines {"query", "entry", "uplift", "sample_id"?}; ConfigError naming file and line of a wrong one."""
    read = []
    for where, item in records(path):
        try:
            record = Record(item["query"], item["entry"], float(item["uplift"]), str(item.get("sample_id", "")))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{where}: not a record of query, entry and uplift ({error!r}); mend the line") from error
        if not (isinstance(record.query, str) and isinstance(record.entry, str) and math.isfinite(record.uplift)):
            raise ConfigError(f"{where}: query and entry are texts, uplift is a finite number; mend the line")
        read.append(record)
    return read


def known(found: Sequence[Record], by_id: Mapping[str, Experience]) -> list[Record]:
    """The records of entries that are (still) there; warns of the others."""
    kept = [record for record in found if record.entry in by_id]
    if len(kept) < len(found):
        warnings.warn(f"{len(found) - len(kept)} of {len(found)} records name entries that are gone", stacklevel=2)
    return kept


def cluster_of(entry: Experience) -> str:
    """Cases of one pattern belong together; above level 1 each entry is a cluster of its own."""
    return (entry.parent_id or entry.id) if entry.level == 1 else entry.id


class Standard:
    """z of each key: (u - median) / spread over the background, where u is the cosine or its CSLS score.

    The spread is 1.4826 MAD, but at least that of the median question: a query that is about equally far from most
    of the background (words that few titles have) would otherwise make a large z of a small difference.
    """

    def __init__(self, background: np.ndarray, keys: np.ndarray, questions: np.ndarray, csls: bool) -> None:
        """[B, D], [N, D] and [Q, D] unit rows."""
        self.background = background
        self._hubs = (hubness(keys, questions), hubness(background, questions)) if csls and len(questions) else None
        spreads = self._place(questions)[1] if len(questions) else np.zeros(1)
        self.least_spread = float(np.median(spreads))

    def __call__(self, queries: np.ndarray, cosines: np.ndarray) -> np.ndarray:
        """[Q, N] from [Q, D] and [Q, N]; 0 where all of the background is equally near, for nothing stands out."""
        middle, spread = self._place(queries)
        spread = np.maximum(spread, self.least_spread)
        scores = cosines if self._hubs is None else 2 * cosines - self._hubs[0]
        return (scores - middle) / np.where(spread > SMALL, spread, np.inf)

    def _place(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[Q, 1] median and spread of the background's scores."""
        behind = queries @ self.background.T
        if self._hubs is not None:
            # CSLS is 2s - r_q - r_d; r_q moves all scores of a query alike, which the standardisation takes out again
            behind = 2 * behind - self._hubs[1]
        middle = np.median(behind, axis=1, keepdims=True)
        return middle, 1.4826 * np.median(np.abs(behind - middle), axis=1, keepdims=True)


def hubness(keys: np.ndarray, questions: np.ndarray) -> np.ndarray:
    """[N] mean cosine of a key to the NEIGHBOURS questions nearest to it."""
    count = min(NEIGHBOURS, len(questions))
    blocks = [keys[at : at + 4096] @ questions.T for at in range(0, len(keys), 4096)]
    nearest = [np.partition(block, -count, axis=1)[:, -count:].mean(axis=1) for block in blocks]
    return np.concatenate(nearest) if nearest else np.zeros(0, np.float32)


def pick(total: int, count: int) -> np.ndarray:
    """`count` of the indices below `total` (or all), in order; the same ones for the same numbers."""
    if total <= count:
        return np.arange(total)
    return np.sort(np.random.default_rng(0).choice(total, count, replace=False))


def conformal_bound(scores: Sequence[float], alpha: float) -> float:
    """The ceil((n + 1)(1 - alpha))-th smallest: a further score of the same kind exceeds it with at most `alpha`.

    ValueError when there are too few scores for that.
    """
    rank = math.ceil((len(scores) + 1) * (1 - alpha) - 1e-9)
    if rank > len(scores):
        raise ValueError(
            f"{len(scores)} questions are too few for alpha={alpha}, {math.ceil(1 / alpha) - 1} are needed"
        )
    return float(np.sort(scores)[rank - 1])


def mismatched_best(
    entries: Sequence[Experience],
    everything: Collection[Experience],
    ids: Sequence[str],
    values: Callable[[int], np.ndarray],
) -> list[float]:
    """For each source question the best value (`values(i)`: [N]) of the entries that are not its own.

    Its own are those that stem from it, those of their clusters, and those that say word for word what an entry of
    any level that stems from it says. Questions without any other entry are left out.
    """
    places: dict[tuple[str, str], list[int]] = {}
    for j, entry in enumerate(entries):
        places.setdefault(("cluster", cluster_of(entry)), []).append(j)
        places.setdefault(("text", entry.description), []).append(j)
    own: dict[str, set[tuple[str, str]]] = {}
    for entry in everything:
        for sample_id in entry.sample_ids:
            own.setdefault(sample_id, set()).update([("cluster", cluster_of(entry)), ("text", entry.description)])
    best = []
    for i, sample_id in enumerate(ids):
        row = np.array(values(i))
        row[[j for key in own[sample_id] for j in places.get(key, ())]] = -np.inf
        if row.max(initial=-np.inf) > -np.inf:
            best.append(float(row.max()))
    return best


def margins(values: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """[N] lead of each entry over the best entry of another cluster, cut to +-FAR; -inf values are not there."""
    first = int(np.argmax(values))
    others = values[clusters != clusters[first]]
    second = others.max(initial=-np.inf)
    rival = np.where(clusters == clusters[first], second, values[first])
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(np.clip(values - rival, -FAR, FAR), nan=-FAR)


@dataclass(frozen=True)
class Gate:
    """Logistic regression: probability that showing an entry helps."""

    encoder: str
    csls: bool
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    weights: tuple[float, ...]
    bias: float
    features: tuple[str, ...] = FEATURES

    def probability(self, rows: np.ndarray) -> np.ndarray:
        """[N] from features [N, F]."""
        logits = (rows - np.array(self.mean)) / np.array(self.scale) @ np.array(self.weights) + self.bias
        return 1 / (1 + np.exp(-np.clip(logits, -500, 500)))

    def save(self, path: str | Path) -> None:
        """Write JSON, whole or not at all."""
        new = Path(f"{path}.tmp")
        try:
            new.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")
            new.replace(path)
        except OSError as error:
            raise ConfigError(f"cannot write the gate {path}: {error}") from error

    @classmethod
    def load(cls, path: str | Path, encoder: str, csls: bool) -> "Gate":
        """ConfigError when it is missing, damaged, or fitted to other scores than it would be given."""
        try:
            record: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
            record = {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}
            gate = cls(**record)
            sizes = {len(gate.mean), len(gate.scale), len(gate.weights)}
            if gate.features != FEATURES or sizes != {len(FEATURES)}:
                raise ValueError(f"features {gate.features}")
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"hek.gate={path} is no gate of this version ({error}); fit it again") from error
        if (gate.encoder, gate.csls) != (encoder, csls):
            fitted = f"encoder {gate.encoder!r}, csls={gate.csls}"
            raise ConfigError(f"hek.gate={path} was fitted with {fitted}, not {encoder!r}, csls={csls}; fit it again")
        return gate


@dataclass(frozen=True)
class Verdict:
    accepted: bool
    value: float
    """what was compared with the threshold: a cosine, z or a probability"""
    threshold: float
    reason: str
    far: bool = False
    """below the threshold of what entries are ranked by: so is the rest"""


@dataclass(frozen=True)
class Judge:
    """Scores and decides for one level of a store."""

    entries: Sequence[Experience]
    threshold: float
    """of the cosine, of z (which must exceed it) or of the gate's probability"""
    mode: str = "fixed"
    margin: float = 0.0
    standard: Standard | None = None
    gate: Gate | None = None
    negatives: Mapping[int, np.ndarray] = field(default_factory=dict)
    """row of an entry -> [n, D] vectors of its not_when"""

    @cached_property
    def clusters(self) -> np.ndarray:
        names = {name: i for i, name in enumerate(dict.fromkeys(map(cluster_of, self.entries)))}
        return np.array([names[cluster_of(entry)] for entry in self.entries], int)

    def values(self, queries: np.ndarray, cosines: np.ndarray) -> np.ndarray:
        """[Q, N] what entries are ranked by."""
        return self.standard(queries, cosines) if self.standard else cosines

    def features(self, cosines: np.ndarray, values: np.ndarray, leads: np.ndarray, row: int) -> list[float]:
        """FEATURES of a query and an entry; rows [N] of the query."""
        entry = self.entries[row]
        facts = (entry.level, len(entry.title.split()), len(entry.qa_groups))
        return [float(cosines[row]), float(values[row]), float(leads[row]), *map(float, facts)]

    def verdicts(
        self, query: np.ndarray, cosines: np.ndarray, values: np.ndarray, hidden: Collection[int]
    ) -> Callable[[int], Verdict]:
        """How to decide about the entries for a query [D], given rows [N] of its scores; `hidden` ones lead nobody."""
        leads = self.leads(values, hidden) if self.margin or self.gate else np.zeros(0)

        def decide(row: int) -> Verdict:
            verdict = self._compare(cosines, values, leads, row)
            if verdict.accepted and self.margin and leads[row] < self.margin - SLACK:
                why = f"another cluster is too near: margin {leads[row]:.3f} < {self.margin:g}"
                return dataclasses.replace(verdict, accepted=False, reason=why)
            if verdict.accepted and row in self.negatives:
                nearest = int(np.argmax(self.negatives[row] @ query))
                closest = float(self.negatives[row][nearest] @ query)
                if closest > cosines[row] + SLACK:
                    why = f"nearer ({closest:.3f}) to its not_when {self.entries[row].not_when[nearest]!r}"
                    return dataclasses.replace(verdict, accepted=False, reason=why)
            return verdict

        return decide

    def leads(self, values: np.ndarray, hidden: Collection[int]) -> np.ndarray:
        """`margins` among the entries that are not hidden."""
        seen = np.array(values, float)
        seen[list(hidden)] = -np.inf
        return margins(seen, self.clusters)

    def _compare(self, cosines: np.ndarray, values: np.ndarray, leads: np.ndarray, row: int) -> Verdict:
        if self.gate:
            value = float(self.gate.probability(np.array([self.features(cosines, values, leads, row)]))[0])
            accepted, name, signs = value >= self.threshold, "gate", (">=", "<")
        elif self.mode == "zscore":
            value = float(values[row])
            accepted, name, signs = value > self.threshold + Z_SLACK, "z", (">", "<=")
        else:
            value = float(cosines[row])
            accepted, name, signs = value >= self.threshold - SLACK, "cosine", (">=", "<")
        reason = f"{name} {value:.3f} {signs[not accepted]} {self.threshold:.3f}"
        return Verdict(accepted, value, self.threshold, reason, not accepted and self.gate is None)


def fit_gate(rows: np.ndarray, helped: Sequence[bool], encoder: str, csls: bool) -> Gate:
    """Fit to features [N, F] and whether each helped; ConfigError unless there are both kinds."""
    labels = np.array(helped, bool)
    if not labels.any() or labels.all():
        raise ConfigError(
            f"{labels.sum()} of {len(labels)} records have uplift above 0; a gate needs some of each kind"
        )
    mean, scale = rows.mean(axis=0), rows.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    model = LogisticRegression().fit((rows - mean) / scale, labels)
    middle, width, weights = (tuple(map(float, values)) for values in (mean, scale, model.coef_[0]))
    return Gate(encoder, csls, middle, width, weights, float(model.intercept_[0]))


def mine_not_when(
    found: Sequence[Record],
    by_id: Mapping[str, Experience],
    encode: Callable[[Sequence[str]], np.ndarray],
    least_cosine: float,
    most_uplift: float = 0.0,
    per_entry: int = 8,
) -> dict[str, tuple[str, ...]]:
    """Entry -> queries that it looked right for and was not: cosine >= `least_cosine`, uplift <= `most_uplift`.

    The worst first, at most `per_entry`. Left out is a query that was also helped, and one that would take the entry
    from a query that it helped (which is nearer to it than to the title).
    """
    kept = known(found, by_id)
    texts = sorted({record.query for record in kept} | {by_id[record.entry].title for record in kept})
    place = {text: i for i, text in enumerate(texts)}
    vectors = encode(texts) if texts else np.zeros((0, 1), np.float32)
    mined: dict[str, list[str]] = {}
    for record in sorted(kept, key=lambda r: (r.entry, r.uplift, r.query)):
        title = vectors[place[by_id[record.entry].title]]
        bad, chosen = vectors[place[record.query]], mined.setdefault(record.entry, [])
        if record.uplift > most_uplift or bad @ title < least_cosine - SLACK or record.query in chosen:
            continue
        good = [vectors[place[r.query]] for r in kept if r.entry == record.entry and r.uplift > max(0.0, most_uplift)]
        if len(chosen) < per_entry and not any(q @ bad > q @ title - SLACK for q in good):
            chosen.append(record.query)
    return {entry: tuple(queries) for entry, queries in mined.items() if queries}


def ranked(values: np.ndarray, first: int) -> Iterator[int]:
    """Indices by falling value, ties in order; only the `first` are sorted until more are asked for."""
    least = np.partition(values, -first)[-first] if first < len(values) else -np.inf
    for part in (np.flatnonzero(values >= least), np.flatnonzero(values < least)):
        yield from part[np.argsort(-values[part], kind="stable")].tolist()
