#!/usr/bin/env bash
# The device bench: seven minutes on one GPU with torch 2.11 or newer, or two on a CPU at a small size.
#   bench/gpu.sh            # CUDA where there is one; table on the screen, gpu.json in $OUT (runs/bench)
#   bench/gpu.sh --cpu      # the same blocks, small
# PYTHON names the interpreter. Other trainers' heads take part if runs/bench/packages holds them
# (requirements-bench.txt); the lender of a machine may have to be told to carry that folder along.
set -u
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
export OUT="${OUT:-runs/bench}" PYTHONPATH="${PYTHONPATH:-}:runs/bench/packages"
mkdir -p "$OUT"
exec "$PYTHON" bench/gpu.py "$@"
