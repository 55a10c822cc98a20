# Everything runs inside .venv; nothing else on the machine is touched. Each stamp installs what its targets need, on top
# of the stamp before it: .venv/demo (to build and to serve), .venv/bench (what is compared and drawn), .venv/dev (tests).
# .venv/rivals is for `make bench` alone: llama.cpp is compiled for this processor, which takes ten minutes.

PYTHON ?= python3.11
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --constraint constraints.txt
# The two distributions own the same import name. The one for GPUs is ten times as large, and useful with a GPU only.
ORT := $(if $(wildcard /proc/driver/nvidia/version),ort-gpu,ort)
OTHER_ORT := $(if $(filter ort,$(ORT)),onnxruntime-gpu,onnxruntime)
# TensorRT itself needs a GPU and gigabytes. Its bindings are small, and enough to check our calls against both majors.
TENSORRT_BINDINGS := 10.14.1.48.post1 11.4.0.106

.PHONY: install demo-install demo bench faults floors fuzz mishaps study plan pair retrofit retrofit-tasks real gpu gpu-code load triton clients corpus figures test test-slice test-all coverage check docs api dist pythons site notebooks clean

install: .venv/dev build/types/mod_models

# mypy and the site read the sources of `models/` under the name that they are installed with.
build/types/mod_models:
	mkdir -p $(@D) && ln -sfn ../../models $@

demo-install: .venv/demo

.venv/demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip uninstall -qqq --yes $(OTHER_ORT)
	$(PIP) --editable ".[build,convert,$(ORT),tensorrt-rtx]"
	touch $@

.venv/bench: .venv/demo
	$(PIP) --editable ".[bench]"
	touch $@

# A program that cannot be installed is a row with the reason.
.venv/rivals: .venv/bench
	$(PIP) --editable ".[rivals]"
	CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" $(PIP) --no-binary llama-cpp-python llama-cpp-python \
		|| echo "llama.cpp cannot be compiled here; the benchmark says so in its tables"
	touch $@

.venv/dev: .venv/bench
	$(PIP) --editable ".[dev,site]"
	for version in $(TENSORRT_BINDINGS); do \
		$(BIN)/pip install --quiet --no-deps --target .venv/trt-api/$$version tensorrt-cu13-bindings==$$version || exit 1; \
	done
	touch $@

demo: .venv/demo
	$(BIN)/mod-export demo --out build/demo

# `make bench ARGS="--help"`; with a trained model: ARGS="--text-model build/smollm2 --text english.txt".
bench: .venv/rivals
	$(BIN)/python -m benchmarks.rivals.run $(ARGS)

study: .venv/bench
	$(BIN)/python -m benchmarks.study.run

# What `mod-export plan` predicts, next to what is measured here. Half an hour. `make plan ARGS="--help"`.
plan: install
	$(BIN)/python -m benchmarks.plan.run $(ARGS)

# A dense and a routed model from scratch, near the end of their training: hours. `make pair ARGS="--help"`.
pair: install
	$(BIN)/python -m benchmarks.pair.run $(ARGS)

# Needs a dense checkpoint, which `mod-export convert` writes, and downloads nothing. `make retrofit ARGS="--help"`.
retrofit: .venv/bench
	$(BIN)/python -m benchmarks.retrofit.run $(ARGS)

# Tasks of lm-eval, asked of the models that `make retrofit` trained here; lm-eval downloads their questions.
retrofit-tasks: install .venv/clients/installed
	PYTHONPATH=.:build/types .venv/clients/bin/python -m benchmarks.retrofit.tasks $(ARGS)

# Everything that a machine with an NVIDIA GPU can show, in runs of eight minutes, each of which continues the last.
gpu: .venv/demo
	$(BIN)/python -m benchmarks.gpu.run $(ARGS)

# What `make gpu` runs, compiled without a GPU, for a PyTorch without CUDA. An hour, and it goes on where it was stopped.
# `make gpu-code ARGS="--help"`. Triton and ONNX Runtime for GPUs have an environment of their own.
.venv/gpu-code/installed: .venv/dev
	$(PYTHON) -m venv .venv/gpu-code
	.venv/gpu-code/bin/pip install --quiet --constraint constraints.txt --editable ".[build,ort-gpu,tensorrt-rtx]" "triton==3.7.1"
	touch $@

gpu-code: install .venv/gpu-code/installed
	.venv/gpu-code/bin/python -m benchmarks.gpu_code.run $(ARGS)

# A trained model in a GGUF file next to transformers; downloads nothing. `make real MODEL=FILE.gguf TEXT=english.txt`.
real: install
	$(BIN)/pytest tests/real --real-model "$(MODEL)" $(if $(TEXT),--real-text "$(TEXT)")

# The pictures of the README, from what `make demo` has built. Run it on a quiet machine, after a demo.
figures: install
	PYTHONPATH=tests/mod_export $(BIN)/python -m benchmarks.figures.run

# Locust pins another HTTP library than Triton's client, so it has an environment of its own.
.venv/load/installed: .venv/dev
	$(PYTHON) -m venv .venv/load
	.venv/load/bin/pip install --quiet "locust>=2.40"
	touch $@

# A server under load, overload, clients that leave, and kill -9. Half an hour; `make load ARGS="--help"`.
load: install .venv/load/installed
	$(BIN)/python -m benchmarks.load.run $(ARGS)

# A real Triton Inference Server, of PyPI, with the Python backend only. It needs an older numpy.
.venv/triton/installed: .venv/dev
	$(PYTHON) -m venv .venv/triton
	.venv/triton/bin/pip install --quiet "nvidia-pytriton==0.7.0" "numpy<2" --editable ".[ort,generate]"
	touch $@

triton: install .venv/triton/installed
	$(BIN)/pytest tests/triton -m triton

# lm-eval, litellm and LangChain's client against a server; lm-eval's figures next to those of transformers. Ten minutes.
.venv/clients/installed: .venv/dev
	$(PYTHON) -m venv .venv/clients
	.venv/clients/bin/pip install --quiet --constraint constraints.txt "langchain-openai>=1" "litellm>=1.80" "lm-eval[api,hf]>=0.4.9"
	touch $@

clients: install .venv/clients/installed
	$(BIN)/pytest tests/clients -m clients

# Model classes of PyPI packages, routed, through every target that needs no GPU; writes docs/corpus.md. An hour or two, and it
# goes on where it was stopped. `make corpus ARGS="--help"`.
corpus: install
	$(BIN)/python -m benchmarks.corpus.run $(ARGS)

faults: install
	PYTHONPATH=tests/mod_export:tests/mod_export/graph $(BIN)/python -m benchmarks.faults.rates

# Kills, full disks, failing renames and jumping clocks at random moments, and a check of what is left. An hour.
# `make mishaps ARGS="--help"`.
mishaps: install
	$(BIN)/python -m benchmarks.mishaps.run $(ARGS)

# Readers of untrusted bytes, guided by the branches that they take. `make fuzz ARGS="--help"`.
fuzz: install
	$(BIN)/python -m benchmarks.fuzz.run $(ARGS)

floors: install
	$(BIN)/python -m benchmarks.floors.run

# Every Python that is found here: the fast tests where PyTorch can be installed, else what a server does.
pythons: install
	$(BIN)/python -m benchmarks.pythons.run $(ARGS)

# The hundreds of processes that tests start need not compile the sources again.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/pytest --numprocesses 2 --dist worksteal
COMMIT := $$(git rev-parse HEAD)

# Everything that matters once.
test: install
	$(PYTEST) -m "not slow"

# About 5 minutes of the slow tests, others with every commit.
test-slice: install
	$(PYTEST) -m slow --slice --commit $(COMMIT)

# Everything; of the tests that are marked `drawn` a third, another one with every commit.
test-all: install
	$(PYTEST) --commit $(COMMIT)

# What the fast tests cover. Measuring it takes two thirds longer than the tests alone.
coverage: install
	$(PYTEST) -m "not slow" --cov --cov-report=
	$(BIN)/coverage report --fail-under=90

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Pages that are generated from the code; tests compare them with it.
docs: install
	$(BIN)/python -m mod_export.rows.docs docs
	$(BIN)/mod-export config explain > docs/configuration.md
	$(BIN)/python -m mod_export.cli.docs > docs/cli.md

# The public Python API of this release, which later states are compared with.
api: install
	PYTHONPATH=tests/mod_export $(BIN)/python -m api_stubs

# Wheel, source distribution, hashes, and what a server installs: built twice from the last commit, in an environment of
# its own.
.venv/release/installed: constraints.txt
	$(PYTHON) -m venv .venv/release
	.venv/release/bin/pip install --quiet --constraint constraints.txt build cyclonedx-bom twine
	touch $@

dist: .venv/release/installed
	.venv/release/bin/python -m benchmarks.release.run $(ARGS)

# The documents as a site in build/site; a broken link or anchor, or a page outside the navigation, is an error.
site: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# Executes the notebooks of the site, which then shows their outputs. Five minutes.
notebooks: install
	mkdir -p build/notebooks && cp docs/notebooks/*.ipynb build/notebooks
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/jupyter execute --inplace build/notebooks/*.ipynb

clean:
	rm -rf build .venv
