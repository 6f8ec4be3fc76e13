# The only way commands are run. `make run` and `make test` need python3 >= 3.11 and make, nothing else.
PYTHON ?= python3
VENV := $(or $(VIRTUAL_ENV),$(UV_PROJECT_ENVIRONMENT),.venv)
BIN := $(VENV)/bin

.PHONY: run test explore test-all integration servers twin-nightly check e2e-claude fmt lint types arch schema lock lock-check bench load sim sim-12m docs e2e-clients clean

run: $(VENV)/.ready
	@$(BIN)/tidegate serve

test: $(VENV)/.ready
	$(BIN)/python -m pytest -n auto --dist worksteal

# The same tests over generated examples that no run has seen; `make test` draws the same each time.
explore: $(VENV)/.ready
	$(BIN)/python -m pytest -n auto --dist worksteal --hypothesis-profile=explore

# Most of it is waiting, so four at a time fill two cores; the files in the order of tests/conftest.py.
integration: $(VENV)/.ready servers
	$(BIN)/python -m pytest tests/integration tests/acceptance -m "not clients" -n 4 --dist loadfile --no-loadscope-reorder

# Redis beside the Valkey of the development environment, where this machine lets us install it.
servers: $(VENV)/.ready
	@$(BIN)/python deploy/servers.py

# The Lua twin against the Python core, a million random steps on every server: about an hour.
twin-nightly: $(VENV)/.ready servers
	$(BIN)/python -m tests.integration.fleet.twin --steps 1000000

test-all: $(VENV)/.ready
	$(BIN)/python -m pytest tests -m "not clients"

# Real agent programs, installed from the package registries outside the checkout.
e2e-clients: $(VENV)/.ready
	$(BIN)/python -m pytest tests/acceptance -m clients

# Claude Code alone, one turn: about 20 s with its installation.
e2e-claude: $(VENV)/.ready
	$(BIN)/python -m pytest tests/acceptance -m clients -k "turn and claude"

check: fmt-check lint types arch schema-check docs-check lock-check

fmt: $(VENV)/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix -q . || true

.PHONY: fmt-check schema-check docs-check
fmt-check: $(VENV)/.ready
	$(BIN)/ruff format --check .

lint: $(VENV)/.ready
	$(BIN)/ruff check .

types: $(VENV)/.ready
	$(BIN)/mypy

arch: $(VENV)/.ready
	$(BIN)/lint-imports

schema: $(VENV)/.ready
	$(BIN)/tidegate schema > gateway/policy/schema.json

schema-check: $(VENV)/.ready
	$(BIN)/tidegate schema | diff -u gateway/policy/schema.json -

docs: $(VENV)/.ready
	$(BIN)/python deploy/docs.py

docs-check: $(VENV)/.ready
	$(BIN)/python deploy/docs.py --check

lock: $(VENV)/.ready
	$(BIN)/python deploy/lock.py

lock-check: $(VENV)/.ready
	$(BIN)/python deploy/lock.py --check

bench: $(VENV)/.ready
	$(BIN)/python -m loadtests.hotpath --json
	$(BIN)/python -m loadtests.streams --json

# The comparison of admission strategies in virtual time, from fixed seeds: about 30 s.
sim: $(VENV)/.ready
	$(BIN)/tidegate simulate scenarios/table-*.yaml --jobs 2

# Twelve million calls; half an hour on two cores. What came of it last: docs/simulation.md.
sim-12m: $(VENV)/.ready
	$(BIN)/tidegate simulate scenarios/long-*.yaml --seed 11 --seed 12 --seed 13 --jobs 2 --json

load: $(VENV)/.ready
	@mkdir -p build
	$(BIN)/locust -f loadtests/locustfile.py,loadtests/shapes.py --headless --only-summary --html build/load-report.html

clean:
	rm -rf .venv build dist

$(VENV)/.ready: deploy/bootstrap.py pyproject.toml uv.lock requirements/dev.txt requirements/source.txt requirements/worker.txt
	@$(PYTHON) deploy/bootstrap.py $(VENV)
	@touch $@
