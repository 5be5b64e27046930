# The verbs of this checkout. Everything runs in .venv, which `make env` builds.

PYTHON ?= /usr/bin/python3
VENV := .venv
READY := $(VENV)/.ready
# Programs of the system are not in every user's path.
MISSING := PATH="$$PATH:/usr/sbin:/sbin" tests/packages
CHECKED := kproxy_core plugins bpf conformance tests examples $(wildcard deploy/*.py)

.PHONY: env deb man changelog demo check test gate lint surface faults guest bench soak cluster dist chart release requirements sbom audit clean packages

env: packages $(READY)

packages:
	@$(MISSING) env $(PYTHON)

$(READY): setup.cfg pyproject.toml conformance/pyproject.toml Makefile tests/venv setup.py conformance/setup.py | packages
	@tests/venv $(VENV) $(PYTHON)
	@touch $@

demo: env
	@$(VENV)/bin/python -m examples.demo

# Before every commit: lint, types, rooms, pure tests, and packets of one family in mode nftables.
check: env
	@$(VENV)/bin/python -m tests.lanes check

# What a change may break, in every mode with real packets; or some lanes: `make test LANE=ebpf`. What this machine
# refuses is left out and said.
test: env
	@$(MISSING) test || true
	@tests/nft_releases/unpack bookworm trixie >/dev/null || true
	@$(VENV)/bin/python -m tests.lanes test $(LANE)

# All other tests: guests with other kernels, other Debians, the long soak, the other family of alike modes.
gate: env guest
	@$(MISSING) test || true
	@tests/nft_releases/unpack bookworm trixie >/dev/null || true
	@$(VENV)/bin/python -m tests.deploy.programs || true
	@$(VENV)/bin/python -m tests.lanes gate $(LANE)

lint: env
	@$(VENV)/bin/ruff check $(CHECKED)
	@$(VENV)/bin/mypy $(CHECKED)

# What plugins may import, or what changed in it since a commit: `make surface COMPARE=main`. Status 1: plugins break.
surface: env
	@$(VENV)/bin/python -m tests.rooms.surface $(COMPARE)

# Plants faults in a copy of this checkout, one at a time, and runs the tests that must fail; or some:
# `make faults FAULT='NAME...'`.
faults: env
	@$(VENV)/bin/python -m tests.faults $(FAULT)

# What tests in a guest kernel need; without it they are left out, and the lanes say so.
guest:
	@$(MISSING) guest || true

# The pages of the manual, docs/man, from the help of the commands.
man: env
	@$(VENV)/bin/python -m deploy.manual

# What the next release says, from changelog.d and the section "Unreleased" of CHANGELOG.md.
changelog:
	@$(PYTHON) -m deploy.changelog

# dist/kproxy_VERSION_ARCHITECTURE.deb.
deb: env
	@$(MISSING) deb
	@deploy/deb/build $(VENV)/bin/python dist

# Measures this checkout: `make bench ARGS='--services 10000'` another size, `make bench ARGS=--every` all modes and
# sizes in one table, `make bench COMPARE=REV` this checkout and the revision REV in turn, with ratios.
bench: env
	@$(VENV)/bin/python -B -m tests.bench $(if $(COMPARE),--compare $(COMPARE) --rounds 3) --services 1000 $(ARGS)

# A node under churn, damage, restarts and switches of modes; prints a table in Markdown.
MINUTES ?= 20
soak: env
	@$(VENV)/bin/python -B -m tests.soak --minutes $(MINUTES) $(ARGS)

# The sdist and the wheel, and the wheel of the kit; the chart.
dist chart: env
	@$(VENV)/bin/python -m deploy.artefacts $@

# All files of a release, signed, in dist/kproxy-VERSION, and what to do then: docs/development.md.
# `make release VERSION=1.0.0 KEY=~/.ssh/id_release`; SINCE=REV is the release before if it has no tag.
release: env
	@$(MISSING) deb
	@$(VENV)/bin/python -m deploy.release '$(VERSION)' --key=$(KEY) --since=$(SINCE) --images=$(IMAGES)

# Kubernetes' own specs, in a cluster of three nodes on this machine: tests/cluster/README.md.
cluster: env
	@$(VENV)/bin/python -B -m tests.cluster $(ARGS)

# What the image installs, with hashes; a list of it for others; and what is known against it. audit asks the
# Python package index.
SUPPLY := .supply

$(SUPPLY)/.ready: Makefile
	@$(PYTHON) -m venv --clear $(SUPPLY)
	@$(SUPPLY)/bin/python -m pip install -qq --disable-pip-version-check uv pip-audit
	@touch $@

requirements: $(SUPPLY)/.ready
	$(SUPPLY)/bin/uv pip compile pyproject.toml --extra all --quiet --generate-hashes --python-version 3.11 \
	    --python-platform linux --no-emit-index-url --custom-compile-command 'make requirements' \
	    --output-file deploy/requirements.txt

sbom:
	@mkdir -p build
	@$(PYTHON) -m deploy.evidence > build/sbom.json

audit: $(SUPPLY)/.ready
	$(SUPPLY)/bin/pip-audit --require-hashes --disable-pip --requirement deploy/requirements.txt

clean:
	rm -rf $(VENV) $(SUPPLY) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
