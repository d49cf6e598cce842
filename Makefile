PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev
MARKS ?= not slow
RUN = $(VENV)/bin/python
PYTEST = $(RUN) -m pytest -n 2 --dist worksteal --junitxml=out/tests.xml

.PHONY: help demo test test-all lint format clean

help:            ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1 \t/p' $(MAKEFILE_LIST)

demo: $(VENV)/installed         ## train a network on digits under three policies and compare them
	$(RUN) examples/digits.py

test: $(VENV)/installed         ## what a change needs to know: five minutes on two cores
	$(PYTEST) -m "$(MARKS)" $(ARGS)

test-all: $(VENV)/installed     ## everything, what trains for long too, and the lines it covers
	$(PYTEST) --cov --cov-report=term $(ARGS)

lint: $(VENV)/installed         ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/installed       ## what ruff can mend by itself
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

clean:           ## remove what make made
	rm -rf $(VENV) .cache out

$(VENV)/installed: pyproject.toml
	@echo "Installing into $(VENV) (a minute or two, once) …"
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[$(EXTRAS)]"
	@touch $@
