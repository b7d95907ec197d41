# The environment is made by the first target that needs it, and again when pyproject.toml or constraints.txt changes: Shoal
# and what it imports for the demo and the documentation, everything else (tools, peers, optional parts) for the rest.
# Another interpreter: make PYTHON=python3.12 test. PyTorch without GPU libraries, a much smaller download:
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.shoal-installed
ALL := $(VENV)/.shoal-all-installed
SOURCES := pyproject.toml constraints.txt setup.py $(wildcard src/shoal/comm/shm/core/*.[ch] src/shoal/codec/core/*.c)
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

OLDEST := .venv-oldest

.PHONY: help demo quick test slow again test-oldest gpu check docs reference bench bench-wire bench-link bench-plan bench-zero bench-memory bench-pipeline bench-noise bench-check verify-matrix sanitize stress clean

help:
	@echo "make demo    trains a small GPT on this machine's Python library (about 2 minutes) and writes a report"
	@echo "make test    runs the tests; installs what they need besides (200 packages, once)"
	@echo "make slow    runs the tests of a second and a half and more each, which \`make test\` leaves to CI"
	@echo "make again   runs what failed in the last run once more, alone, as CI does"
	@echo "make quick   runs the tests of the rooms below the others, in a minute and a half, at each change"
	@echo "make test-oldest   runs the fast part of the tests on the oldest PyTorch that Shoal admits, in an environment of its own"
	@echo "make gpu     on a machine with a GPU: tests and measurements there, in four minutes; docs/benchmarks/gpu.json"
	@echo "make check   runs lint, format, types and the floors"
	@echo "make docs    builds the documentation site in out/docs"
	@echo "make reference   writes the reference of the run file again, after a change of a table"
	@echo "make bench   measures a training step beside PyTorch's DDP; JSON in out/"
	@echo "make bench-wire   shared memory beside Gloo: collectives (and a picture), plain programs, a step (about an hour)"
	@echo "make bench-zero, bench-plan   ZeRO beside DDP, plans beside published tables"
	@echo "make bench-link   slow links that this machine plays itself, beside their closed forms (root and iproute2)"
	@echo "make bench-memory, bench-pipeline   bytes a rank keeps beside closed forms; bubbles, activations in flight, balance"
	@echo "make bench-check   steps in which ranks compare their collectives, beside steps in which they do not"
	@echo "make verify-matrix   proves 150 layouts against one process (half an hour on two cores); JSON in out/"
	@echo "make stress   runs what takes long for its numbers: 64 ranks, a thousand groups"
	@echo "make sanitize   runs the C core under the address and thread sanitizers"
	@echo "make clean   removes caches, out/ and $(OLDEST)/; keeps runs/ and $(VENV)/"

demo: $(READY)
	$(BIN)/shoal train recipes/stdlib-gpt.toml
	@$(BIN)/shoal plan recipes/stdlib-gpt.toml --elsewhere runs/stdlib-gpt
	@echo "Open runs/stdlib-gpt/report.html in a browser."

# A change is tried on the rooms of which nearly every other is made, in a minute and a half; `make test` before it is handed on.
QUICK := tests/config tests/runfile tests/topology tests/schedules tests/collectives tests/maths tests/cost tests/codec \
	tests/gradients tests/optim tests/own_loop tests/test_structure.py tests/cli/test_verify_scripts.py

quick: $(ALL)
	$(BIN)/python -m pytest -n 2 --dist loadfile -q $(QUICK)

test: $(ALL)
	$(BIN)/python -m pytest -n 2 --dist loadfile

slow: $(ALL)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow

# What failed in the last run, at most three tests, once more and alone (decision 100). What passes now is listed: a fault to find.
again: $(ALL)
	test $$(grep -c ': true' .pytest_cache/v/cache/lastfailed) -le 3
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none -m "slow or not slow" -rA

test-oldest: $(OLDEST)/.shoal-installed
	$(OLDEST)/bin/python -m pytest -n 2 --dist loadfile $(FAST)

# Rooms whose tests touch what PyTorch changes from one version to the next, and take a few minutes together.
FAST := tests/engine tests/gradients tests/maths tests/memory tests/models tests/observe tests/optim \
	tests/assembly/test_profiling.py tests/verification/test_recipes.py tests/assembly/test_run_gradients.py

# It installs nothing, so any Python with PyTorch and CUDA will do: make gpu PYTHON=python3.12
gpu:
	@sh benchmarks/gpu.sh $(PYTHON)

check: $(ALL)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports

reference: $(READY)
	$(BIN)/python -m shoal.runfile.load docs/reference/run-file.md
	$(BIN)/python -m shoal.runfile.combinations docs/reference/combinations.md

docs: $(READY)
	$(INSTALL) -q -e '.[docs]'
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs out/docs
	@echo "Open out/docs/index.html in a browser."

bench: $(READY)
	@mkdir -p out
	$(BIN)/shoal bench step --json > out/bench-step.json.part
	@mv out/bench-step.json.part out/bench-step.json
	@$(BIN)/python -m json.tool out/bench-step.json
	@echo "Written to out/bench-step.json"

bench-wire: $(ALL)
	@mkdir -p out
	$(BIN)/python -m benchmarks.wire --plot out/bench-wire.part.png --json > out/bench-wire.json.part
	@mv out/bench-wire.part.png out/bench-wire.png
	@mv out/bench-wire.json.part out/bench-wire.json
	$(BIN)/python -m benchmarks.programs --json > out/bench-programs.json.part
	@mv out/bench-programs.json.part out/bench-programs.json
	$(BIN)/shoal bench step --processes 2 --json > out/bench-step.json.part
	@mv out/bench-step.json.part out/bench-step.json
	$(BIN)/shoal bench step --processes 4 --json > out/bench-step-4.json.part
	@mv out/bench-step-4.json.part out/bench-step-4.json
	@for name in wire programs step step-4; do $(BIN)/python -m json.tool out/bench-$$name.json || exit; done
	@echo "Written to out/bench-wire.json and .png, out/bench-programs.json, out/bench-step.json and out/bench-step-4.json"

bench-link: $(ALL)
	@mkdir -p out
	$(BIN)/shoal bench link --json > out/bench-link.json.part
	@mv out/bench-link.json.part out/bench-link.json
	@$(BIN)/python -m json.tool out/bench-link.json
	@echo "Written to out/bench-link.json"

bench-zero bench-memory bench-pipeline bench-noise bench-check: bench-%: $(ALL)
	@mkdir -p out
	$(BIN)/python -m benchmarks.$* --json > out/bench-$*.json.part
	@mv out/bench-$*.json.part out/bench-$*.json
	@$(BIN)/python -m json.tool out/bench-$*.json
	@echo "Written to out/bench-$*.json"

bench-plan: $(ALL)
	@mkdir -p out
	$(BIN)/python -m benchmarks.plan tests/planner/published --markdown out/bench-plan.md --json > out/bench-plan.json
	$(BIN)/python -m benchmarks.simulate tests/planner/published --json > out/bench-simulate.json
	@echo "Written to out/bench-plan.json, out/bench-plan.md and out/bench-simulate.json"

verify-matrix: $(ALL)
	@mkdir -p out
	$(BIN)/python -m tests.verification.matrix --number 150 --json out/verify-matrix.json

stress: $(ALL)
	$(BIN)/python -m pytest -m stress

sanitize: $(ALL)
	sh tests/comm/shm/sanitize/run.sh 40

clean:
	rm -rf $(OLDEST) out build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is touched last, so that an install that was cut short is done again. Of a thousand modules of PyTorch a run imports
# some: those are compiled when they are imported.
$(READY): $(SOURCES) | $(BIN)/activate
	$(INSTALL) --no-compile -e .
	@touch $@

$(ALL): $(SOURCES) | $(BIN)/activate
	$(INSTALL) -e '.[vision,dev]'
	@touch $(READY) $@

# `venv` writes `activate` after it has put pip in: an environment that was cut short has none, and is made again.
$(BIN)/activate:
	@command -v $(PYTHON) >/dev/null || { \
		echo "There is no $(PYTHON) here; Shoal needs Python 3.11 or newer: install it, or name it: make PYTHON=python3.11" >&2; exit 3; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$$($(PYTHON) -V 2>&1) is too old; Shoal needs 3.11 or newer: install one, and name it: make PYTHON=python3.11" >&2; exit 3; }
	@$(PYTHON) -m venv --clear $(VENV) || { \
		echo "$(PYTHON) could not make an environment; on Debian and Ubuntu its module is a package: sudo apt install python3-venv" >&2; exit 3; }

# constraints.txt pins the PyTorch that the suite runs on; this environment has the lower bound of pyproject.toml.
$(OLDEST)/.shoal-installed: pyproject.toml constraints.txt setup.py
	@$(PYTHON) -m venv --clear $(OLDEST)
	@oldest=$$(sed -n 's/.*"torch>=\([0-9.]*\).*/\1/p' pyproject.toml); \
	grep -v -E '^torch(vision)?==' constraints.txt > $(OLDEST)/constraints.txt; \
	$(OLDEST)/bin/python -m pip install --disable-pip-version-check -c $(OLDEST)/constraints.txt "torch==$$oldest.*" -e '.[vision,dev]'
	@touch $@
