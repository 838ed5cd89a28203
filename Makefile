# make sweep   set up .venv from the lock, then run the embedded sweep
# make test    the same .venv with the test tools, then pytest; make test-slow: the few tests of many processes;
#              make test-strategies: every combination of strategies, and their saves (20 to 30 minutes)
# make check   linter, layer bans, types
# make install the .venv alone
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# -c: every version comes from the lock, whatever pyproject.toml would allow.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock

.PHONY: sweep test test-slow test-strategies check install install-test schema clean

sweep: install
	$(BIN)/python sweeps/run.py space=lora_small

test: install-test
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup $(ARGS)

test-slow: install-test
	$(BIN)/python -m pytest -m slow --ignore tests/strategies $(ARGS)

test-strategies: install-test
	$(BIN)/python -m pytest -m "slow or not slow" tests/strategies $(ARGS)

check: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(VENV)/.installed

install-test: $(VENV)/.installed-test

schema: install
	$(BIN)/python -c "from sweeps import space; print(space.schema(), end='')" > search_spaces/schema.json

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version) if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python requirements.lock pyproject.toml
	@echo "installing into $(VENV) (a few minutes the first time) ..."
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP_INSTALL) --editable '.[test,dev]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
