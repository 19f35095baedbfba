"""Evaluate a model on questions, with experience and without.

    python evaluate.py configs/lab.yaml out=runs/eval model.path=runs/grpo/policy hek.path=runs/hek/hek
    python evaluate.py --help

Writes evaluation.json, evaluation.md, a line per attempt in samples_<arm>.jsonl, and report.html. An arm is HEK on or off
(on only where hek.path is set), greedy or sampled (eval.greedy, eval.samples_per_question).
"""

import sys
