PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev
MARKS ?= not slow and not further
DOCS_VENV ?= .venv-docs
RUN = $(VENV)/bin/python
PYTEST = $(RUN) -m pytest -n 2 --dist worksteal --junitxml=out/tests.xml

.PHONY: help demo test test-all lint format docs docs-serve clean

help:            ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1 \t/p' $(MAKEFILE_LIST)

demo: $(VENV)/installed         ## train a network on digits under three policies and compare them
	$(RUN) examples/digits.py

test: $(VENV)/installed         ## what a change needs to know: five to six minutes on two cores, half of it again
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

docs: $(DOCS_VENV)/installed    ## build the site into out/site
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build

docs-serve: $(DOCS_VENV)/installed  ## show the site on http://localhost:8000, and again as pages change
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs serve

clean:           ## remove what make made
	rm -rf $(VENV) $(DOCS_VENV) .cache out

$(VENV)/installed: pyproject.toml
	@echo "Installing into $(VENV) (a minute or two, once) …"
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[$(EXTRAS)]"
	@touch $@

# Only what builds the site, which reads the sources and needs no JAX.
$(DOCS_VENV)/installed: pyproject.toml
	@echo "Installing into $(DOCS_VENV) (seconds, once) …"
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -c "import tomllib; \
	  print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')" \
	  > $(DOCS_VENV)/requirements.txt
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $(DOCS_VENV)/requirements.txt
	@touch $@
