# The commands of the project. `make demo` and `make test` are all that a new user needs.
PYTHON ?= python3
PROMPT ?= Name the seas around Denmark.
BIN := .venv/bin
# Most tests wait for processes and clocks, so there are more of them at once than cores.
JOBS ?= 4

PEERS := .venv-bench

.PHONY: help venv demo test lint format hammer fuzz bench bench-check soak test-systemd install uninstall deb clean

help:
	@echo "make demo [PROMPT=...]  ask the bundled model one question through a throw-away lane"
	@echo "make test               run the tests"
	@echo "make lint               ruff check, ruff format --check, mypy --strict"
	@echo "make hammer [SECONDS=60] kill a busy lane at random and account for every job"
	@echo "make fuzz [EXAMPLES=10000] feed arbitrary answers to the lane"
	@echo "make bench [ROWS=1000000] measure the lane beside its peers, some minutes; make bench-check judges the ratios"
	@echo "make soak [SECONDS=600] let a lane live under everything at once, and see that it stays as it was"
	@echo "make test-systemd       run the tests that boot Debian machines; as root"
	@echo "make install [DESTDIR= PREFIX=/usr/local] put programs, units and pages there; make uninstall takes them away"
	@echo "make deb                build dist/brainlane_*_all.deb"
	@echo "make format             let ruff rewrite what it can"
	@echo "make venv               make .venv with everything that the above need"

venv: $(BIN)/.synced

# The stamp is newer than what it was made from, so a changed dependency is installed before the next command runs.
$(BIN)/.synced: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@$(BIN)/uv sync --quiet --python $(BIN)/python --extra local --inexact
	@touch $@

demo: venv
	@$(BIN)/brainctl demo "$(PROMPT)"

test: venv
	@$(BIN)/pytest -n $(JOBS) --dist worksteal

lint: venv
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: venv
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

SECONDS ?= 60
hammer: venv
	@$(BIN)/python -m tests.hammer --seconds $(SECONDS)

EXAMPLES ?= 10000
fuzz: venv
	@$(BIN)/python -m tests.fuzz --examples $(EXAMPLES)

# The peers have an environment of their own: none of them is needed for anything else.
$(PEERS)/.made: tests/bench/peers.txt | venv
	@$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(PEERS)
	@$(BIN)/uv pip install --quiet --python $(PEERS)/bin/python -r tests/bench/peers.txt
	@touch $@

ROWS ?= 1000000
bench: venv $(PEERS)/.made
	@$(BIN)/python -m tests.bench --rows $(ROWS) --peers-python $(PEERS)/bin/python

bench-check:
	@$(BIN)/python -m tests.bench --check dist/bench.json

soak: SECONDS = 600
soak: venv
	@$(BIN)/python -m tests.soak --seconds $(SECONDS)

# Part of `make test` too; here alone.
test-systemd: venv
	@$(BIN)/pytest -n $(JOBS) --dist worksteal tests/systemd

PREFIX ?= /usr/local
install:
	@$(PYTHON) packaging/install --prefix "$(PREFIX)" --destdir "$(DESTDIR)"

uninstall:
	@$(PYTHON) packaging/uninstall --prefix "$(PREFIX)" --destdir "$(DESTDIR)"

deb:
	@$(PYTHON) packaging/deb

clean:
	rm -rf .venv .venv-bench dist build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis uv.lock
