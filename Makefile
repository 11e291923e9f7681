# make lab     JupyterLab at the first notebook, on loopback with a token; PORT=8888
# make test    style, editions, tests, and every solved notebook
# make soak    the long drills
# make browser the part of the tests that is a learner in a real browser; needs chromium
# make bench   the figures that are measured, side by side
# make build   the notebook editions anew, from notebooks/source
# make slides  the decks as HTML and PDF in slides/built; needs node, npm and chromium
# Each sets up .venv first, which takes no time when that is done already; PYTHON=/path/to/python3
PYTHON ?=
PORT   ?= 8888
SYSTEM  = $(or $(PYTHON),python3)
BIN     = .venv/bin
# What --soak makes whole: launches, notebooks at once, grids of bytes and peaks, known answers.
DRILLS  = tests/soak tests/ranks/test_endings.py tests/record tests/schedule tests/model tests/classroom/test_editions.py \
          tests/classroom/test_prove.py tests/slides/test_figures.py
# The learner's own progress is not the tests' to write.
APART   = LABKIT_HOME="$(CURDIR)/.venv/labkit-home"

.PHONY: lab test browser soak bench build slides setup python

lab: python
	@exec $(SYSTEM) labkit/bootstrap.py lab --python="$(PYTHON)" --port="$(PORT)"

test: setup
	$(BIN)/ruff check .
	$(BIN)/labkit build --check
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder tests
	$(APART) $(BIN)/python -m pytest -n 2 --dist loadfile --nbval-lax --nbval-cell-timeout 120 \
		--nbval-current-env notebooks/solved

browser: setup
	$(BIN)/python -m pytest -s tests/browser

soak: setup
	$(BIN)/python -m pytest --soak -s $(DRILLS)

bench: setup
	$(BIN)/python -m tests.bench

build: setup
	$(BIN)/labkit build

slides: python
	@$(SYSTEM) slides/tools.py
	@$(MAKE) --no-print-directory setup
	$(BIN)/python -m slides.build

setup: python
	@$(SYSTEM) labkit/bootstrap.py setup --python="$(PYTHON)"

python:
	@$(SYSTEM) -c "" 2>/dev/null || \
	{ echo "labkit: $(SYSTEM) does not start; install Python 3.10-3.13, or give PYTHON=/path/to/it" >&2; exit 1; }
