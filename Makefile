.DEFAULT_GOAL := help
.PHONY: help quickstart test test-all test-other test-peers setup lint test-learning docs lock clean
ARGS ?=
# Some images ask Python to keep no compiled modules: then each of the hundreds of processes of the tests compiles torch anew.
export PYTHONDONTWRITEBYTECODE :=

help: ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

quickstart: ## set up, then demonstrations, SFT, evaluation, RL and the report (ARGS="seed=1" passes overrides on)
	@scripts/setup.sh quickstart
	@.venv/bin/vla-rl quickstart $(ARGS)

setup: ## set up .venv with everything
	@scripts/setup.sh full

lint: setup ## ruff, the import contracts, mypy, and what may be two things
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/lint-imports
	@.venv/bin/mypy
	@.venv/bin/python scripts/sizes.py

test: lint ## set up, lint, then the fast tests (ARGS="-k name" passes options on)
	@scripts/tests.sh fast $(ARGS)

test-all: lint ## those, then the slow ones: whole runs, sessions of Ray and of robots, LIBERO
	@scripts/tests.sh all $(ARGS)

test-other: setup ## the tests that touch lerobot, under the other Python of 3.11 and 3.12 (ARGS="-k name")
	@scripts/other_python.sh $(ARGS)

test-peers: setup ## the wire with openpi's own client and server and vla-eval at its other end (ARGS="-k name")
	@scripts/peers.sh $(ARGS)

test-learning: setup ## the whole quickstart for three seeds, a quarter of an hour; fails where one ends below 80 % success
	@.venv/bin/vla-rl study run benchmarks/studies/learning.yaml --least 0.8 $(ARGS)

docs: ## write the generated pages (reference, results), check the docs, build the site into build/site
	@scripts/setup.sh docs
	@.venv/bin/python scripts/reference.py
	@.venv/bin/python scripts/results.py
	@.venv/bin/python -m pytest -q tests/test_reference.py tests/test_results.py tests/test_docs.py
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet --strict
	@echo "build/site/index.html"

lock: setup ## resolve constraints.txt again (ARGS="--upgrade" moves the versions)
	@scripts/lock.sh $(ARGS)

clean: ## remove .venv, caches and build outputs (not outputs/)
	@rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
