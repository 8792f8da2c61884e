# psqlmessages: what a developer calls. `make` alone lists it.

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# The first of these that is there; another one: make run PYTHON=/path/to/python
PYTHON ?= $(or $(shell command -v python3.11 || command -v python3),python3)
ARGS ?=

BIN := .venv/bin
PIP_OPTIONS := -qq --disable-pip-version-check --no-input
PIP := $(BIN)/python -m pip install $(PIP_OPTIONS)
# Packing Spark without compressing it takes half as long.
WHEEL_OF_SPARK := $(BIN)/python -m pip wheel $(PIP_OPTIONS) --no-deps --use-pep517 \
	--config-settings=--build-option=--compression=stored $(shell grep -o '^pyspark==[0-9.]*' requirements.txt)
PYTEST := $(BIN)/python -m pytest
DEBIAN_15 := /usr/lib/postgresql/15/bin

# One process of pytest more than cores, as tests also wait; each has a PostgreSQL of its own.
PROCESSES ?= $(shell expr $$(nproc) + 1)
SIDE_BY_SIDE := -n $(PROCESSES) --dist loadfile
TESTS_OF_SQL := tests/sql tests/streams tests/queues tests/contract \
	tests/reliability/test_prying.py tests/reliability/test_printing.py
# Run tests of the SQL with the PostgreSQL in a folder.
define TEST_ON
	bin="$(1)"; \
	if [ -x "$$bin/postgres" ]; then POSTGRES_BIN="$$bin" $(PYTEST) $(SIDE_BY_SIDE) $(TESTS_OF_SQL) $(2) $(ARGS); \
	else echo "Left out, as there is no PostgreSQL in $$bin (Debian 12: apt-get install postgresql-15)"; fi
endef

# An environment names its folder in its own files: a copied or moved one is made anew.
ifneq ($(file < .venv/made),$(CURDIR))
.PHONY: .venv/made
endif

.PHONY: help
help:  ## print this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

.PHONY: run
run: .venv/run  ## run the example on http://127.0.0.1:8000/ (or PORT=...): PostgreSQL, the demo, the pages
	@exec $(BIN)/python -m project.serve

.PHONY: pipeline
pipeline: .venv/pipeline  ## count the example's live traffic with Spark, until Ctrl-C: beside `make run`
	@exec $(BIN)/python -m project.pipeline $(ARGS)

.PHONY: test
test: .venv/test  ## run the tests on the embedded PostgreSQL (ARGS="tests/sql -k rules")
	@$(PYTEST) $(SIDE_BY_SIDE) $(ARGS)

.PHONY: test-versions
test-versions: .venv/test  ## run some tests of the SQL on PostgreSQL 16, and on Debian's 15 where it is installed
	@$(call TEST_ON,$$($(BIN)/python -m project.postgres binaries 16),-m "versions and not nightly")
	@$(call TEST_ON,$(DEBIAN_15),-m "versions and not nightly")

.PHONY: test-all
test-all: .venv/test  ## run everything in full size, on all versions of PostgreSQL, over an hour: every night
	@$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target PROCESSES=2 nightly-tests nightly-faults nightly-versions

# Two lanes: faults mostly wait, tests mostly work.
.PHONY: nightly-tests nightly-faults nightly-versions
nightly-tests:
	@$(PYTEST) $(SIDE_BY_SIDE) -m "nightly or not nightly" -o timeout=900 --ignore=tests/reliability

nightly-faults:
	@$(MAKE) --no-print-directory --keep-going reliability soak mutation

nightly-versions:
	@$(call TEST_ON,$$($(BIN)/python -m project.postgres binaries 16),-m "nightly or not nightly")
	@$(call TEST_ON,$(DEBIAN_15),-m "nightly or not nightly")

.PHONY: matrix
matrix: .venv/test  ## test the Django part on each Python that is installed with each Django (ARGS="-s 'tests(3.13-6.1)'")
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-input nox==2026.10.20
	@$(BIN)/nox $(ARGS)

.PHONY: mutation
mutation: .venv/test  ## remove security checks from the SQL, one at a time, and check that a test fails for each
	@$(BIN)/python -m tests.mutation $(ARGS)

.PHONY: reliability
reliability: .venv/test  ## cause each fault in full size and count what is lost, half an hour: docs/explanation/reliability.md
	@$(BIN)/python -m tests.reliability $(ARGS)

.PHONY: soak
soak: .venv/test  ## run everything at the same time for half an hour, and report what grew or was lost (ARGS="--minutes 5")
	@$(BIN)/python -m tests.reliability.soak $(ARGS)

.PHONY: lint
lint: .venv/test  ## check style, format, types, imports and that no migration is missing
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python -m tools.style
	@$(BIN)/python manage.py makemigrations --check --dry-run

.PHONY: audit
audit: .venv/test .venv/audited  ## check all installed packages for known vulnerabilities, with pip-audit
	@$(BIN)/python -m tools.audit

.PHONY: digest
digest: .venv/run  ## after a change of psqlmessages/sql: write the digest of the scripts into the migration
	@$(BIN)/python -m tools.digest

.PHONY: check-deploy
check-deploy: .venv/deploy  ## check the Dockerfile, compose.yaml, the Kubernetes manifests and the workflows
	@.venv/deploy/bin/hadolint Dockerfile
	@.venv/deploy/bin/check-jsonschema --quiet --builtin-schema vendor.compose-spec compose.yaml
	@.venv/deploy/bin/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@.venv/deploy/bin/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/idea.yml
	@.venv/deploy/bin/check-jsonschema --quiet --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	@.venv/deploy/bin/check-jsonschema --quiet --builtin-schema vendor.readthedocs .readthedocs.yaml
	@.venv/deploy/bin/kubernetes-validate --strict --quiet deploy/kubernetes/*.yaml

.PHONY: docs
docs: .venv/docs  ## build the documentation into build/docs; a warning or a dead link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.PHONY: docs-serve
docs-serve: .venv/docs  ## show the documentation on http://127.0.0.1:8001/, and again after each change
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8001

.PHONY: screenshots
screenshots: .venv/test  ## take the pictures under docs/images of the pages, with Chromium
	@$(BIN)/python -m tools.screenshots

.PHONY: bench
bench: .venv/bench .venv/pipeline  ## compare all with other systems, up to 45 minutes (ARGS="sends queues" for some)
	@$(BIN)/python -m benchmarks $(ARGS)

.PHONY: bench-quick
bench-quick: .venv/bench  ## measure a few ratios and report those below benchmarks/expected.json, two minutes
	@$(BIN)/python -m benchmarks --quick $(ARGS)

.PHONY: stop
stop:  ## stop the embedded PostgreSQL
	@[ ! -x $(BIN)/python ] || $(BIN)/python -m project.postgres stop

.PHONY: clean
clean:  ## remove the environment, the embedded PostgreSQL with all its data, and caches
	@[ ! -e .venv/run ] || $(BIN)/python -m project.postgres remove
	@rm -rf .venv .postgres .pipeline .secret_key .admin_password .static build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "Python 3.11 or newer is needed, and $(PYTHON) is not that: install it, or name it: make PYTHON=..."; exit 1; } >&2
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	{ echo "$(PYTHON) cannot make virtual environments: on Debian, apt-get install python3-venv"; exit 1; } >&2
	@$(PYTHON) -m venv --clear .venv
	@printf '%s' '$(CURDIR)' > $@

.venv/run: .venv/made requirements-run.txt pyproject.toml
	@echo 'Installing the requirements (the first time this takes about half a minute) ...'
	@$(PIP) -r requirements-run.txt
	@$(PIP) --no-deps -e .
	@touch $@

.venv/pipeline: .venv/run requirements.txt
	@echo 'Installing Spark (490 MB: the first time this takes about a minute) ...'
	@$(PIP) -r requirements.txt
	@touch $@

.venv/bench: .venv/run benchmarks/requirements.txt
	@echo 'Installing what the benchmarks compare with ...'
	@$(PIP) -r benchmarks/requirements.txt
	@touch $@

.venv/docs: .venv/run requirements-docs.txt
	@$(PIP) -r requirements-docs.txt
	@touch $@

# The first time, Spark is packed beside the installation of all else.
.venv/test: .venv/made requirements-run.txt requirements.txt requirements-docs.txt requirements-test.txt pyproject.toml
	@echo 'Installing the requirements and Spark (490 MB: the first time this takes about a minute) ...'
	@[ -e .venv/pipeline ] || $(WHEEL_OF_SPARK) --wheel-dir .venv/wheels & \
	$(PIP) -r requirements-run.txt -r requirements-docs.txt -r requirements-test.txt && wait $$! && \
	$(PIP) --find-links .venv/wheels -r requirements.txt && $(PIP) --no-deps -e . && rm -rf .venv/wheels
	@touch .venv/run .venv/pipeline $@

.venv/deploy: .venv/made requirements-deploy.txt
	@$(PYTHON) -m venv --clear $@
	@$@/bin/python -m pip install -qq --disable-pip-version-check --no-input -r requirements-deploy.txt

# Where the package index has none, `make audit` says that nothing is known.
.venv/audited: .venv/made
	@$(PYTHON) -m venv --clear .venv/pip-audit
	@.venv/pip-audit/bin/python -m pip install -qq --disable-pip-version-check --no-input pip-audit==2.10.1 && touch $@ || true
