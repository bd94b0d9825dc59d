# Everything a developer or CI does. Each target sets up what it needs; nothing but python3, a C++ compiler and make is
# expected on the machine.
PYTHON ?= python3
VENV ?= .venv
LOCK ?= tools/release/dev.txt
BIN = $(VENV)/bin
CXX_SOURCES = $(shell find xla_kernels benchmarks tools -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
KERNEL_SOURCES = pyproject.toml CMakeLists.txt $(shell find xla_kernels -name '*.[ch]*')
SOURCES = $(KERNEL_SOURCES) $(shell find jax_rnnt -name '*.py')
FREE ?= python3.14t
comma = ,
TOOLS = $(VENV)/tools
DEV = build/dev-$(notdir $(VENV))
# The lock is complete, and modules are compiled when they are imported: a third of the time.
LOCKED = pip install --quiet --no-deps --no-compile --require-hashes -r

# need-COMMAND, the first prerequisite of who needs it, stops in the first second where it is missing.
HOW_c++ = install a C++ compiler (Debian, Ubuntu: apt install g++)
HOW_g++ = install it (Debian, Ubuntu: apt install g++), or name a compiler by CXX
HOW_nvcc = install the CUDA toolkit and put nvcc on the PATH; a machine without it leaves this target out
HOW_setarch = install util-linux; the target is for Linux
HOW_aarch64-linux-gnu-g++ = install it (Debian, Ubuntu: apt install g++-aarch64-linux-gnu), or go without: make wheels MACHINES=x86_64
HOW_x86_64-linux-gnu-g++ = install it (Debian, Ubuntu: apt install g++-x86-64-linux-gnu), or go without: make wheels MACHINES=aarch64
HOW_$(FREE) = a CPython without a GIL; FREE=COMMAND names another one
need-%:
	@command -v $* > /dev/null || { echo 'make: no $*: $(or $(HOW_$*),install it)' >&2; exit 2; }

.PHONY: setup demo demo-losses recipes test test-all wheels test-matrix release-check lock from-sdist sanitize sanitize-threads emulation cuda-check cuda12-check cuda-model bench bench-peers \
  bench-variants bench-joint bench-librispeech bench-decode bench-rivals lint format clean

setup: $(VENV)/.installed$(ONLY)

$(VENV)/.packages: $(LOCK)
	@echo 'Setting up $(VENV): what tests, examples and lint need (1 minute), then the CPU kernels from source (1 to 2 minutes).'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/$(LOCKED) $(LOCK)
	touch $@

# What builds the kernels, as pyproject.toml has it: above all the headers of the oldest jaxlib.
$(TOOLS)/.installed: pyproject.toml
	test -x $(TOOLS)/bin/python || $(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -c "import tomllib; f = open('pyproject.toml', 'rb'); \
	  print(*tomllib.load(f)['build-system']['requires'], sep='\n')" > $(TOOLS)/requirements.txt
	$(TOOLS)/bin/pip install --quiet --no-deps cmake ninja packaging pathspec -r $(TOOLS)/requirements.txt
	touch $@

# The checkout becomes the installed package: Python is live. Of scikit-build-core's finder only the path stays: the finder
# would put the checkout before PYTHONPATH, where other builds and copies are.
$(VENV)/.editable: pyproject.toml $(VENV)/.packages
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -Ceditable.mode=inplace -Cwheel.cmake=false -e .
	$(BIN)/python -c "import pathlib, sysconfig; site = pathlib.Path(sysconfig.get_path('purelib')); \
	  [path.unlink() for path in site.glob('_editable_skbc_jax_rnnt*')]; (site / 'jax_rnnt.pth').write_text('$(CURDIR)\n')"
	touch $@

# CMake keeps its folder and puts the kernels beside the Python: an edit compiles what includes the edited file.
# ONLY=avx2, avx512 or portable: the CPU kernels for that instruction set alone, in a third of the time.
# KERNELS=off: those that the checkout already has for this Python.
$(VENV)/.installed$(ONLY): $(if $(KERNELS),,$(KERNEL_SOURCES) $(TOOLS)/.installed) $(VENV)/.editable
ifneq ($(KERNELS),off)
	PATH="$(abspath $(TOOLS)/bin):$$PATH" && cmake -S . -B $(DEV) -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=Release \
	  -DPython_EXECUTABLE=$(abspath $(TOOLS)/bin/python) -Dpybind11_DIR="$$(python -m pybind11 --cmakedir)" \
	  -DJAX_RNNT_ONLY=$(ONLY) && cmake --build $(DEV) -- --quiet && \
	  cmake --install $(DEV) --prefix . --strip > $(DEV)/installed.txt
endif
	rm -f $(VENV)/.installed*
	touch $@

demo: setup
	$(BIN)/python examples/asr train --config handwritten-digits --overwrite --expect-cer 3

# Every other loss of the family, to the same error rate: a minute or two each on two cores.
demo-losses: setup
	for loss in monotonic tdt multiblank hat pruned; do \
	  $(BIN)/python examples/asr train --config handwritten-digits --loss $$loss --steps 4000 --overwrite --expect-cer 3 || exit 1; \
	done

# One idea each, and its figure, which is checked: examples/recipes/README.md.
recipes: setup
	cd build && for recipe in $(sort $(filter-out examples/recipes/_%,$(wildcard examples/recipes/*.py))); do \
	  $(abspath $(BIN))/python ../$$recipe || exit 1; \
	done

test: setup
	$(BIN)/pytest -n auto --dist worksteal -m 'not slow'

# With what is slow and rare: meshes of every kind, subprocesses, long utterances.
test-all: setup
	$(BIN)/pytest -n auto --dist worksteal $(ARGS)

# What a release uploads, into dist: docs/releasing.md. NVCC=off: without CUDA; MACHINES=x86_64: without a cross compiler.
MACHINES ?= x86_64 aarch64
wheels: $(foreach machine,$(filter-out $(shell uname -m),$(MACHINES)),need-$(machine)-linux-gnu-g++) \
  $(if $(NVCC),,build/cuda12/bin/nvcc)
	for machine in $(MACHINES); do \
	  CUDACXX=$(or $(NVCC),build/cuda12/bin/nvcc) $(PYTHON) tools/release/wheels.py --machine $$machine $(ARGS) || exit 1; \
	done

# A compiler for the drivers of CUDA 12, for machines that have another one. NVCC names one that is there, or off.
build/cuda12/bin/nvcc: tools/release/cuda12.py tools/release/cuda12.txt tools/release/cudart12.txt
	$(PYTHON) tools/release/cuda12.py build/cuda12
	touch $@

# Compiles and links the CPU kernels for macOS on 64-bit ARM, and counts its vector instructions. Runs nothing.
.PHONY: macos-check
macos-check:
	$(PYTHON) tools/release/macos.py

.PHONY: macos-wheel
# On a Mac with an ARM processor: its wheel, for every interpreter, into dist and into $(VENV).
macos-wheel:
	@test "$$(uname -sm)" = "Darwin arm64" || { echo "make macos-wheel needs a Mac with an ARM processor, got $$(uname -sm); make macos-check runs on Linux" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/$(LOCKED) tools/release/dev.txt
	PYTHONPATH=tools/release $(BIN)/python -c "import pathlib, sbom; \
	  sbom.write(pathlib.Path('build/macos.cdx.json'), pathlib.Path(), None, None, pybind11=False)"
	JAX_RNNT_WHEEL=plain MACOSX_DEPLOYMENT_TARGET=11.0 $(BIN)/python -m build --quiet --wheel --outdir dist \
	  -Ccmake.define.JAX_RNNT_SBOM=$(CURDIR)/build/macos.cdx.json .
	$(BIN)/pip install --quiet --no-deps --force-reinstall dist/*.whl
	touch $(VENV)/.installed

# The wheels in dist, under every version of jax and Python. ARGS="--only oldest newest", ARGS=--full: all tests.
test-matrix: setup
	PATH="$(abspath $(BIN)):$$PATH" $(PYTHON) tools/release/matrix.py $(ARGS)

# What .github/workflows/release.yml does before it uploads: the files, a second build with the same bytes, and tests under
# the interpreters at hand. NVCC as for wheels.
release-check: setup build/check/.installed
	rm -rf dist
	$(MAKE) wheels
	CUDACXX=$(or $(NVCC),build/cuda12/bin/nvcc) build/check/bin/python tools/release/verify.py
	$(MAKE) test-matrix ARGS="--only oldest newest free-threaded plain pure"

build/check/.installed: tools/release/check.txt
	test -x build/check/bin/python || $(PYTHON) -m venv build/check
	build/check/bin/$(LOCKED) tools/release/check.txt
	touch $@

# Renews the versions and hashes of everything that builds and tests.
COMPILE = $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
  --no-emit-find-links --custom-compile-command 'make lock'
lock: setup
	for name in wheels cuda12 cudart12; do $(COMPILE) --no-deps tools/release/$$name.in -o tools/release/$$name.txt || exit 1; done
	$(COMPILE) tools/release/check.in -o tools/release/check.txt
	$(COMPILE) --extra test --extra examples --extra docs --extra dev pyproject.toml -o tools/release/dev.txt
	$(COMPILE) --extra test --extra flax --extra metrics pyproject.toml tools/release/oldest.in -o tools/release/oldest.txt

# $(VENV) with the package of the source distribution, built apart from this folder and isolated, and the kernels' own
# check of themselves. The checkout gets its kernels; its Python is the same.
SITE = $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/jax_rnnt
from-sdist: $(VENV)/.packages $(TOOLS)/.installed
	rm -rf build/sdist
	$(BIN)/python -m build --quiet --sdist --outdir build/sdist .
	$(BIN)/pip install --quiet --no-deps --force-reinstall build/sdist/jax_rnnt-*.tar.gz
	cd build && $(abspath $(BIN))/python -c "import jax_rnnt; assert len(jax_rnnt.selftest()) > 1"
	cp $(SITE)/_cpu* $(SITE)/_build.py jax_rnnt
	diff -r -x __pycache__ -x DECISIONS.md -x '_cpu.*.so' jax_rnnt $(SITE)
	touch $(VENV)/.editable $(VENV)/.installed

# The package alone, built in another way and for the tests of $(VENV): $(call package,FOLDER,OPTIONS).
package = $(TOOLS)/bin/pip install --quiet --no-deps --no-build-isolation --upgrade --target $(1) \
  -Cbuild-dir=$(1)-objects -Ccmake.define.JAX_RNNT_ONLY=$(SANITIZE_ONLY) $(2) .

# The tests run on the package that is installed there: $(call installed,VENV).
installed = JAX_RNNT_INSTALLED="$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"

# The suite with AddressSanitizer and UndefinedBehaviorSanitizer in the kernels, which have no products and sums in one
# instruction here: rounding must not matter.
build/sanitize/.installed: $(SOURCES) $(TOOLS)/.installed
	$(call package,build/sanitize,-Ccmake.define.JAX_RNNT_SANITIZE=address$(comma)undefined \
	  -Ccmake.define.JAX_RNNT_CONTRACT=off -Cinstall.strip=false)
	touch $@

sanitize: need-$(or $(CXX),g++) setup build/sanitize/.installed
	LD_PRELOAD="$$($(or $(CXX),g++) -print-file-name=libasan.so) $$($(or $(CXX),g++) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
	  JAX_RNNT_INSTALLED=$(CURDIR)/build/sanitize $(BIN)/pytest -n auto --dist worksteal -m 'not slow' \
	  --ignore tests/tools/test_asr.py --ignore tests/tools/test_recipes.py \
	  --ignore tests/transforms/test_memory.py $(ARGS)

# The tests of threads under ThreadSanitizer, in an interpreter without a GIL: FREE names one. It sees the module's code
# and not jaxlib's, which is not compiled for it. Its memory must not lie at random places.
build/threads/.installed: $(SOURCES)
	test -x build/threads/bin/python || $(FREE) -m venv build/threads
	build/threads/bin/pip install --quiet '.[test]' -Ccmake.define.JAX_RNNT_SANITIZE=thread -Cinstall.strip=false \
	  -Cbuild-dir=build/threads-objects
	touch $@

sanitize-threads: need-$(FREE) need-setarch need-g++ build/threads/.installed
	$(call installed,build/threads) LD_PRELOAD="$$($(or $(CXX),g++) -print-file-name=libtsan.so)" \
	  TSAN_OPTIONS="exitcode=66 ignore_noninstrumented_modules=1 suppressions=$(CURDIR)/tools/fuzz/threads.supp" JAX_PLATFORMS=cpu \
	  setarch -R build/threads/bin/python -m pytest -q -p no:xdist tests/kernels/test_threads.py $(ARGS)

# The suite on the CUDA kernels, run by the CPU (tools/emulation). What does not concern them is left out.
NO_KERNEL = agreement align asr axes benchmarks decode decode_programs derivatives docs errors export faults \
  flax fusion fuzz gpu_compile installation joint joint_mesh layouts machine_code memory messages metrics mwer ngram \
  nodes nodes_programs paddings parakeet parallel phrases plot pruned public recipes remat searches sharding split streams tpu
build/emulation/.installed: $(SOURCES) $(wildcard tools/emulation/*) $(TOOLS)/.installed
	$(call package,build/emulation,-Ccmake.define.JAX_RNNT_EMULATE=ON)
	touch $@

emulation: need-c++ setup build/emulation/.installed
	JAX_RNNT_REQUIRE=cpu JAX_RNNT_INSTALLED=$(CURDIR)/build/emulation $(BIN)/pytest -n auto --dist worksteal -m 'not slow' -k 'not reference' \
	  $(NO_KERNEL:%=--ignore-glob='tests/*/test_%.py') $(ARGS)

# Compiles every CUDA kernel for every architecture; fails on spills and where the model misses an aim. No GPU.
cuda-check: need-nvcc setup
	$(PYTHON) tools/model/resources.py --check
	$(BIN)/python tools/model/cuda_model.py --check

# The registers, shared memory and spills of every kernel by the compiler of the wheels. As for wheels, NVCC names another
# one, or off. The build of the wheels fails on spills too.
cuda12-check: $(if $(NVCC),,build/cuda12/bin/nvcc)
ifeq ($(NVCC),off)
	@echo 'cuda12-check: left out, NVCC=off'
else
	$(PYTHON) tools/model/resources.py --nvcc $(or $(NVCC),build/cuda12/bin/nvcc) --check $(ARGS)
endif

# Runs the kernels' machine code: instructions, bytes in flight, cycles a diagonal. ARGS=lattice: one part.
cuda-model: need-nvcc setup
	$(BIN)/python tools/model/cuda_model.py $(ARGS)

bench: setup
	$(BIN)/python benchmarks/bench.py $(ARGS)

bench-peers: setup
	$(BIN)/python benchmarks/bench.py --peers $(ARGS)

bench-variants: setup
	$(BIN)/python benchmarks/bench.py --family $(ARGS)

bench-joint: setup
	$(BIN)/python benchmarks/joint.py $(ARGS)

bench-librispeech: setup
	$(BIN)/python benchmarks/joint.py --librispeech $(ARGS)

bench-decode: setup
	$(BIN)/python benchmarks/decode.py $(ARGS)

# The decoders beside other libraries', which are installed into build/rivals (large). ARGS='--data FOLDER --workdir DIR':
# also on spoken digits, with a model of examples/asr.
bench-rivals:
	test -x build/rivals/bin/python || $(PYTHON) -m venv build/rivals
	build/rivals/bin/pip install --quiet '.[examples]' torch==2.11.0 torchaudio==2.11.0 'nemo_toolkit[asr]==3.0.0' \
	  sherpa-onnx==2.0.1 onnx
	build/rivals/bin/python benchmarks/rivals.py $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)
	$(BIN)/mypy
	$(BIN)/zizmor --quiet --offline .github

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

clean:
	rm -rf $(VENV) build dist

# ---- Hard to break: docs/reliability.md ----
.PHONY: fuzz fuzz-kernels soak
SECONDS ?= 60

# Random programs and problems (Hypothesis), and the properties of every answer. ARGS="--seed 2".
fuzz: setup
	$(BIN)/python tools/fuzz/fuzz_properties.py --seconds $(SECONDS) $(ARGS)

# Random calls of the CPU kernels' handlers, under sanitizers. ARGS="--only threads".
fuzz-kernels: need-g++ setup
	$(BIN)/python tools/fuzz/fuzz.py --seconds $(SECONDS) $(ARGS)

# Thousands of training steps of several kinds; fails where memory grows.
soak: setup
	$(BIN)/python benchmarks/soak.py $(ARGS)

# Random faults in the Python sources: how many the tests find. make emulation-mutations has those of the CUDA kernels.
.PHONY: mutation-score
mutation-score:
	test -x build/cosmic-ray/bin/python || $(PYTHON) -m venv build/cosmic-ray
	build/cosmic-ray/bin/pip install --quiet '.[test,examples]' 'cosmic-ray>=8.7'
	build/cosmic-ray/bin/python tools/mutation/score.py $(ARGS)

# ---- TPU kernels without a TPU ----
.PHONY: interpret test-tpu-compile

# The suite on the Pallas kernels for TPUs, interpreted by the CPU. The emission is XLA's there.
INTERPRETED = tpu lattices values gradients promises edges sharding vmap remat export accuracy family
interpret: setup
	JAX_RNNT_INTERPRET=1 $(BIN)/pytest -n auto --dist worksteal -m 'not slow' -k 'not reference and not symbolic' \
	  $(or $(ARGS),$(INTERPRETED:%=tests/*/test_%.py))

# Compiles the losses for five generations of TPUs and prints the tables of docs/tpu.md. Fails where an aim is missed.
test-tpu-compile:
	test -x build/tpu-compile/bin/python || $(PYTHON) -m venv build/tpu-compile
	build/tpu-compile/bin/pip install --quiet . 'jax[tpu]'
	build/tpu-compile/bin/python benchmarks/tpu.py $(ARGS)

# ---- CUDA kernels without a GPU ----
.PHONY: emulation-check emulation-quick emulation-mutations gpu-compile test-gpu-compile

# Every check of the kernels without a GPU, before a commit that changes them. Records their sources: CI then repeats a part,
# kernels-quick. Under sanitizers: what calls the kernels most in the least time.
.PHONY: kernels-check kernels-quick
SANITIZED = -q -x -k 'not reference' tests/kernels/test_door.py \
  $(addprefix tests/losses/test_,$(addsuffix .py,edges promises targets offsets emissions lattices))
kernels-check: emulation-check
	$(MAKE) sanitize ARGS="$(SANITIZED)"
	$(PYTHON) tools/checked.py --write

kernels-quick: emulation-quick
	$(MAKE) sanitize ARGS="-q -x -k 'not reference' tests/kernels/test_door.py tests/losses/test_targets.py"

# The kernels run by the CPU, against double precision: in four orders of blocks and threads, and under sanitizers. Needs
# a C++ compiler only.
emulation-check: need-g++
	$(PYTHON) tools/emulation/checks.py

# The same without sanitizers, for edits: a changed source compiles once.
emulation-quick: need-g++
	$(PYTHON) tools/emulation/checks.py --quick

# Typical bugs are put into a copy of the kernels, each of which some check must find.
emulation-mutations: need-g++
	$(PYTHON) tools/emulation/mutations.py

# Compiles for GPUs without one. XLA only asks for names and sizes: those of the emulation stand in.
gpu-compile:
	test -x build/gpu-compile/bin/python || $(PYTHON) -m venv build/gpu-compile
	build/gpu-compile/bin/pip install --quiet '.[test]' 'jax[cuda13-local]' -Ccmake.define.JAX_RNNT_EMULATE=ON \
	  -Cbuild-dir=build/gpu-compile-objects
	printf 'from jax_rnnt._cpu import *\n' > \
	  "$$(build/gpu-compile/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/jax_rnnt/_cuda.py"

# A sharded training step for eight GPUs, and a joint network in tiles.
test-gpu-compile: gpu-compile
	$(call installed,build/gpu-compile) JAX_RNNT_REQUIRE=gpu-compile JAX_PLATFORMS=cpu build/gpu-compile/bin/pytest -q tests/kernels/test_gpu_compile.py $(ARGS)

# ---- CUDA kernels on a GPU ----
.PHONY: gpu

# Everything that needs one, in under ten minutes, with what is installed: docs/cuda.md. ARGS=--dry-run: without one.
gpu:
	PYTHON="$(PYTHON)" benchmarks/gpu.sh $(ARGS)

# ---- The site ----
.PHONY: docs docs-links docs-site

SPHINX = JAX_PLATFORMS=cpu $(BIN)/python -m sphinx -W --keep-going -q -j auto

# docs/_build/index.html: the pages, the API reference, the notebooks, which run. A warning is an error, as is a public name
# that the reference lacks.
docs: setup
	rm -rf docs/api
	$(SPHINX) -b html $(ARGS) docs docs/_build

# Links to other sites: needs the network.
docs-links: setup
	$(SPHINX) -b linkcheck docs build/linkcheck

# build/site, as it is served: dev/ of this checkout, vX.Y/ of every release that has a site.
docs-site: setup
	$(BIN)/python tools/release/site.py build/site
