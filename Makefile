# The commands of this repository. `make` alone lists them; each sets up what it needs. Expected on the machine: python3,
# a C++ compiler and make. Studies, releases and other builds of the kernels are programs of lab/.
PYTHON ?= python3
VENV ?= .venv
LOCK ?= tests/requirements.txt
# Whose tests: none is the library; speech, recipes or lab.
HOUSE ?=
KERNEL_SOURCES = pyproject.toml CMakeLists.txt $(shell find xla_kernels -name '*.[ch]*')
CXX_SOURCES = $(shell find xla_kernels lab -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
BIN = $(VENV)/bin
TOOLS = $(VENV)/tools
DEV = build/dev-$(notdir $(VENV))
BUILT = $(VENV)/.kernels$(ONLY)
SPEECH = .venv-speech/bin/python
HOUSE_VENV = $(if $(filter speech recipes,$(HOUSE)),.venv-speech,$(VENV))
PYTEST = $(HOUSE_VENV)/bin/pytest -n auto --dist worksteal $(addsuffix /tests,$(HOUSE:recipes=speech/recipes))

.DEFAULT_GOAL = help
.PHONY: help setup demo test test-all lint format docs bench recipes wheels clean

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## /  make \1\t/p' Makefile | expand -t 16

setup: $(VENV)/.packages $(BUILT) ## .venv, and the CPU kernels from source; ONLY=avx2, avx512 or portable: one instruction set

demo: $(BUILT) .venv-speech/.packages ## train a transducer on handwritten digits, and check its error rate
	$(SPEECH) -m jax_rnnt_speech train --config speech/recipes/corpora/handwritten_digits.json --overwrite --expect-cer 3

test: $(HOUSE_VENV)/.packages $(BUILT) ## the library's tests; HOUSE=speech, recipes or lab: those of that folder
	$(PYTEST) -m 'not slow' $(ARGS)

test-all: $(HOUSE_VENV)/.packages $(BUILT) ## also the slow ones: meshes of every kind, subprocesses, long utterances
	$(PYTEST) $(ARGS)

lint: $(VENV)/.packages ## ruff, clang-format, mypy, zizmor
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)
	$(BIN)/mypy
	$(BIN)/zizmor --quiet --offline .github

format: $(VENV)/.packages ## what lint can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

docs: $(BUILT) .venv-docs/.packages ## the site, into docs/_build; notebooks run, and a warning is an error
	rm -rf docs/api
	JAX_PLATFORMS=cpu JAX_DISABLE_MOST_OPTIMIZATIONS=1 JAX_TRACEBACK_IN_LOCATIONS_LIMIT=0 \
	  .venv-docs/bin/python -m sphinx -W --keep-going -q -j auto -b html $(ARGS) docs docs/_build

NAME = bench
bench: $(VENV)/.packages $(BUILT) ## benchmarks/bench.py; NAME=joint or decode: another one; ARGS=--help
	$(BIN)/python benchmarks/$(NAME).py $(ARGS)

recipes: $(BUILT) .venv-speech/.packages ## run every recipe, each of which checks its figure
	cd build && for recipe in $(sort $(wildcard speech/recipes/[!_]*.py)); do ../$(SPEECH) ../$$recipe || exit 1; done

wheels: ## what a release uploads, into dist: lab/release/README.md
	lab/release/wheels.sh $(ARGS)

clean: ## remove environments, builds and wheels
	rm -rf .venv* build dist

# ---- Files ----

# The lock is complete, and modules are compiled when they are imported: a third of the time. uv, where there is one,
# installs in an eighth of pip's time. The checkout is the package.
$(VENV)/.packages: $(LOCK)
.venv-docs/.packages: docs/requirements.txt
.venv-speech/.packages: speech/requirements.txt
$(VENV)/.packages .venv-docs/.packages .venv-speech/.packages:
	@echo 'Setting up $(@D) with the packages of $<: a minute.'
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(if $(shell command -v uv),VIRTUAL_ENV=$(@D) uv pip,$(@D)/bin/pip) install --quiet --no-deps --require-hashes \
	  $(if $(shell command -v uv),,--no-compile) -r $<
	printf '%s\n' $(CURDIR) $(if $(findstring speech,$@),$(CURDIR)/speech) > \
	  "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/jax_rnnt.pth"
	touch $@

# What builds the kernels, as pyproject.toml has it: above all the headers of the oldest jaxlib.
$(TOOLS)/.installed: pyproject.toml
	test -x $(TOOLS)/bin/python || $(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -c "import tomllib; f = open('pyproject.toml', 'rb'); \
	  print(*tomllib.load(f)['build-system']['requires'], sep='\n')" > $(TOOLS)/requirements.txt
	$(TOOLS)/bin/pip install --quiet --no-deps cmake ninja packaging pathspec -r $(TOOLS)/requirements.txt
	touch $@

# CMake keeps its folder and puts the kernels beside the Python: an edit compiles what includes the edited file.
# KERNELS=off: those that the checkout already has for this Python.
$(BUILT): $(if $(KERNELS),,$(KERNEL_SOURCES) $(TOOLS)/.installed)
ifneq ($(KERNELS),off)
	@echo 'Building the CPU kernels: 2 to 3 minutes, less with ONLY.'
	PATH="$(abspath $(TOOLS)/bin):$$PATH" && cmake -S . -B $(DEV) -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=Release \
	  -DPython_EXECUTABLE=$(abspath $(TOOLS)/bin/python) -Dpybind11_DIR="$$(python -m pybind11 --cmakedir)" \
	  -DJAX_RNNT_ONLY=$(ONLY) && cmake --build $(DEV) -- --quiet && \
	  cmake --install $(DEV) --prefix . --strip > $(DEV)/installed.txt
endif
	mkdir -p $(VENV)
	rm -f $(VENV)/.kernels*
	touch $@
