# `make help` lists the targets. Every one makes the environment that it needs.
VENV := .venv
VENV_LATEST := .venv-vllm-latest
PYTEST_ARGS ?=
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full test-vllm-latest lint format clean distclean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 20

setup: ## make .venv from requirements/cpu.lock, and bring a Chromium for the browser tests
	@scripts/setup_env.sh $(VENV) requirements/cpu.lock
	@scripts/setup_browser.sh $(VENV)

demo: setup ## show the cache at work on a small random model (CPU, about 5 minutes)
	@$(VENV)/bin/python -m examples.demo

test: setup ## run the tests that are not slow; those that need a GPU skip themselves without one
	$(VENV)/bin/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-full: setup ## run every test; those that need a GPU skip themselves without one
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

test-vllm-latest: ## run the engine layer's tests against the newest supported vLLM
	@scripts/setup_env.sh $(VENV_LATEST) requirements/vllm-latest.lock
	$(VENV_LATEST)/bin/python -m pytest tests/engine $(PYTEST_ARGS)

lint: setup ## check style, imports and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: setup ## rewrite the sources as `make lint` wants them
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean: ## remove caches, build outputs and the demo's folder
	rm -rf .demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -print | xargs rm -rf

distclean: clean ## remove the environments too
	rm -rf $(VENV) $(VENV_LATEST)
