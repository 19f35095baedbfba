"""What experience does to the reward: by entry (`effects`), and to be expected for a question (`Outlook`).

By entry: a shrunken regression over whole groups, some of which got no experience.

    reward - prior = time + injected + sum over entries of share * own effect + the question's own error + noise

A plain mean of the rewards that an entry was shown with would praise entries of easy questions, and those that are
shown late, when the policy is better. Against the first, `prior` is what the question was worth without experience;
against the second, time has an effect of its own, which the groups without experience tell apart from what experience
does. All effects have priors of mean zero, so that an entry with few uses stays near the mean of all entries and its
interval is wide. (Bayesian linear regression, with both variances estimated from the residuals: Gelman et al., Bayesian
Data Analysis, chapters 14 and 15.) There is no slope on `prior`: that is itself a noisy mean, and its regression to the
mean would be taken for what the entries of easy questions do.

For a question: a mean over the questions in the store's table that are near to it, each with the weight of its
precision, shrunk towards the mean of all.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from hiexp.config import ConfigError
from hiexp.experience import Asked

COMMON, DRIFT, INJECTED, OWN = 0.7, 0.2, 0.5, 0.25
"""prior standard deviations, in rewards: of the run's mean, of what a part of the run differs by from it, of showing
anything at all, and of what one entry differs by from the others"""
BUCKETS = 8
"""parts of the run, of equal length"""
SHOWN = 1 + BUCKETS
"""column of what any entry does; before it those of time, after it one for each entry"""
GUESSED, WEIGHT = 0.05, 4.0
"""variance of a group's reward before any was seen, and as how many groups that counts"""
PASSES = 3
"""fits, each with the variances that the one before left"""
MOST = 2048
"""entries with an effect of their own, the most used; it bounds memory, and the rest keep their prior"""

REACHES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""how far a question speaks for others, as shares of the median distance (1 - cosine); which one, the table tells"""
OWN_SHARES = (0.05, 0.3, 0.8)
"""how much of what questions differ by is theirs alone; which one, the table tells as well"""
NEAREST = 64
"""questions that a forecast is made from, at most"""
FITTED = 1024
"""questions that the two are chosen on, at most"""


@dataclass(frozen=True)
class UpliftConfig:
    """What `python -m hiexp.uplift` measures."""

    questions: int = 0
    """ask a random subset of so many training questions; 0 = all"""
    attempts: int = 4
    """at each question without experience, and as many with it, from the same seeds"""
    level: float = 0.95
    """probability of the intervals; an entry whose whole interval is below 0 is dropped"""

    def __post_init__(self) -> None:
        if self.questions < 0 or self.attempts < 1:
            raise ConfigError(f"questions={self.questions} must be at least 0 and attempts={self.attempts} at least 1")
        if not 0 < self.level < 1:
            raise ConfigError(f"level={self.level} must lie between 0 and 1")


@dataclass(frozen=True)
class Outcome:
    """One whole group of one step."""

    sample_id: str
    step: int
    prior: float
    """mean reward that is expected without experience: of earlier groups without it, or of construction rollouts"""
    hinted: bool
    """False: a control group, which could not be shown anything"""
    reward: float
    """mean over the group"""
    shown: Mapping[str, float]
    """entry id -> share of the group's attempts that saw it"""


@dataclass(frozen=True)
class Effect:
    """What showing an entry changes the reward by, against showing nothing at all."""

    uplift: float
    low: float
    high: float
    uses: int
    """groups that saw it"""


def effects(outcomes: Sequence[Outcome], level: float = 0.9, paired: bool = False) -> dict[str, Effect]:
    """Every entry that was shown, with a central interval of probability `level`.

    Without groups that saw nothing, time and experience cannot be told apart, and the intervals are as wide as the
    priors; unless `paired`: each prior is what the same policy reached without experience, and time has no effect.
    Entries that are always shown together share what they did.
    """
    if not 0 < level < 1:
        raise ValueError(f"level={level} must lie between 0 and 1")
    seen = [{entry: share for entry, share in one.shown.items() if share > 0} if one.hinted else {} for one in outcomes]
    uses = Counter(entry for shown in seen for entry in shown)
    if not uses:
        return {}
    place = {
        entry: SHOWN + 1 + i for i, entry in enumerate(sorted(uses, key=lambda entry: (-uses[entry], entry))[:MOST])
    }
    rows = _rows(outcomes, seen, place)
    sd = np.concatenate([[COMMON], np.full(BUCKETS, DRIFT), [INJECTED], np.full(len(place), OWN)])
    sd[:SHOWN] = 1e-6 if paired else sd[:SHOWN]
    gains = np.array([one.reward - one.prior for one in outcomes])
    mean, covariance = _fit(rows, gains, [one.sample_id for one in outcomes], sd)
    width, found = NormalDist().inv_cdf(0.5 + level / 2), {}
    for entry, count in sorted(uses.items()):
        uplift, variance = mean[SHOWN], covariance[SHOWN, SHOWN] + OWN**2
        if entry in place:
            j = place[entry]
            uplift = mean[SHOWN] + mean[j]
            variance = covariance[SHOWN, SHOWN] + covariance[j, j] + 2 * covariance[SHOWN, j]
        half = width * float(np.sqrt(variance))
        found[entry] = Effect(float(uplift), float(uplift) - half, float(uplift) + half, count)
    return found


Row = tuple[np.ndarray, np.ndarray]
"""Columns that are not zero, and their values."""


def _rows(outcomes: Sequence[Outcome], seen: Sequence[Mapping[str, float]], place: Mapping[str, int]) -> list[Row]:
    """Columns: mean, BUCKETS, injected, entries."""
    steps, rows = [one.step for one in outcomes], []
    first, length = min(steps), max(steps) - min(steps) + 1
    for one, shown in zip(outcomes, seen, strict=True):
        columns, values = [0, 1 + (one.step - first) * BUCKETS // length], [1.0, 1.0]
        if shown:
            columns.append(SHOWN)
            values.append(max(shown.values()))
            columns += [place[entry] for entry in shown if entry in place]
            values += [share for entry, share in shown.items() if entry in place]
        rows.append((np.array(columns), np.array(values)))
    return rows


def _fit(rows: Sequence[Row], gains: np.ndarray, questions: Sequence[str], sd: np.ndarray) -> tuple[np.ndarray, ...]:
    """Posterior mean [P] and covariance [P, P]; each question has an error of its own beside the groups' noise."""
    groups: dict[str, list[int]] = {}
    for i, question in enumerate(questions):
        groups.setdefault(question, []).append(i)
    plain, cross = np.zeros((len(sd), len(sd))), np.zeros(len(sd))
    for (columns, values), gain in zip(rows, gains, strict=True):
        plain[np.ix_(columns, columns)] += np.outer(values, values)
        cross[columns] += values * gain
    noise, shared = GUESSED, 0.0
    mean, covariance = np.zeros(len(sd)), np.diag(sd**2)
    for _ in range(PASSES):
        normal, right = (plain.copy(), cross.copy()) if shared else (plain, cross)
        for members in groups.values() if shared else ():
            # the inverse of noise * I + shared * 11' takes this much of the product of the sums away
            weight = shared / (noise + len(members) * shared)
            columns, values = _sum([rows[i] for i in members])
            normal[np.ix_(columns, columns)] -= weight * np.outer(values, values)
            right[columns] -= weight * values * gains[members].sum()
        # columns in units of their prior, so that the matrix is well conditioned whatever was never seen
        scaled = normal * np.outer(sd, sd) / noise + np.eye(len(sd))
        covariance = np.linalg.inv(scaled) * np.outer(sd, sd)
        mean = covariance @ right / noise
        left = gains - np.array([values @ mean[columns] for columns, values in rows])
        spent = len(sd) - float(np.sum(np.diag(covariance) / sd**2))
        noise, shared = _variances(left, groups, spent)
    return mean, covariance


def _sum(rows: Sequence[Row]) -> Row:
    """Of sparse rows."""
    columns, place = np.unique(np.concatenate([columns for columns, _ in rows]), return_inverse=True)
    return columns, np.bincount(place, np.concatenate([values for _, values in rows]))


def _variances(left: np.ndarray, groups: Mapping[str, Sequence[int]], spent: float) -> tuple[float, float]:
    """Of a group's noise, and of what the groups of a question have in common, from residuals [N]."""
    total = (float(left @ left) + WEIGHT * GUESSED) / (max(len(left) - spent, 0.0) + WEIGHT)
    pairs = sum(len(members) * (len(members) - 1) for members in groups.values())
    products = sum(float(left[members].sum() ** 2 - left[members] @ left[members]) for members in groups.values())
    shared = min(max(products / (pairs + WEIGHT), 0.0), 0.9 * total)
    return total - shared, shared


class Forecast:
    """A number for each question, from what was measured on some."""

    def __init__(self, vectors: np.ndarray, values: np.ndarray, variances: np.ndarray) -> None:
        """[N, D] unit rows, and [N] measured values with their variances; N at least 1."""
        self.vectors, self.values, self.variances = vectors, values, variances
        spread = float(np.sum((values - values.mean()) ** 2) - variances.sum())
        self.between = max((spread + WEIGHT * GUESSED) / (len(values) - 1 + WEIGHT), 1e-3)
        precision = 1 / (variances + self.between)
        self.middle, self.unsure = float(precision @ values / precision.sum()), float(1 / precision.sum())
        some = np.unique(np.linspace(0, len(values) - 1, FITTED).astype(int))
        distances = 1 - vectors[some] @ vectors[some].T
        typical = max(float(np.median(distances)), 1e-6)
        choices = [(typical * reach, share) for reach in REACHES for share in OWN_SHARES]
        self.reach, self.alone = max(choices, key=lambda choice: self._likelihood(distances, some, *choice))

    def __call__(self, keys: np.ndarray, own: Sequence[int | None]) -> tuple[np.ndarray, np.ndarray]:
        """[Q] expected values and standard errors for questions [Q, D]; `own`: which row is the question itself."""
        distances = 1 - keys @ self.vectors.T
        weights = _nearest(np.exp(-distances / self.reach)) / (self.variances + self.alone * self.between)
        weights[~keys.any(axis=1)] = 0
        for i, row in enumerate(own):
            if row is not None:
                weights[i, row] = 1 / self.variances[row]
        return self._shrunk(weights, np.arange(len(self.values)))

    def _shrunk(self, weights: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        precision = weights.sum(axis=1) + 1 / self.between
        share = 1 / self.between / precision
        mean = weights @ self.values[rows] / precision + share * self.middle
        return mean, np.sqrt(1 / precision + share**2 * self.unsure)

    def _likelihood(self, distances: np.ndarray, some: np.ndarray, reach: float, alone: float) -> float:
        """Log of what each measured value has, given the others."""
        weights = np.exp(-distances / reach)
        np.fill_diagonal(weights, 0)
        noise = self.variances[some] + alone * self.between
        mean, error = self._shrunk(_nearest(weights) / noise, some)
        variance = error**2 + noise
        return float(-np.sum(np.log(variance) + (self.values[some] - mean) ** 2 / variance))


class Outlook:
    """Which questions are better off with experience, as far as a table of questions [N] with vectors [N, D] tells."""

    def __init__(self, asked: Sequence[Asked], vectors: np.ndarray) -> None:
        self.place = {(one.id, one.question): i for i, one in enumerate(asked)}
        off = [i for i, one in enumerate(asked) if one.off_count]
        both = [i for i in off if asked[i].on_count]
        mean = np.array([[one.off_reward, one.on_reward] for one in asked]).reshape(-1, 2)
        errors = np.array([[noise(one.off_reward, one.off_count), noise(one.on_reward, one.on_count)] for one in asked])
        self.reward = (off, Forecast(vectors[off], mean[off, 0], errors[off, 0])) if off else None
        gains, noises = mean[:, 1] - mean[:, 0], errors.reshape(-1, 2).sum(axis=1)
        self.uplift = (both, Forecast(vectors[both], gains[both], noises[both])) if both else None

    def wants(
        self,
        keys: np.ndarray,
        names: Sequence[tuple[str, str]],
        max_success: float,
        min_uplift: float | None,
    ) -> list[bool]:
        """Per question ([Q, D] vectors, (id, words) names) whether to show it experience; with an empty table, yes."""
        wanted = np.ones(len(names), bool)
        if self.reward and max_success < 1:
            wanted &= self._forecast(self.reward, keys, names) <= max_success
        if self.uplift and min_uplift is not None:
            wanted &= self._forecast(self.uplift, keys, names) >= min_uplift
        return wanted.tolist()

    def _forecast(
        self, known: tuple[list[int], Forecast], keys: np.ndarray, names: Sequence[tuple[str, str]]
    ) -> np.ndarray:
        rows = {row: i for i, row in enumerate(known[0])}
        return known[1](keys, [rows.get(self.place.get(name, -1)) for name in names])[0]


def noise(reward: float, count: int) -> float:
    """Variance of a mean of `count` rewards in [0, 1], of which one more in the middle is assumed; inf of none."""
    mean = (min(max(reward, 0.0), 1.0) * count + 0.5) / (count + 1)
    return mean * (1 - mean) / count if count else np.inf


def _nearest(weights: np.ndarray) -> np.ndarray:
    """The NEAREST largest of each row, 0 for the others."""
    if weights.shape[1] <= NEAREST:
        return weights
    least = np.partition(weights, -NEAREST, axis=1)[:, -NEAREST:].min(axis=1, keepdims=True)
    return np.where(weights >= least, weights, 0)
