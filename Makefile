# The commands of this repository: demo, test, lint, bench. They need python3 >= 3.11 and make.
# `make demo` installs the base packages; the other targets install what they need into the same .venv.

CANDIDATES = python3 python3.14 python3.13 python3.12 python3.11
AT_LEAST_3_11 = import sys; sys.exit(sys.version_info < (3, 11))
PYTHON = $(shell for python in $(CANDIDATES); do \
	if $$python -c '$(AT_LEAST_3_11)' >/dev/null 2>&1; then echo $$python; break; fi; done)
BIN = .venv/bin
WORKERS = $(shell $(BIN)/python -c 'import os; print(2 if (os.cpu_count() or 1) > 1 else 0)')

.PHONY: setup demo test lint bench clean

setup: .venv/.test .venv/.benchmarks

# Each stamp file records that .venv holds one group of packages for this pyproject.toml.
.venv/.base: pyproject.toml .ci/setup.py
	@python="$(PYTHON)"; $${python:-false} -c '$(AT_LEAST_3_11)' || { \
		echo "irc needs Python 3.11 or newer, and none of these is: $(CANDIDATES)." >&2; \
		echo "Install one (python.org, or your system's packages) and type make again," >&2; \
		echo "or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; }; \
	$$python .ci/setup.py base
	@touch $@

.venv/.test: .venv/.base
	@$(BIN)/python .ci/setup.py test
	@touch $@

.venv/.benchmarks: .venv/.base
	@$(BIN)/python .ci/setup.py benchmarks
	@touch $@

demo: .venv/.base
	$(BIN)/irc compile examples/llama.py --checkpoint examples/tiny_llama --mesh tp=2 -o build/tiny_llama
	$(BIN)/irc show build/tiny_llama --scope model.layers.0 | tail -n 17
	$(BIN)/irc generate build/tiny_llama --prompt "The Python" --max-new-tokens 60
	@echo "next: source .venv/bin/activate, which makes irc a command"

test: .venv/.test
	$(BIN)/python -m pytest -q -n $(WORKERS)

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

bench: setup
	$(BIN)/python -m benchmarks.ir
	$(BIN)/python -m benchmarks.compile
	$(BIN)/python -m benchmarks.run_cpu

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
