# Every target sets up the environment it needs: Python >= 3.11, make and git are enough.
# An environment is built anew when its lock file changes; `make clean` forgets them all.

# The interpreters that the environments are made with. Empty: look for one.
PYTHON ?= python3
PYTHON_OLDEST ?=
PYTHON_NEWEST ?=
# The number of pytest processes, and more arguments for pytest, such as -k mesh.
WORKERS ?= 2
# How long `make soak` and `make fuzz` take.
MINUTES ?= 10
PYTEST_ARGS ?=
# Arguments for benchmarks/run.py, such as --workload a,b --dir tmpfs --rounds 5.
BENCH_ARGS ?=

PY := .venv/bin/python
PYTEST = -m pytest -n $(WORKERS) $(PYTEST_ARGS)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Settings: PYTHON, PYTHON_OLDEST, PYTHON_NEWEST, WORKERS, PYTEST_ARGS, BENCH_ARGS, MINUTES"

.PHONY: test
test: .venv/.installed ## Run the tests with the locked dependencies
	$(PY) $(PYTEST)

.PHONY: test-oldest
test-oldest: .venv-oldest/.installed ## Run the tests with the oldest supported dependencies
	.venv-oldest/bin/python $(PYTEST)

.PHONY: test-newest
test-newest: .venv-newest/.installed ## Run the tests with the newest JAX, on Python >= 3.12
	.venv-newest/bin/python $(PYTEST)

.PHONY: faults
faults: .venv/.installed ## Attack everything at each operation and print a table: more than an hour
	$(PY) -m tests.faults --size full

.PHONY: faults-short
faults-short: .venv/.installed ## The same attacks at some operations: minutes
	$(PY) -m tests.faults --size short

.PHONY: soak
soak: .venv/.installed ## Random kills, rotation and loads for MINUTES
	$(PY) -m tests.faults --only soak --minutes $(MINUTES)

.PHONY: fuzz
fuzz: .venv/.installed ## Fuzz the parsers by coverage for MINUTES; `.venv/bin/pip install atheris` first
	$(PY) -m tests.faults.fuzz build/fuzz -max_total_time=$$((60 * $(MINUTES)))

.PHONY: demo
demo: .venv/.installed ## Run the training example
	$(PY) examples/train.py --demo

BENCH = .venv-bench/bin/python benchmarks/run.py --json build/bench/$(1).json --png build/bench/$(1).png

.PHONY: bench
bench: .venv-bench/.installed ## Measure beside other libraries and the limit of the machine: hours
	$(call BENCH,results) $(BENCH_ARGS)

.PHONY: bench-smoke
bench-smoke: .venv-bench/.installed ## Try the benchmarks on tiny states
	$(call BENCH,smoke) --scale 0.001 --rounds 1 --dir disk --workload b --systems all
	$(call BENCH,smoke) --scale 0.001 --rounds 1 --dir disk --append \
		--workload d-cols,planning,manifest --systems ours-sha256,limit-xxh3
	$(call BENCH,smoke) --scale 0.001 --rounds 1 --dir disk --append --workload async
	$(call BENCH,smoke) --scale 0.001 --rounds 1 --dir disk --append --workload processes

.PHONY: docs
docs: .venv/.installed ## Build the site of the documentation into build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

.PHONY: check
check: .venv/.installed ## Check format, lint, types and the directions of imports
	$(PY) -m ruff format --check
	$(PY) -m ruff check
	$(PY) -m mypy
	.venv/bin/lint-imports

.PHONY: format
format: .venv/.installed ## Format the code and apply the safe fixes
	$(PY) -m ruff format
	$(PY) -m ruff check --fix

# lock.txt is one lock for every Python. oldest.txt is the lower bounds of pyproject.toml made
# exact; the date keeps what the bounds do not name as old as they are. NEWER is what the bounds
# want newer than that date.
NEWER := $(foreach package,orbax-checkpoint safetensors tensorstore,\
	--exclude-newer-package $(package)=2026-11-01)
UV_COMPILE := .venv-lock/bin/uv --no-config pip compile pyproject.toml --universal \
	--python-version 3.11 --upgrade --custom-compile-command "make lock" --quiet

.PHONY: lock
lock: .venv-lock/.locked ## Resolve the dependencies again, into requirements/
	$(UV_COMPILE) --all-extras --output-file requirements/lock.txt
	$(UV_COMPILE) --extra test --extra examples --resolution lowest-direct \
		--exclude-newer 2025-11-01 $(NEWER) --output-file requirements/oldest.txt

.PHONY: clean
clean: ## Remove the environments, the builds and the caches
	rm -rf .venv .venv-oldest .venv-newest .venv-bench .venv-lock build dist
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- interpreters ---------------------------------------------------------------------------

# $(call find-python,LOW,HIGH): the first Python with 3.LOW <= version < 3.HIGH that starts.
# A name on the PATH may be a shim that does not, hence the trial; pyenv's own come last.
find-python = $(shell \
	for python in python3.14 python3.13 python3.12 python3.11 python3 \
		$$(ls -d "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.*/bin/python3 2>/dev/null | sort -rV); \
	do "$$python" -c "import sys; sys.exit(not (3, $(1)) <= sys.version_info < (3, $(2)))" \
		2>/dev/null && echo "$$python" && break; \
	done)

# NumPy 2.0.2 has no wheels for Python 3.13.
oldest-python = $(or $(PYTHON_OLDEST),$(call find-python,11,13))
newest-python = $(or $(PYTHON_NEWEST),$(call find-python,12,15))

.PHONY: oldest-python newest-python
oldest-python newest-python:
	@echo "$($@)"

# $(call require,PYTHON,LOW,SETTING): stop with a sentence unless PYTHON is at least 3.LOW.
define require
	@test -n "$(1)" || { echo "No Python >= 3.$(2) found that will do: set $(3)=..." >&2; exit 1; }
	@"$(1)" -c "import sys; sys.exit(sys.version_info < (3, $(2)))" || { \
		echo "'$(1)' is not a Python >= 3.$(2) ($$("$(1)" -V 2>&1)): set $(3)=..." >&2; exit 1; }
endef

# --- environments ---------------------------------------------------------------------------

# $(call install,PYTHON,LOCK): a fresh environment with exactly what LOCK says.
define install
	"$(1)" -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --no-deps --requirement $(2)
	@touch $@
endef

.venv/.locked: requirements/lock.txt
	$(call require,$(PYTHON),11,PYTHON)
	$(call install,$(PYTHON),$<)

.venv-oldest/.locked: requirements/oldest.txt
	$(call require,$(oldest-python),11,PYTHON_OLDEST)
	$(call install,$(oldest-python),$<)

.venv-newest/.locked: requirements/lock.txt
	$(call require,$(newest-python),12,PYTHON_NEWEST)
	$(call install,$(newest-python),$<)

.venv-bench/.locked: requirements/lock.txt
	$(call require,$(PYTHON),11,PYTHON)
	$(call install,$(PYTHON),$<)

.venv-lock/.locked:
	$(call require,$(PYTHON),11,PYTHON)
	"$(PYTHON)" -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet uv
	@touch $@

%/.installed: %/.locked pyproject.toml
	$(@D)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

.PRECIOUS: %/.locked
