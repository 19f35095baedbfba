"""Makes run folders as evaluate.py leaves them, from numbers that a test chooses."""

import json
from pathlib import Path

from hiexp.evaluation import file_name
from hiexp.records import Attempt, Call, write_attempts

TRACE = (
    ("prompt", "Answer."),
    ("experience", "- E2: plan first"),
    ("policy", "<search> a </search>"),
    ("document", "A document."),
    ("experience", "- E1: check the year"),
    ("policy", "<answer> Paris </answer>"),
)


def attempt(place, scores, member=0, prefix="q", **changes):
    """An attempt at question `place`; `scores` by metric, in [0, 1]."""
    values = {
        "id": f"{prefix}{place}", "member": member, "family": "", "family_group": "", "prediction": "Paris",
        "answers": ("Paris", "City of Light"), "scores": scores, "status": "answered", "searches": 2,
        "answer_words": 1, "tokens": 900 + place, "policy_tokens": 60, "question": f"Question {place}?",
        "requests": 3, "prompt_tokens": 800,
        "calls": (Call(TRACE),),
    }  # fmt: skip
    return Attempt(**(values | changes))


def arm(label, benchmark, attempts, hek=False, method="agent", decoding="greedy", model="Qwen2.5-7B", **setting):
    """(name, about, attempts) for `write_run`."""
    name = f"{benchmark}.{method}.hek_{'on' if hek else 'off'}_{decoding}"
    about = {"benchmark": benchmark, "method": method, "hek": hek, "decoding": decoding, "label": label, "model": model}
    settings = {"model": model, "hek": "abc" if hek else "none", "corpus": "c0", "top_k": 5} | setting
    return name, about | {"setting": settings}, attempts


def write_run(folder, *arms):
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    about = {name: facts for name, facts, _ in arms}
    (path / "evaluation.json").write_text(json.dumps({"arms": about}), encoding="utf-8")
    for name, _, attempts in arms:
        write_attempts(path / f"samples_{file_name(name)}.jsonl", attempts)
    return path


def scored(rng, count, metrics=("em", "f1", "cem"), chance=0.5, members=1, prefix="q", **changes):
    """Attempts with random scores: 0 or 1, f1 between."""
    return [
        attempt(
            place,
            {m: float(rng.random()) if m == "f1" else float(rng.random() < chance) for m in metrics},
            member, prefix, **changes,
        )
        for place in range(count)
        for member in range(members)
    ]  # fmt: skip
