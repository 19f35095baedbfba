"""A small finished demo: the real stages at a size that takes a minute or two."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SMALL = [
    "seed=1",
    "warm_start.steps=300",
    "warm_start.rows_per_step=32",
    "world.train_per_family=12",
    "world.dev_per_family=1",
    "world.test_per_family=3",
    "overrides=[train.steps=3, train.dev_every=2, build.questions=0, eval.samples_per_question=2]",
]


@pytest.fixture(scope="session")
def lab(tmp_path_factory) -> Path:
    """Folder of the demo; run as a user would, from another folder than the checkout."""
    place = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "hiexp.lab", "demo", "out=runs/lab", *SMALL]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(place)}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    logs = "\n".join(f"{log}:\n{log.read_text()[-1500:]}" for log in (place / "runs/lab/logs").glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    return place / "runs/lab"


@pytest.fixture(scope="session")
def settings(lab) -> list[str]:
    """Command line of the three scripts for the demo's world and policy."""
    world = lab / "world"
    return [
        str(ROOT / "configs/lab.yaml"),
        f"model.path={lab / 'policy'}",
        *(f"data.{split}={world / split}.jsonl" for split in ("train", "dev", "test")),
        f"encoder.path={world / 'encoder.json'}",
        f"search.corpus=[{world / 'corpus.jsonl'}]",
    ]
