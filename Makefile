# Everything runs inside .venv, which `make install` creates; nothing else on the machine is touched.

PYTHON ?= python3.11
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: install demo bench test check clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[build,ort-gpu,tensorrt-rtx,dev]"
	touch $(STAMP)

demo: install
	$(BIN)/mod-export demo --out build/demo

bench: demo
	$(BIN)/mod-export bench build/demo-timed

test: install
	$(BIN)/pytest --numprocesses 2 --dist worksteal --cov --cov-report= 
	$(BIN)/coverage report --fail-under=90

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p build/types && ln -sfn ../../models build/types/mod_models
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf build .venv
