# Everything runs in .venv, which the first target that needs it creates. `make help` lists the targets.

PYTHON ?= python3
# Test processes, one more than CI's cores: a tenth of the time a test waits for processes that it has started.
WORKERS ?= 3
PYTEST_ARGS ?=
# The CPU build serves the tests. On a machine with a GPU: make ONNXRUNTIME=onnxruntime-gpu test
ONNXRUNTIME ?= onnxruntime

# Without Python's compiled files each of the hundred processes that the tests start compiles ampopt anew.
unexport PYTHONDONTWRITEBYTECODE

VENV_PYTHON := .venv/bin/python
PYTEST := $(VENV_PYTHON) -m pytest $(PYTEST_ARGS)

# Runs under whatever PYTHON is, so it must parse under any Python.
define CHECK_PYTHON
import sys
here, have = sys.executable, "%d.%d" % sys.version_info[:2]
if not (3, 10) <= sys.version_info[:2] < (3, 15):
    sys.exit("%s is Python %s, and ampopt needs Python 3.10 to 3.14. Install one of them and name it, with "
             "no .venv of another version in the way: rm -rf .venv; make PYTHON=python3.12" % (here, have))
try:
    import ensurepip, venv
except ImportError:
    sys.exit("%s cannot create virtual environments: its venv or ensurepip module is missing. On Debian and "
             "Ubuntu run: sudo apt install python%s-venv. Or name another Python, 3.10 to 3.14: "
             "make PYTHON=python3.12" % (here, have))
endef
export CHECK_PYTHON

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast fuzz fuzz-long fuzz-nnsmith lint lint-style lint-types lint-layers format wheel check bench-cpu peers-cpu clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

demo: .venv/.stamp ## see ampopt at work on this machine
	$(VENV_PYTHON) -m benchmarks.demo

# The files are looked for by their mark: collecting all the others for a few tests takes seconds.
test: .venv/.stamp ## all tests; those that depend on the clock run alone, after the others
	$(PYTEST) -n $(WORKERS) --dist loadfile -m "not timing"
	$(PYTEST) -m timing $$(grep -rlF mark.timing --include='*.py' tests) || [ $$? -eq 5 ] # 5: no test is marked so

test-fast: .venv/.stamp ## the tests that neither take long nor depend on the clock
	$(PYTEST) -n $(WORKERS) --dist loadfile -m "not slow and not timing"

FUZZ_OUT ?= out/fuzz
FUZZ_JOBS ?= 2
FUZZ := $(VENV_PYTHON) -m fuzz

fuzz: .venv/.stamp ## hostile random networks for a minute and a half: through the passes, optimize and interrupts; others each day
	FUZZ_EXAMPLES=25 $(PYTEST) -q -k no_pass tests/fuzz/test_random_networks.py
	$(FUZZ) short --jobs $(FUZZ_JOBS) --out $(FUZZ_OUT)/short --seconds 50

fuzz-long: .venv/.stamp ## 20,000 networks through the passes, 500 through optimize, 200 interrupts; resumes its logs
	-$(FUZZ) --jobs $(FUZZ_JOBS) --out $(FUZZ_OUT)/long --kind passes --seeds 0:20000
	-$(FUZZ) --jobs $(FUZZ_JOBS) --out $(FUZZ_OUT)/long --kind optimize --seeds 0:500
	-$(FUZZ) --jobs $(FUZZ_JOBS) --out $(FUZZ_OUT)/long --kind interrupts --seeds 0:400
	$(FUZZ) report $(FUZZ_OUT)/long --out fuzz/results/long

# NNSmith sees the libraries of .venv, so that torch is not installed twice; it is pinned, and brings what it needs.
fuzz-nnsmith: .venv-nnsmith/.stamp ## 500 and more networks that NNSmith invents through the passes
	-.venv-nnsmith/bin/python -m fuzz --jobs $(FUZZ_JOBS) --out $(FUZZ_OUT)/nnsmith --kind nnsmith --seeds 0:700
	.venv-nnsmith/bin/python -m fuzz report $(FUZZ_OUT)/nnsmith --out fuzz/results/nnsmith

.venv-nnsmith/.stamp: .venv/.stamp
	$(VENV_PYTHON) -m venv --without-pip .venv-nnsmith
	@own=$$(.venv-nnsmith/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") && \
	    $(VENV_PYTHON) -c "import sysconfig; print(sysconfig.get_path('purelib'))" >"$$own/main.pth" && \
	    $(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check --no-input --no-deps --target "$$own" \
	        nnsmith==0.1.0 z3-solver hydra-core hydra-colorlog colorlog omegaconf \
	        'antlr4-python3-runtime==4.9.*' multipledispatch appdirs
	@touch $@

lint: lint-style lint-types lint-layers ## ruff, mypy and the import layers

lint-style: .venv/.stamp
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .

lint-types: .venv/.stamp
	$(VENV_PYTHON) -m mypy

lint-layers: .venv/.stamp
	.venv/bin/lint-imports
	$(VENV_PYTHON) .ci/layers_check.py

format: .venv/.stamp ## mend what ruff can mend
	$(VENV_PYTHON) -m ruff check --fix .
	$(VENV_PYTHON) -m ruff format .

wheel: .venv/.stamp ## build the wheel, install it outside the checkout and use it there
	$(VENV_PYTHON) .ci/wheel_check.py

check: ## what CI runs: test, lint, wheel
	.ci/run

bench-cpu: .venv/.stamp ## the benchmarks that make sense without a GPU
	$(VENV_PYTHON) -m benchmarks.passes --device cpu

peers-cpu: .venv/.stamp ## environments of their own for ncnn, MNN and LiteRT, which then run in benchmarks.peers
	$(VENV_PYTHON) -m benchmarks.engine_venvs

clean: ## remove caches and build products; .venv stays
	rm -rf build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .grimp_cache .hypothesis
	find ampopt passes benchmarks fuzz tests .ci -name __pycache__ -type d -prune -exec rm -rf {} +

# An existing .venv is completed, not replaced.
.venv/.stamp: pyproject.toml Makefile
	@command -v $(PYTHON) >/dev/null || [ -x $(VENV_PYTHON) ] || { \
	    echo "$(PYTHON) is not on the PATH. Install Python 3.10 to 3.14, or name it: make PYTHON=python3.12"; exit 1; }
	@if [ -e .venv ] && ! $(VENV_PYTHON) -c "" 2>/dev/null; then \
	    echo ".venv has no Python that runs; it was made by one that is gone, or not made to the end. Run: rm -rf .venv"; exit 1; fi
	@if [ -e .venv ]; then \
	    $(VENV_PYTHON) -c "$$CHECK_PYTHON" && \
	    echo "completing .venv from pyproject.toml"; \
	else \
	    $(PYTHON) -c "$$CHECK_PYTHON" && \
	    echo "creating .venv and installing torch: about 2 minutes and 6 GB the first time" && \
	    $(PYTHON) -m venv .venv; \
	fi
	@$(VENV_PYTHON) -m pip --version >/dev/null 2>&1 || $(VENV_PYTHON) -m ensurepip >/dev/null
	@# The builds of ONNX Runtime overwrite each other: whichever is there stays.
	@runtime=$$($(VENV_PYTHON) -c "import onnxruntime" 2>/dev/null || echo $(ONNXRUNTIME)) && \
	    $(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check --no-input \
	        -e '.[vision,timm,dev,report,sign]' onnx onnx-ir onnxscript openvino $$runtime
	@touch $@
