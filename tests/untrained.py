"""A command line for the scripts that runs in seconds: an untrained policy in a real world."""

import json
from pathlib import Path

from hiexp.checkpoint import save_policy
from hiexp.data import write_samples
from hiexp.encoder import TfidfEncoder
from hiexp.experience import Experience
from hiexp.hek import HEK
from hiexp.lab_policy import build_model, build_tokenizer
from hiexp.lab_world import build_world, questions


def untrained_lab(folder: Path) -> list[str]:
    """Settings for train.py, build_hek.py and evaluate.py, with a HEK of one pattern that fits everything."""
    world = build_world(0)
    for name, samples in questions(world, {"train": 1, "test": 1}, 0).items():
        write_samples(folder / f"{name}.jsonl", samples)
    lines = [json.dumps({"id": key, "title": d.title, "text": d.text}) + "\n" for key, d in world.passages()]
    (folder / "corpus.jsonl").write_text("".join(lines))
    tokenizer = build_tokenizer()
    save_policy(build_model(tokenizer, 0), tokenizer, folder / "model")
    encoder = TfidfEncoder.fit(["who is which the of was in"])
    encoder.save(folder / "encoder.json")
    HEK([Experience("E2-0", 2, "pattern", "who which", "label", qa_groups=(("x", "?"),))], encoder).save(folder / "hek")
    return [
        "configs/lab.yaml",
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'train.jsonl'}",
        f"data.test={folder / 'test.jsonl'}",
        f"encoder.path={folder / 'encoder.json'}",
        f"search.corpus=[{folder / 'corpus.jsonl'}]",
        f"hek.path={folder / 'hek'}",
        "hek.strategy_threshold=-1",
        "rollout.max_turn_tokens=8",
        "rollout.group_size=2",
        "train.prompts_per_step=6",
        "train.dev_every=0",
        "train.show_every=1",
    ]
