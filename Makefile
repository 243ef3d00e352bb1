# What this project can do from a fresh checkout; only Python 3.11+ is needed (PYTHON=... to choose one).
#   make demo    train the example on this machine     make check   linter, formatter, types
#   make test    the whole test suite                  make bench   time one training step
#   make venv    only make and fill .venv              make bench-ckpt   time saving and loading
#   make soak    long campaigns, full matrices         make fuzz    hostile checkpoints, by the million
#   make clean   remove .venv and caches           make test-kernels   tests under other CPU kernels
#   make test-ray    the example for Ray, on a local Ray      make test-restarts    runs that are killed and go on
#   make pages   write docs/files.md, errors.md and findings.md from the source
#   make bench-offload   time steps with state in host memory and in files
#   make docs    build the site into build/site        make test-site   open it in Chromium

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
PINS := $(VENV)/constraints.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c $(PINS)

# Empty files that say what is installed; they go stale when the dependencies change.
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
DOCS_STAMP := $(VENV)/.installed-docs

.PHONY: help venv demo test test-kernels test-ray test-restarts check format pages docs test-site bench bench-ckpt bench-offload soak fuzz clean
.DELETE_ON_ERROR:

help:
	@sed -n '2,10s/^# *//p' Makefile

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "shardwise needs Python 3.11+")'
	$(PYTHON) -m venv $(VENV)

# With TORCH=... another torch beside the same versions of all else.
$(PINS): constraints.txt | $(BIN)/python
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $@

$(RUN_STAMP): pyproject.toml $(PINS)
	$(PIP) torch==$(TORCH)
	$(PIP) -e .
	@touch $@

$(DEV_STAMP): $(RUN_STAMP) labs/pyproject.toml
	$(PIP) -e '.[test,dev]' -e ./labs
	@touch $@

$(DOCS_STAMP): $(RUN_STAMP)
	$(PIP) -e '.[docs]'
	@touch $@

venv: $(RUN_STAMP)

demo: $(RUN_STAMP)
	$(BIN)/shardwise train examples/demo.yaml

# Many ranks import each test module: the first one keeps what it has compiled, whatever is set.
test: $(DEV_STAMP)
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n 2 --dist loadfile

# Tolerances must hold on any processor: kernels other than this one's best are taken on purpose.
test-kernels: $(DEV_STAMP)
	@$(BIN)/python tests/kernels.py

# Ray is large, and slow to start: it is installed for the test of its example alone.
test-ray: $(DEV_STAMP)
	$(PIP) -e '.[ray]'
	@$(BIN)/python -m pytest tests/test_ray.py

# Twenty of the trials of `make soak CAMPAIGN=restart`.
test-restarts: $(DEV_STAMP)
	@$(BIN)/python tests/campaigns/restart.py --trials 20

check: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

pages: $(RUN_STAMP)
	$(BIN)/python docs/generate_pages.py

# A warning of the builder, such as a link to a page that is not there, is an error. All pages are
# written anew, since each has the navigation of all.
docs: $(DOCS_STAMP)
	rm -rf build/site build/site-cache
	$(BIN)/sphinx-build -c docs/site -d build/site-cache -q -W --keep-going . build/site
	@echo build/site/index.html

test-site: docs $(DEV_STAMP)
	@which chromium chromium-browser google-chrome google-chrome-stable | grep -q . || \
	  { echo 'make test-site needs a browser: apt-get install chromium'; exit 1; }
	$(BIN)/python -m pytest -n 2 tests/campaigns/site_pages.py

bench: $(RUN_STAMP)
	$(BIN)/python benchmarks/step_time.py

bench-ckpt: $(RUN_STAMP)
	$(BIN)/python benchmarks/checkpoint.py

bench-offload: $(RUN_STAMP)
	$(BIN)/python benchmarks/offload.py
	$(BIN)/python benchmarks/disk.py
	$(BIN)/python benchmarks/optimizer_step.py

# Long campaigns: `make soak CAMPAIGN=kill TRIALS=10000 SEED=7`; a failing trial prints what replays it.
# `restart` kills training runs that restart by themselves; in `elastic` nodes join and leave one; in `nodes` a
# preflight looks at nodes with networks of their own (as root). `matrices` runs every cell of the largest
# tables of which the suite has covering samples. `mutants` puts small defects into the source, which
# the suite must find. `optimizers` steps every optimizer class of fifteen libraries, and writes the table
# in docs/how-to/optimizers.md. `operations` calls torch's functions on sharded tensors.
CAMPAIGN ?= crashes errors damage reshard kill power matrices
TRIALS ?= 200
SEED ?= 0

soak: $(DEV_STAMP)
	for campaign in $(CAMPAIGN); do \
	  case $$campaign in \
	    matrices) $(BIN)/python -m pytest tests/campaigns/matrices.py ;; \
	    restart|elastic|nodes|mutants|optimizers|operations) \
	      $(BIN)/python tests/campaigns/$$campaign.py --trials $(TRIALS) --seed $(SEED) ;; \
	    *) $(BIN)/python tests/campaigns/soak.py $$campaign --trials $(TRIALS) --seed $(SEED) ;; \
	  esac || exit 1; \
	done

fuzz: $(DEV_STAMP)
	$(BIN)/python tests/campaigns/fuzz.py --trials 1000000 --seed $(SEED)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
