"""QA scoring derived again from its written description, by other means; imports nothing of
hiexp.

No regular expression, no Counter, no substring operator: characters are walked, multisets are matched by
crossing off, covers are found by comparing windows.
"""

PUNCTUATION = set("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


def tokens_of(text):
    """Normalised tokens: lower case, ASCII punctuation deleted, then the words a, an, the removed."""
    kept = [c for c in text.lower() if c not in PUNCTUATION]
    spaced, word = [], []
    for char in [*kept, " "]:
        if char.isalnum():
            word.append(char)
            continue
        spaced.append(" " if "".join(word) in ("a", "an", "the") else "".join(word))
        spaced.append(char)
        word = []
    return "".join(spaced).split()


def em(prediction, gold):
    return 1.0 if tokens_of(prediction) == tokens_of(gold) else 0.0


def f1(prediction, gold, closed=("yes", "no", "noanswer")):
    left, right = tokens_of(prediction), tokens_of(gold)
    if left != right and any(" ".join(side) in closed for side in (left, right)):
        return 0.0
    remaining, hits = list(right), 0
    for token in left:
        if token in remaining:
            remaining.remove(token)
            hits += 1
    # harmonic mean of hits/len(left) and hits/len(right), without forming either
    return 2.0 * hits / (len(left) + len(right)) if hits else 0.0


def f1_musique(prediction, gold):
    return f1(prediction, gold, closed=())


def cem(prediction, gold):
    text, wanted = list(" ".join(tokens_of(prediction))), list(" ".join(tokens_of(gold)))
    return _has_window(text, wanted)


def cem_bound(prediction, gold):
    return _has_window(tokens_of(prediction), tokens_of(gold))


def cem_tokens(prediction, gold):
    return 1.0 if all(token in tokens_of(prediction) for token in tokens_of(gold)) else 0.0


def best(metric, prediction, golds):
    """Maximum over golds; nothing scores 0, and a gold without tokens demands the same text."""
    if not prediction.split():
        return 0.0
    scores = []
    for gold in golds:
        if tokens_of(gold):
            scores.append(metric(prediction, gold))
        else:
            scores.append(1.0 if prediction.strip().lower() == gold.strip().lower() else 0.0)
    return sorted(scores)[-1]


def hotpotqa_official(prediction, gold):
    """(EM, F1) as the HotpotQA and 2WikiMultihopQA scripts define them for one gold answer: a yes, no or noanswer on
    either side that is not on the other leaves F1 at 0, and so do sides without a common token."""
    left, right = " ".join(tokens_of(prediction)), " ".join(tokens_of(gold))
    equal = 1.0 if left == right else 0.0
    for closed in ("yes", "no", "noanswer"):
        if closed in (left, right) and not equal:
            return equal, 0.0
    return equal, _f1_by_crossing_off(left.split(), right.split())


def musique_official(prediction, golds):
    """(EM, F1) as MuSiQue's script defines them: the best over all golds, each on its own; two texts without tokens
    are equal, one without is wrong, and yes and no are words like any other."""
    ems, f1s = [], []
    for gold in golds:
        left, right = tokens_of(prediction), tokens_of(gold)
        ems.append(1.0 if left == right else 0.0)
        f1s.append(_f1_by_crossing_off(left, right) if left and right else ems[-1])
    return max(ems), max(f1s)


def _f1_by_crossing_off(left, right):
    counts = {}
    for token in right:
        counts[token] = counts.get(token, 0) + 1
    hits = 0
    for token in left:
        if counts.get(token, 0) > 0:
            counts[token] -= 1
            hits += 1
    if not hits:
        return 0.0
    precision, recall = hits / len(left), hits / len(right)
    return (2 * precision * recall) / (precision + recall)


def _has_window(items, wanted):
    width = len(wanted)
    return 1.0 if any(items[i : i + width] == wanted for i in range(len(items) - width + 1)) else 0.0


REFERENCE = {
    "em": em,
    "f1": f1,
    "f1_musique": f1_musique,
    "cem": cem,
    "cem_bound": cem_bound,
    "cem_tokens": cem_tokens,
}
