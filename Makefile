# make demo: the small world, trained on this machine. make test, make check: what CI runs. make chaos: 50 kills in and
# around checkpoint writes.
# Each installs what is missing into .venv first.
PYTHON ?= python3.11
BIN := .venv/bin
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1

.PHONY: demo test check chaos clean

.venv/installed: requirements.txt requirements-dev.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

demo: .venv/installed
	rm -rf outputs/demo
	$(BIN)/python launch.py train output_dir=outputs/demo $(ARGS)

test: .venv/installed
	$(BIN)/python -m pytest -q -n 2 --dist worksteal $(ARGS)

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

chaos: .venv/installed
	$(BIN)/python -m tests.chaos --kills 50 $(ARGS)

clean:
	rm -rf .venv outputs
