# `make demo` and `make test` do all the set-up there is; `make help` lists the rest.
VENV ?= .venv
MODEL ?= models/smollm2-135m-instruct
PY := $(VENV)/bin/python
PYTEST := PDD_TEST_MODEL=$(MODEL) $(PY) -m pytest
KEEP ?=
SEEDS ?= 10000
SANITIZE_DIR := build
DESTDIR ?=
PREFIX ?= /usr/local

.PHONY: help setup model demo test test-all lint fmt bench asan tsan native-test sim sim-mutants clean \
        install wheel pex deb ops-tools
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

setup: ## the virtual environment, wheels and native build (quick the second time)
	@tools/setup.sh $(VENV)

model: setup ## the real small model, SmolLM2-135M-Instruct, as a Hugging Face folder
	@tools/model.sh $(VENV) $(MODEL) || [ $$? -eq 3 ]

demo: model ## one prefiller and two decoders answer a chat (KEEP=1 leaves them up)
	@$(PY) tools/demo.py --model $(MODEL) $(if $(KEEP),--keep)

test: model ## lint, the C++ tests and the default suite
	$(MAKE) --no-print-directory -j2 -Otarget lint native-test
	$(PYTEST) -q -m 'not slow'

test-all: model lint native-test ## everything, the slow tests too
	$(PYTEST) -q

lint: setup ## ruff, mypy (strict on the typed layers)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

fmt: setup ## format Python imports and C++
	$(VENV)/bin/ruff check --fix .
	find native tests/native -name '*.h' -o -name '*.cpp' | xargs clang-format -i

bench: model ## benchmarks: ratios against peers and limits, on a quiet machine
	for b in tests/bench/bench_*.py; do echo "== $$b"; $(PY) $$b --model $(MODEL) || exit 1; done

asan: setup ## C++ tests under AddressSanitizer and UBSan
	tools/native_tests.sh $(VENV) address

tsan: setup ## C++ tests under ThreadSanitizer
	tools/native_tests.sh $(VENV) thread

native-test: setup ## C++ tests
	tools/native_tests.sh $(VENV) ""

sim: setup ## workers over a simulated NIC, the messenger over a simulated network: SEEDS=10000 of each
	tools/native_tests.sh $(VENV) "" fabric_sim --seeds $(SEEDS)
	$(PY) -m tests.sim.messenger_sim --seeds $(SEEDS) --jobs $$(nproc)

sim-mutants: setup ## plants bugs in the real source one by one: which seed finds each
	$(PY) -m tests.sim.mutants

install: setup ## unit, user, settings, man pages, completions: DESTDIR=, PREFIX=/usr/local (not the program: see README)
	@DESTDIR="$(DESTDIR)" PREFIX="$(PREFIX)" tools/install.sh $(PY) -m pdd

wheel: setup ## dist/pdd_node-*.whl, with its manylinux tag
	@tools/pack.sh wheel

pex: setup ## dist/pdd and dist/pdd-light: one executable file each, with and without the engine
	@tools/pack.sh pex

deb: setup ## dist/pdd-node_*.deb, for Debian's own Python
	@tools/pack.sh deb

ops-tools: ## Debian packages that tests of proxies, monitoring, shells and units use when they are there
	apt-get install -y --no-install-recommends haproxy nginx-light prometheus zsh fish dbus

clean: ## removes what was built (not the model)
	rm -rf build dist $(VENV)
