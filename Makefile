# make run    the main job: four hospitals, six algorithms, one table and one figure
# make test   all tests        make test-fast   the tests without the slow ones
# make lint   ruff and pyright
# make lock   pin the dependencies again (needs uv)
# Each makes the environment it needs in .venv; nothing but Python 3.11 or newer is needed.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
JOBS   ?= 2

.PHONY: run test test-fast lint format lock clean

run: $(VENV)/.run
	$(BIN)/fedexact run

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-fast: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'fedexact needs Python 3.11 or newer; call: make PYTHON=/path/to/python3.11'; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: requirements/run.txt pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/run.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	@touch $@

lock:
	uv pip compile --universal --python-version 3.11 --fork-strategy fewest --generate-hashes \
	  --no-annotate --quiet pyproject.toml --extra dev -o requirements/dev.txt
	uv pip compile --universal --python-version 3.11 --fork-strategy fewest --generate-hashes \
	  --no-annotate --quiet pyproject.toml -c requirements/dev.txt -o requirements/run.txt

clean:
	rm -rf $(VENV) results build dist .pytest_cache .ruff_cache .hypothesis
