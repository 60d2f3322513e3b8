# make train   from nothing to a GPT-2 of your own that writes Shakespeare
# make test    the whole test suite
# make lint    ruff
# make clean   removes caches; never data, checkpoints or .venv
#
# Another interpreter than python3: make PYTHON=python3.12 train

PYTHON ?= python3
PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check

# Stamps: files whose age says that the environment is newer than the list it was installed from.
RUN_ENV := .venv/.installed
TEST_ENV := .venv/.installed-dev
# prepare.py writes it last, so where it is, the token files are whole.
DATA := data/shakespeare_char/meta.json

.PHONY: help train test lint clean

help:
	@sed -n 's/^# make/make/p' Makefile

train: $(RUN_ENV) $(DATA)
	@set -e; \
	case $$($(PY) -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")') in \
		cuda) name=shakespeare_char; out=out-shakespeare-char ;; \
		cpu) name=shakespeare_char_cpu; out=out-shakespeare-char-cpu; \
			echo "No CUDA GPU: training the small model, about three minutes on two cores." ;; \
		*) exit 1 ;; \
	esac; \
	$(PY) train.py config/train_$$name.py; \
	$(PY) sample.py --out_dir=$$out

test: $(TEST_ENV) $(DATA)
	$(PY) -m pytest

lint: $(TEST_ENV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

clean:
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# A .venv without pip is one that broke off half-way (Debian's python3 without python3-venv does that): do it again.
$(RUN_ENV): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "plainGPT needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo missing)." \
			"Name another: make PYTHON=python3.12 $(or $(MAKECMDGOALS),train)" >&2; exit 1; }
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	$(PIP) install -r requirements.txt
	@touch $@

# GPT-2's merges go to tiktoken's cache now, so that the tests themselves need no network.
$(TEST_ENV): $(RUN_ENV) requirements-dev.txt
	$(PIP) install -r requirements-dev.txt
	$(PY) -c 'import tokenizer; tokenizer.cache_gpt2_merges()'
	@touch $@

$(DATA): | $(RUN_ENV)
	$(PY) $(@D)/prepare.py
