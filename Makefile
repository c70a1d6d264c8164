# Needs python3 (3.10 or later), make and pip; every target makes its own .venv. The versions that
# are pinned need 3.11.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# One place for the version: the line of the constraints file.
PINNED_TORCH := $(shell grep '^torch==' constraints-dev.txt)
KERAS := .venv-keras
# Where stderr is a terminal pip shows what it downloads, with a progress bar; elsewhere errors alone.
PIP_SHOWS = $$(test -t 2 && echo --progress-bar=on || echo -qq) --disable-pip-version-check
PINNED_TESTS := $(shell grep -E '^(hypothesis|pytest)==' constraints-dev.txt)
COMPAT := .venv-compat-$(TORCH)-$(notdir $(PYTHON))

.PHONY: demo docs pictures test test-deepspeed test-keras test-mxnet soak lint bench mutants compat clean

demo: $(STAMP)
	@echo "Training: 7 runs of 1000 steps on the CPU (about 1 min)"
	@$(BIN)/gradscale demo

# Two workers for two cores. Each runs torch on one thread (OMP_NUM_THREADS): left alone, every worker
# starts a thread per core, and they take turns instead of running. `worksteal` because a few tests
# are long. The fixed hypothesis profile and hash seed make a red run repeat (which examples are drawn
# depends on the order of sets); a plain `pytest` explores further.
#
# The mutants are a target of their own: each planted fault is one more run of the tests that must
# notice it, so their time grows with the list while `make test` has to stay short.
test: lint
	PYTHONHASHSEED=0 OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal --hypothesis-profile=fixed

# Keras on TensorFlow, in an environment of its own: TensorFlow is 1.4 GB with what it brings. `make
# test` runs the same tests on JAX and torch.
test-keras: $(KERAS)/.installed
	PYTHONHASHSEED=0 OMP_NUM_THREADS=1 TF_CPP_MIN_LOG_LEVEL=3 KERAS_BACKEND=tensorflow \
		$(KERAS)/bin/pytest --hypothesis-profile=fixed tests/keras tests/compat/tf_keras

$(KERAS)/.installed: pyproject.toml constraints-dev.txt
	$(PYTHON) -m venv $(KERAS)
	$(KERAS)/bin/pip install -qq -c constraints-dev.txt -e ".[keras,cli]" hypothesis pytest tensorflow-cpu
	touch $@

# What takes minutes each and finds something once in a while: random histories by the thousand, and
# thousands of steps of several ranks. `make test` runs a tenth of them.
soak: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m soak

# An environment of its own: Accelerate and Transformers change what they import where DeepSpeed is
# installed. It is built from source, in seconds, without operators of its own (DS_BUILD_OPS=0).
test-deepspeed: .venv-deepspeed/.installed
	PYTHONHASHSEED=0 OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu .venv-deepspeed/bin/pytest \
		--hypothesis-profile=fixed tests/compat/deepspeed tests/compat/megatron

.venv-deepspeed/.installed: pyproject.toml constraints-dev.txt
	$(PYTHON) -m venv .venv-deepspeed
	.venv-deepspeed/bin/pip install -qq $(PINNED_TORCH)
	DS_BUILD_OPS=0 .venv-deepspeed/bin/pip install -qq -c constraints-dev.txt -e ".[torch]" \
		deepspeed hypothesis numpy pytest
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	@set -e; for script in benchmarks/[a-z]*.py; do echo "$$script"; $(BIN)/python "$$script"; done

# The site, in site/: open site/index.html. `make test` builds it as well. The variable turns off an
# advertisement of Material for MkDocs for its successor.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# The pictures of the README and of the site, drawn from the rows in docs/pictures. A script of that
# folder measures its rows again with --record.
pictures: $(STAMP)
	@$(BIN)/python docs/pictures

mutants: $(STAMP)
	$(BIN)/python tests/mutants.py

# torch goes first and by its exact version: so asked, pip can settle on a CPU build, while a range
# (as in our own extra) may bring gigabytes of CUDA packages.
#
# A line for each step, with the time to expect, because a first install takes minutes.
$(STAMP): pyproject.toml constraints-dev.txt
	@echo "Install, step 1 of 3: a virtual environment in .venv (about 10 s)"
	@$(PYTHON) -m venv .venv
	@echo "Install, step 2 of 3: $(PINNED_TORCH) (200 MB or more, about 1 min)"
	@$(BIN)/pip install $(PIP_SHOWS) $(PINNED_TORCH)
	@echo "Install, step 3 of 3: gradscale and the tools of development (about 2 min)"
	@$(BIN)/pip install $(PIP_SHOWS) -c constraints-dev.txt -e ".[torch,dev]"
	@touch $@
	@echo "Installed."

# The suite with another torch, and another Python: make compat TORCH=2.6.0 PYTHON=python3.12
# Hardly anything else is pinned, because no version of jax or Triton suits all of them (older Triton
# interprets kernels with numpy up to 2.3 only). The trainers (Lightning, Accelerate, Transformers,
# PEFT) have demands of their own on torch and are left out; tests of what is not there are skipped.
# Two folders cannot be imported everywhere: without Triton 3.4, and without the trainers. pytest must
# not look for doctests there, because it leaves an empty module where an import fails. An environment
# takes 6 GB, most of it CUDA libraries. TESTS chooses files.
# docs/measurements/versions.md has what was run.
compat: $(COMPAT)/.installed
	PYTHONHASHSEED=0 OMP_NUM_THREADS=1 $(COMPAT)/bin/pytest -n 2 --dist worksteal \
		--hypothesis-profile=fixed --ignore=gradscale/torch/grads/triton --ignore=gradscale/plugins \
		$(TESTS)

$(COMPAT)/.installed: pyproject.toml
	@test -n "$(TORCH)" || { echo "Say which torch: make compat TORCH=2.6.0"; exit 2; }
	$(PYTHON) -m venv $(COMPAT)
	$(COMPAT)/bin/pip install -qq torch==$(TORCH) -e ".[torch,equinox,demo]" flax hypothesis keras \
		"numpy<2.4" pytest pytest-xdist pytorch-optimizer torchao triton
	touch $@

# The tests of gradscale.compat.mxnet, which `make test` skips. They need an environment of their own:
# MXNet 1.x is the last that there is, and imports with numpy up to 1.23 only, so with Python up to
# 3.11. It takes 300 MB.
test-mxnet: .venv-mxnet/.installed
	PYTHONHASHSEED=0 OMP_NUM_THREADS=1 .venv-mxnet/bin/pytest --hypothesis-profile=fixed \
		tests/compat/mxnet

.venv-mxnet/.installed: pyproject.toml constraints-dev.txt
	$(PYTHON) -m venv .venv-mxnet
	.venv-mxnet/bin/pip install -qq -e ".[mxnet]" mxnet==1.9.1 numpy==1.23.5 $(PINNED_TESTS)
	touch $@

clean:
	rm -rf .venv .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site
	find gradscale tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
