# SPDX-License-Identifier: Apache-2.0
# Every target sets up what it needs. `make help` lists them.

PYTHON ?= python3
VENV ?= .venv
PYNQ_PYTHON ?= $(PYTHON)
BIN := $(VENV)/bin
BUILD ?= build
JOBS ?= auto
# Once for all of the test processes and what they start, some of which write no bytecode.
COMPILE = @$(BIN)/python -m compileall -qq -j 0 sw_model host plugins tools
# pytest keeps as bytecode what it has rewritten of a test, for its other processes.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 \
	$(BIN)/pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder

# What `make bitstream` builds.
PRESET ?= smollm2-135m
MODE ?= int4
RULE ?= weight_sum
KERNELS ?= hls
PLATFORM ?= xilinx_u2_gen3x4_xdma_gc_2_202110_1
FREQUENCY ?= 300

# Who emulates the card of `make hw_emu`: vitis, own, or auto: Vitis where v++ is on PATH.
EMULATOR ?= auto

# What `make bench` measures: quick, goals, full or paper.
PLAN ?= goals

# Options of `make mutants`: --jobs 2, or --only and words in names of mutants.
MUTANTS ?=

# Options of `make frontier`: --steps 0 for the sweep alone, which a restart goes on with.
FRONTIER ?=

# Options of `make store`: --mixed-seconds 1200 for twenty minutes of mixed load, --part kills for a part alone.
STORE ?=

# Options of `make serve-bench`: --part streams for a part alone, --rounds 7 for more rounds.
SERVE ?=

# Options of `make slim`: by default all of the real model and the paper's shape and length with
# random weights, which takes hours; --contexts 0 --lengths 0 --texts 0 leave out the former.
SLIM ?= --shapes llama-3.1-8b:32768

# Options of `make evicpress`: --documents 60 --requests 300 --longest 8000 for more, in hours.
EVICPRESS ?=

# Options of `make study`: --parts modelled for what needs no model.
STUDY ?=

# How long `make fuzz` looks for what is read wrongly.
FUZZ_SECONDS ?= 600

QUESTION ?= Which statement makes the listed identifiers be interpreted as globals?

.DEFAULT_GOAL := help
.PHONY: help hosts vllm-load wheel vllm-store evicpress serve-test lm-eval-test browser-test serve-fuzz serve-bench serve-peers setup scorer pyxrt xrt cross model run test tests test-kernels test-bench test-fast lint format quality precision frontier pools store slim study query faults drive space prefill csim cocotb formal synth hw_emu bitstream pynq-env doctor clean beta projections peers bench traces mutants fuzz attack

help: ## List every target
	@awk -F ':.*## ' '/^[a-z_-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: pyxrt ## Make the virtual environment with the tested versions

pyxrt: $(VENV)/installed ## Build the module pyxrt where XRT has headers and no module of its own
	PYTHONPATH=tools $(BIN)/python tools/build_pyxrt.py

xrt: ## Install XRT and what the emulated card is built with, from Debian's packages
	sh tools/install_xrt.sh own "$(PYTHON)"

# One after the other: two of apt-get do not run at once.
cross: $(if $(CI),xrt) ## Install what compiles and emulates the NEON variant on another processor
	sh tools/install_packages.sh "the check of NEON" g++-aarch64-linux-gnu qemu-user-static

model: $(VENV)/installed ## Fetch the real model of the examples and tests (93 MB, once)
	$(BIN)/hillinfer fetch

run: model $(BUILD)/document.txt ## Answer a question over a long text with a quarter of its KV cache in DRAM
	$(BIN)/hillinfer generate --prompt-file $(BUILD)/document.txt --question "$(QUESTION)" \
		--max-new-tokens 96 --shadow int4 --dram-budget 25% --report $(BUILD)/reports/run.json

test: lint tests ## Check the code and run the test suite, all but long tests of kernels and benchmarks

# By itself, so that `make --jobs=2 test` checks types while tests run.
tests: model $(if $(CI),xrt cross pynq-env $(BUILD)/vllm-load-env/installed)
	$(COMPILE)
	$(PYTEST) -m "not kernels and not bench and not lm_eval and not browser"

test-kernels: model $(if $(CI),xrt pynq-env) ## Compile, simulate and prove kernels (an hour of two cores)
	$(PYTEST) -m kernels

test-bench: model ## Run benchmarks' whole commands with small models (three minutes)
	$(PYTEST) -m bench

test-fast: $(VENV)/installed ## Run the tests that need no real model
	$(COMPILE)
	$(PYTEST) -m "not model and not kernels and not bench and not lm_eval and not browser"

lint: $(VENV)/packages ## Check style, types and formatting
	$(BIN)/ruff check sw_model host plugins hw tests tools hatch_build.py
	$(BIN)/ruff format --check sw_model host plugins hw tests tools hatch_build.py
	$(BIN)/mypy
	$(BIN)/hadolint Containerfile

wheel: $(VENV)/installed ## Make a wheel for this family of processors in dist, and let auditwheel look at it
	rm -rf dist/*.whl
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		--wheel-dir dist .
	$(BIN)/python -m auditwheel show dist/*.whl

format: $(VENV)/installed ## Format all sources
	$(BIN)/ruff check --fix sw_model host plugins hw tests tools hatch_build.py
	$(BIN)/ruff format sw_model host plugins hw tests tools hatch_build.py

quality: model ## Compare selection rules and shadows with the full cache (a quarter of an hour)
	$(BIN)/hillinfer-bench quality --out $(BUILD)/reports/quality.json

precision: model ## Compare how many selected tokens are exact and how the others are coded (a quarter of an hour)
	$(BIN)/hillinfer-bench precision --out $(BUILD)/reports/precision.json

frontier: model ## Compare systems at equal quality: KL, bytes and times (an hour; FRONTIER=options)
	-$(BIN)/python tools/space.py --shape 1b --layers 4 --tokens 1048576 --steps 16 --alpha 0.02 \
		--dram-budget 2GiB --exact 0.02 --out $(BUILD)/reports/space-1m.json
	$(BIN)/hillinfer-bench frontier --out $(BUILD)/reports/frontier.json $(FRONTIER)

pools: model ## Replay selections of the real model with every pool policy (eight minutes), then codes beside rows
	$(BIN)/hillinfer-bench pools --out $(BUILD)/reports/pools.json
	$(BIN)/hillinfer-bench pools --last 48 --alpha 0.2 --exact 0.02 --dram-budget 28% \
		--dram-budget 30% --dram-budget 33% \
		--out $(BUILD)/reports/pools-codes.json

traces: $(VENV)/installed ## Replay traces of requests with every policy of the store (minutes)
	$(BIN)/hillinfer-bench traces --index-chunks 20000 --out $(BUILD)/reports/traces.json

store: model ## Measure the store: rates, first token, lookups, damage (half an hour; STORE=options)
	rm -f $(BUILD)/reports/store_peers.json
	-$(BIN)/python tools/stored_peers.py --out $(BUILD)/reports/store_peers.json --build $(BUILD)/peers
	$(BIN)/hillinfer-bench storing --out $(BUILD)/reports/store.json \
		--peers $(BUILD)/reports/store_peers.json $(STORE)

hosts: model ## Measure a router before two replicas, and model fleets (a quarter of an hour; HOSTS=options)
	$(BIN)/hillinfer-bench hosts --dir $(BUILD) --out $(BUILD)/reports/hosts.json $(HOSTS)

vllm-store: model ## Run vLLM over the store: restarts, replicas, a trace (installs vLLM; VLLM_STORE=--part ...)
	$(BIN)/python tools/vllm_store --out $(BUILD)/reports/vllm_store.json --build $(BUILD)/peers $(VLLM_STORE)

slim: model ## Measure reading in stages beside FLOPs, and which answers are left (SLIM=options)
	$(BIN)/hillinfer-bench slim --out $(BUILD)/reports/slim.json $(SLIM)

evicpress: model ## Play many documents in little memory to EvicPress' policy, rivals and ours (EVICPRESS=options)
	OMP_NUM_THREADS=1 $(BIN)/hillinfer-bench evicpress --out $(BUILD)/reports/evicpress.json $(EVICPRESS)

study: model ## Make the paper's tables: accuracy of all systems, latency on its machine (STUDY=options)
	OMP_NUM_THREADS=1 $(BIN)/hillinfer-bench study --out $(BUILD)/reports/study.json $(STUDY)

bench: model ## Measure decode beside rivals in one run (ten minutes; PLAN=quick, goals, full or paper)
	# A tool that fails leaves no older figures behind for the report.
	rm -f $(addprefix $(BUILD)/reports/,scorer.json drive.json beta.json)
	-$(BIN)/python tools/scorer_bench.py --out $(BUILD)/reports/scorer.json
	-OMP_NUM_THREADS=1 $(BIN)/python tools/drive_bench.py --out $(BUILD)/reports/drive.json \
		--drive $(BUILD)/drive
	$(if $(filter full,$(PLAN)),-OMP_NUM_THREADS=1 $(BIN)/python tools/beta_sweep.py \
		--out $(BUILD)/reports/beta.json)
	$(BIN)/hillinfer-bench decode --plan $(PLAN) --out $(BUILD)/reports/bench.json

query: model ## Compare predicted queries with true ones in the product (a quarter of an hour)
	$(BIN)/python tools/query_quality.py --out $(BUILD)/reports/query.json

faults: $(VENV)/installed ## Let every I/O call fail and kill 200 processes; no token may be wrong (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python tools/faults.py --out $(BUILD)/reports/faults.json \
		--drive $(BUILD)/faults

serve-test: model ## Test the server: routes, options, errors, clients that leave, many at once (a minute)
	$(PYTEST) tests/host/serve

browser-test: $(BUILD)/browser-env/installed ## Test the page in Chromium, and take pictures of it (a minute; as root, once)
	OMP_NUM_THREADS=1 $(BUILD)/browser-env/bin/python -m pytest -m browser tests/host/serve

lm-eval-test: model $(BUILD)/lm-eval-env/installed ## Test the evaluation harness in an environment of its own (a minute)
	OMP_NUM_THREADS=1 $(BUILD)/lm-eval-env/bin/python -m pytest -m lm_eval tests/host/harness

vllm-load: model $(BUILD)/vllm-load-env/installed ## Load the server with `vllm bench serve` (half a gigabyte, once; a minute)
	OMP_NUM_THREADS=1 HILLINFER_VLLM_PYTHON=$(abspath $(BUILD))/vllm-load-env/bin/python \
		$(BIN)/pytest -rs tests/host/serve/test_vllm_load.py

serve-bench: model ## Measure the server: streams, first tokens, other servers (a quarter of an hour; SERVE=options, load too)
	$(BIN)/hillinfer-bench serving --dir $(BUILD) --peers $(BUILD)/peers \
		--out $(BUILD)/reports/serve.json $(SERVE)

serve-peers: model ## Make llama.cpp's and vLLM's servers ready for serve-bench (once, a quarter of an hour, 4 GB)
	$(BIN)/python tools/serve_peers.py --build $(BUILD)/peers

serve-fuzz: model $(BUILD)/fuzz-env/installed ## Send 10,000 requests of a schema fuzzer to the server (half an hour; SERVE=options)
	$(BUILD)/fuzz-env/bin/python -c 'from hillinfer_bench.cli.main import main; main()' serving \
		--part fuzzed --dir $(BUILD) --out $(BUILD)/reports/serve-fuzz.json $(SERVE)

mutants: $(VENV)/installed ## Put one fault after the other into a copy; tests must fail of each (an hour)
	$(BIN)/python tools/try_mutants.py --out $(BUILD)/reports/mutants.json $(MUTANTS)

fuzz: $(VENV)/installed ## Give odd inputs to everything that is read (FUZZ_SECONDS, ten minutes)
	$(BIN)/python tools/fuzz.py --seconds $(FUZZ_SECONDS) --out $(BUILD)/reports/fuzz.json \
		--keep $(BUILD)/fuzz

attack: $(VENV)/installed ## Kill, flip, fill, plant and starve; nothing may come of it (ten minutes)
	$(BIN)/python tools/attack.py --out $(BUILD)/reports/attack.json --keep $(BUILD)/attack

scorer: $(VENV)/installed ## Measure scoring on the host beside what memory reads (minutes)
	$(BIN)/python tools/scorer_bench.py --out $(BUILD)/reports/scorer.json

projections: model ## Measure decode steps and quality with each way to compute linear layers (minutes)
	OMP_WAIT_POLICY=passive $(BIN)/python tools/projections_bench.py --out $(BUILD)/reports/projections.json

peers: model ## Compare with transformers, llama.cpp and vLLM, each fetched once into build/peers (an hour)
	$(BIN)/python tools/peers_bench.py --out $(BUILD)/reports/peers.json --build $(BUILD)/peers

drive: $(VENV)/installed ## Measure how fast the drive is read, beside a reference reader (six minutes)
	OMP_NUM_THREADS=1 $(BIN)/python tools/drive_bench.py --out $(BUILD)/reports/drive.json \
		--drive $(BUILD)/drive

beta: $(VENV)/installed ## Measure decode over β, a core of this processor in a card's place (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python tools/beta_sweep.py --out $(BUILD)/reports/beta.json

space: $(VENV)/installed ## Store 128k tokens of a 3B model's shape (14 GiB of drive) with memory flat at M0
	$(BIN)/python tools/space.py --out $(BUILD)/reports/space.json
	OMP_NUM_THREADS=1 $(BIN)/python tools/space.py --lengths 4096 16384 65536 131072 262144 \
		--layers 2 --max-selected 1024 --alpha 0.5 --steps 16 --out $(BUILD)/reports/space_lengths.json

prefill: model ## Measure the time to the first token beside ordinary chunked prefill (minutes)
	$(BIN)/python tools/prefill_bench.py --out $(BUILD)/reports/prefill.json

csim: model ## Compile the HLS kernels of all presets with g++ and compare their bits (an hour of CPU)
	PYTHONPATH=tools $(BIN)/python tools/csim.py --out $(BUILD)/reports/csim.json

cocotb: $(VENV)/installed ## Simulate the RTL: protocol benches, then long runs of all presets (hours of CPU)
	PYTHONPATH=tools $(BIN)/python tools/cocotb_bench.py --out $(BUILD)/reports/cocotb.json \
		$(if $(EXPORT),--export $(EXPORT) $(SPEC))
	$(if $(EXPORT),,PYTHONPATH=tools $(BIN)/python tools/rtl.py --out $(BUILD)/reports/rtl.json)
	$(if $(EXPORT),,PYTHONPATH=tools $(BIN)/python tools/query_passes.py \
		--out $(BUILD)/reports/query_passes.json)

formal: $(VENV)/installed ## Prove the AXI engines' and FIFOs' properties, and refute their mutants
	PYTHONPATH=tools $(BIN)/python tools/formal.py --out $(BUILD)/reports/formal.json

synth: $(VENV)/installed ## Estimate the area of the RTL with yosys (a minute and a half per row, 89 rows), place its modules
	PYTHONPATH=tools $(BIN)/python tools/levels.py --out $(BUILD)/reports/levels.json
	PYTHONPATH=tools $(BIN)/python tools/place_and_route.py --out $(BUILD)/reports/frequencies.json
	PYTHONPATH=tools $(BIN)/python tools/synth.py --out $(BUILD)/reports/synth.json

pynq-env: $(BUILD)/pynq-env/installed ## Make the environment of the PYNQ front (63 MB to fetch, once)

hw_emu: model ## Generate with HIE scores from an emulated card behind the real XRT
	sh tools/install_xrt.sh "$(EMULATOR)" "$(BIN)/python"
	PYTHONPATH=tools $(BIN)/python tools/hw_emu.py --emulator "$(EMULATOR)" \
		--platform "$(PLATFORM)" --build $(BUILD) --out $(BUILD)/reports/hw_emu.json

bitstream: $(VENV)/installed ## Build an xclbin with Vitis (hours), or print the commands and what is missing
	PYTHONPATH=tools $(BIN)/python tools/bitstream.py --preset "$(PRESET)" --mode "$(MODE)" \
		--rule "$(RULE)" --kernels "$(KERNELS)" --platform "$(PLATFORM)" \
		--frequency "$(FREQUENCY)" --build $(BUILD)/vitis --out bitstreams

doctor: $(VENV)/installed ## Say what this machine can do and what is missing
	$(BIN)/hillinfer doctor

clean: ## Remove what the other targets made, but not the fetched model
	rm -f host/hillinfer/native/*.so
	rm -rf $(BUILD) $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

LIBRARY := host/hillinfer/native/libhillinfer_native.so

$(LIBRARY): tools/build_native.py $(wildcard host/native/*)
	@$(PYTHON) $< --objects $(BUILD)/native $(if $(CI),--require)

PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..."; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
		{ echo "Python lacks venv: on Debian, apt install python3-venv"; exit 2; }
	$(PYTHON) -m venv $(VENV)

# What installs and builds the rest: a newer pip takes three quarters of the time, and builders are
# installed once and not for each package.
$(VENV)/builders: constraints.txt | $(VENV)/pyvenv.cfg
	$(PIP) pip hatchling editables
	@touch $@

NOT_IMPORTED := /tests/|/transformers/models/(?!auto|llama|mistral|opt|qwen)|/torch/(_inductor|testing)/|/(fontTools|hls4ml|langchain_core|langsmith|mypy|mypyc|pip|scapy|torchgen)/|/pygments/lexers/|/sympy/physics/

INSTALL = HILLINFER_NATIVE=beside $(PIP)
PROJECTS := -e '.[run,serve,encryption,keyring,hls,rtl,xrt,figures,test,lint]' -e ./tools \
	-e ./plugins/hillinfer_pynq -e './plugins/hillinfer_hosts[redis]'

# What is installed looks for the library where make puts it: while pip fetches and unpacks, which
# keeps a core busy, make compiles.
$(VENV)/packages: pyproject.toml tools/pyproject.toml plugins/hillinfer_pynq/pyproject.toml plugins/hillinfer_hosts/pyproject.toml constraints.txt hatch_build.py $(VENV)/builders
	# pip compiles modules one after the other: a minute that all cores share here.
	# Where a package that others made has to be built, each is built by what it asks for.
	$(INSTALL) --no-build-isolation --check-build-dependencies $(PROJECTS) || $(INSTALL) $(PROJECTS)
	# Without half of all: tests of libraries, models of transformers', and what nobody imports here.
	-@$(BIN)/python -m compileall -qq -j 0 -x '$(NOT_IMPORTED)' $(VENV)/lib
	@touch $@

$(VENV)/installed: $(VENV)/packages | $(LIBRARY)
	@touch $@

# Environments of tests that need much beside the other one, which they see.
define ENVIRONMENT
	$(BIN)/python -m venv --clear --without-pip $(@D)
endef
define SEES
	echo 'import site; site.addsitedir("$(abspath $(VENV))/lib/'$$(ls $(VENV)/lib)'/site-packages")' \
		> $(@D)/lib/$$(ls $(@D)/lib)/site-packages/other.pth
endef
OVER_PIP = $(BIN)/python -m pip --python $(@D)/bin/python install --quiet --disable-pip-version-check --no-compile -c constraints.txt
define OVER
	$(ENVIRONMENT)
	$(SEES)
	$(OVER_PIP)
endef

$(BUILD)/lm-eval-env/installed: $(VENV)/installed
	$(OVER) 'lm-eval>=0.4.13,<0.5'
	@touch $@

# The part of vLLM that sends load: neither what its engine needs nor its own torch.
# It is made while the other one is, and sees it afterwards.
$(BUILD)/vllm-load-env/installed: tools/peers/requirements/vllm_load.txt constraints.txt | $(VENV)/builders
	$(ENVIRONMENT)
	$(OVER_PIP) --no-deps -r $<
	$(SEES)
	@touch $@

$(BUILD)/fuzz-env/installed: $(VENV)/installed
	$(OVER) 'schemathesis>=4.30,<5'
	@touch $@

# Playwright's own downloads of browsers are not used: Chromium comes with the system.
$(BUILD)/browser-env/installed: $(VENV)/installed
	sh tools/install_packages.sh "the test of the page" chromium
	$(OVER) 'playwright>=1.60,<2'
	@touch $@

# The lock's numpy has no wheels for Python 3.13 and newer.
$(BUILD)/pynq-env/installed: tools/pynq_env/requirements.txt tools/pynq_env/build-requirements.txt | $(if $(CI),xrt)
	@$(PYNQ_PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || \
		{ echo "PYNQ needs Python 3.11 or 3.12: make PYNQ_PYTHON=/path/to/python3.11 ..."; exit 2; }
	$(PYNQ_PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes \
		-r tools/pynq_env/build-requirements.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes \
		--no-build-isolation --use-pep517 -r tools/pynq_env/requirements.txt
	@cp $< $@

$(BUILD)/document.txt: tools/pydoc_document.py $(VENV)/installed
	@mkdir -p $(@D)
	$(BIN)/python tools/pydoc_document.py > $@
