# Two commands do everything on a fresh machine: `make search` and `make test`.
VENV   := .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
MODEL  := Qwen/Qwen3.5-35B-A3B-FP8
TINY   := build/models/tiny-qwen3

.PHONY: search search-cpu test test-quick faults check names docs clean

## The main job on the embedded default: simulated engine, SQLite, no GPU.
search: $(VENV)/installed
	$(BIN)/vopt search --goal throughput --model $(MODEL) --simulate h200

## The same job on the real vLLM for the CPU, with a tiny model built here; a few minutes.
search-cpu: $(VENV)/installed-test $(TINY)/config.json
	$(BIN)/vopt search --goal throughput --model $(TINY) --set load_format=dummy --set enforce_eager=true \
	  --set max_model_len=4096 --set gpu_memory_utilization=0.2 --vary max_num_seqs=16,64,256 --vary max_num_batched_tokens=512,2048,8192 \
	  --concurrency 64 --trials 5 --window 3 --soak 5s --rounds 3 --no-serve

$(TINY)/config.json: | $(VENV)/installed-test
	$(BIN)/python tests/support/tiny_models.py build/models

## Everything: quick suite, browser, real vLLM on the CPU. Real processes and signals on a busy machine: what failed is run once more,
## alone, and what fails again is a failure. A test that needs its second run is named by the first, and is a fault to mend.
test: $(VENV)/installed-test
	$(BIN)/python -m pytest -q --durations=40 --durations-min=5 -m "not gpu and not long" || \
	  $(BIN)/python -m pytest -q -m "not gpu and not long" --last-failed --last-failed-no-failures none

## What to run while writing: two to three minutes on two cores.
test-quick: $(VENV)/installed-test
	$(BIN)/python -m pytest -q -n auto -m "not gpu and not vllm and not browser and not slow"

## Every fault, without and with a real engine; ends with the table of what became of each.
faults: $(VENV)/installed-test
	$(BIN)/python -m pytest -q -m "fault and not gpu"

check: $(VENV)/installed-test names
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict -p vopt
	PYTHONPATH=build/names $(BIN)/lint-imports --no-cache

## Folder X/ is imported as vopt.X: links for the tools that do not know the mapping.
names:
	@mkdir -p build/names/vopt
	@for folder in objectives search_spaces optimizer; do ln -sfn ../../../$$folder build/names/vopt/$$folder; done

docs: $(VENV)/installed
	$(BIN)/python docs/generate.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/installed-test: pyproject.toml optimizer/engine/cpu_build.py | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[cpu,gp,test]'
	$(BIN)/python -m vopt.optimizer.engine.cpu_build
	tests/support/install_browser.sh
	touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) build dist *.egg-info
