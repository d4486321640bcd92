# make demo and make test need Python 3.11 and make, nothing else: the first target that runs makes .venv.
#   PYTHON     the interpreter .venv is made from            (default: python3.11, else python3)
#   GPU_PYTHON the interpreter of the *-gpu targets, with its own torch for the GPU (default: python3)
#   PIP_FLAGS  passed to pip install, e.g. an index that holds CPU builds of torch
#   WORKERS    processes that share the tests                (default: 2)
#   ARGS       passed on to the command that a target runs: make demo ARGS="--steps 50"

PYTHON ?= $(shell command -v python3.11 || command -v python3)
GPU_PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
INSTALLED := .venv/.installed

# The interpreter of Triton is chosen when Triton is imported, so those tests have a process of their own.
TRITON_TESTS = $(shell find tests -name 'test_triton_*.py' -not -path 'tests/gpu/*')
# Every operation, mode, dtype and shape against fp64, with Triton forced.
FORCED_TESTS = $(addprefix tests/ops/test_,parity.py dropout.py sinkhorn.py projection.py)
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS)

.PHONY: help venv lint format test cutile demo test-gpu bench-gpu clean

help:
	@echo "make demo       train the demo and write report/index.html"
	@echo "make test       every test that needs no GPU"
	@echo "make cutile     compile the cuTile kernels for every architecture, without a GPU"
	@echo "make lint       ruff and mypy          make format    ruff's formatter"
	@echo "make test-gpu   tests on this GPU      make bench-gpu  timings on this GPU"
	@echo "make clean      remove caches and outputs (keeps .venv)"

venv: $(INSTALLED)

$(INSTALLED): requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# All three runs happen, each prints its closing line, and the target fails if any does.
test: venv
	@status=0; \
	$(PYTEST) --ignore=tests/gpu --ignore-glob='*/test_triton_*.py' $(ARGS) || status=1; \
	echo "Triton kernels in the interpreter:"; \
	TRITON_INTERPRET=1 $(PYTEST) $(TRITON_TESTS) $(ARGS) || status=1; \
	echo "Operations on Triton in the interpreter:"; \
	TRITON_INTERPRET=1 MHC_FORCE_BACKEND=triton $(PYTEST) $(FORCED_TESTS) $(ARGS) || status=1; \
	exit $$status

# A minute or two: the compiler runs once for each kernel and architecture.
cutile: venv
	$(BIN)/python -m fused_mhc.cli compile-cutile $(ARGS)

# Threads that wait asleep cost little on an idle machine, and keep a busy one from standing still.
demo: venv
	OMP_WAIT_POLICY=passive $(BIN)/fused-mhc demo $(ARGS)

# The device's own tests, then the suite of the operations with Triton forced.
test-gpu:
	@status=0; \
	PYTHONPATH=. $(GPU_PYTHON) -m pytest -q tests/gpu $(ARGS) || status=1; \
	MHC_FORCE_BACKEND=triton PYTHONPATH=. $(GPU_PYTHON) -m pytest -q tests/ops tests/test_faults.py \
	    --ignore-glob='*/test_triton_*.py' $(ARGS) || status=1; \
	exit $$status

bench-gpu:
	PYTHONPATH=. $(GPU_PYTHON) -m benchmarks $(ARGS)

clean:
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist report
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
