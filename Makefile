# Everything that a developer runs, and all that CI runs (`make test`).
SHELL := /bin/bash -euo pipefail
.DEFAULT_GOAL := help
CLUSTER := tests/cluster
# Tests that wait more than they compute run on more threads than there are cores: of one crate, of processes on this machine, of the cluster.
UNIT_THREADS := 8
HOST_THREADS := 6
CLUSTER_THREADS := 3
PYTHON_PROCESSES := 3
# Settings of the test cluster (KUBECONFIG, PATH with kind, kubectl and helm), for the line that starts with it.
CLUSTER_ENV := source $(CLUSTER)/env.sh;
# The earlier commit that test-previous builds: empty for the newest release, or what tests/tools/previous-commit names.
PREVIOUS ?=
# Empty for four cases of reads over RDMA, or all.
VERBS_CASES ?=
# The processor that real engines compute for: empty for this machine's own, or avx2.
CPU ?=
SCRIPTS = $(shell git ls-files '*.sh')
# Documents that people write: the references of API and metrics are generated.
DOCUMENTS = $(filter-out docs/metrics.md docs/reference/%,$(shell git ls-files '*.md'))

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: ## Build the programs as images and wheels hold them, into target/dist
	deploy/programs.sh

.PHONY: wheel
wheel: build ## Build the Python wheel, with the programs in it, into python/dist
	python3 python/build_wheel.py target/dist/weightsync target/dist/weightsync-dev python/dist

.PHONY: dist
dist: build ## Make all that a release has, into dist/: images, chart, install.yaml, wheels, programs, SBOMs, checksums
	deploy/dist.sh

.PHONY: dist-test
dist-test: dist ## Install and run what `make dist` made, with each Python of this machine
	tests/dist/check.sh

.PHONY: test
# The emulated machine runs alone: at a lane's lower priority, its members were silent for longer than tests allow.
test: ## Run everything that CI runs, with the time of each stage
	@tests/stages.sh lint unit-test model-test verbs-test \
		--lane chart-lint page-test host-test edges-test gdr-test gdr-image-test chaos-test e2e \
		--lane test-previous python-test engine-test trainers-test

.PHONY: test-all
test-all: ## Run the long forms of the tests, which CI does not run, and note them in bench-records/test-all.md (PART='chaos gdr': these only)
	tests/tools/test-all.sh $(PART)

.PHONY: check
check: ## Quick checks for development: format, lints, tests of the pure crate (under a minute when warm)
	cargo fmt --check
	cargo clippy --locked --workspace --all-targets -- --deny warnings
	cargo test --locked --package weightsync-core --lib

# All programs and tests at once, with the features of all packages: what stages share is compiled once.
.PHONY: programs
programs: compiled
	cargo build --locked --workspace --bins --tests --examples
	tests/tools/compiled.sh keep

# A fresh clone takes what an earlier one compiled of the same dependencies.
.PHONY: compiled
compiled:
	tests/tools/compiled.sh restore

.PHONY: lint
lint: fmt-check circles clippy doc deny scripts-lint wheel-lint prose docs ## Check style, lints, docs and dependencies (unit tests check generated files)

.PHONY: fmt
fmt: ## Format Rust and Python
	cargo fmt
	$$(tests/tools/python.sh)/ruff format python tests examples

.PHONY: fmt-check
fmt-check:
	cargo fmt --check
	$$(tests/tools/python.sh)/ruff format --check python tests examples

.PHONY: clippy
clippy: compiled
	cargo clippy --locked --workspace --all-targets -- --deny warnings

.PHONY: circles
circles: ## Find files that import each other: two circles are there, and no more may come
	tests/tools/circles.py --most 2 --largest 3

# With examples, packages have the features that clippy checked them with: else fifty of them are checked again.
.PHONY: doc
doc: compiled
	RUSTDOCFLAGS='--deny warnings' cargo doc --locked --no-deps --workspace --lib --examples

.PHONY: deny
deny:
	$$(tests/tools/cargo-deny.sh) --locked check bans licenses sources
	tests/tools/advisories.sh

.PHONY: scripts-lint
scripts-lint:
	$$(tests/tools/python.sh)/shellcheck $(SCRIPTS)
	$$(tests/tools/python.sh)/hadolint Dockerfile
	tests/tools/actionlint.sh
	$$(tests/tools/python.sh)/pymarkdown --config .pymarkdown.yml scan $(DOCUMENTS)

.PHONY: wheel-lint
wheel-lint: ## Build the wheel without programs, and check its contents and its page
	tests/tools/wheel-lint.sh

.PHONY: prose
prose: ## Check words and sentences of documents and comments, and names of tests (the first time builds vale: a minute)
	tests/tools/prose.sh

.PHONY: docs
docs: ## Build the documentation site into site/, and check its links (tests/tools/docs.sh serve: serve it)
	tests/tools/docs.sh

.PHONY: generate
generate: ## Write the files that are generated from the program's types (CRD, references of API and metrics)
	tests/tools/generate.sh

.PHONY: unit-test
unit-test: programs ## Run the unit and property tests
	cargo test --locked --workspace --lib --bins -- --skip browser:: --test-threads=$(UNIT_THREADS)

.PHONY: model-test
model-test: programs ## Run the membership model, and check that it catches mutants of the decisions: all if these changed, else four
	cargo test --locked --workspace --test model
	tests/tools/mutants.sh --changed

.PHONY: mutants
mutants: programs ## Check that the model catches every mutant of the decisions (minutes)
	tests/tools/mutants.sh

.PHONY: page-test
page-test: programs ## Test the web page in a browser
	$(CLUSTER)/packages.sh
	cargo test --locked --workspace --lib browser:: -- --test-threads=$(HOST_THREADS)

.PHONY: host-test
host-test: programs ## Run the tests with processes on this machine, and those of the rendered chart
	$(CLUSTER)/tools.sh
	cargo test --locked --workspace --test host -- --test-threads=$(HOST_THREADS)

# Scenarios that look at the path of the bytes. In the others the engine or the membership decides, as over TCP.
GDR_STORIES ?= $(addprefix stories::,versions:: membership:: cancelled:: snapshot:: gdr:: left_out::late_agent)
.PHONY: gdr-test
gdr-test: programs ## Run the transport and groups with reads through NIXL, over TCP, without RDMA (GDR_STORIES=stories:: runs every scenario)
	WEIGHTSYNC_NIXL=$$(tests/tools/nixl.sh) && export WEIGHTSYNC_NIXL && \
	cargo test --locked --workspace --lib -- --include-ignored fabric:: gdr:: --skip fabric::verbs --skip fabric::gpu --test-threads=$(HOST_THREADS) && \
	WEIGHTSYNC_STORIES_OVER=gdr cargo test --locked --workspace --test host -- --include-ignored $(GDR_STORIES) --skip stories::verbs \
		--test-threads=$(HOST_THREADS)

.PHONY: verbs-test
verbs-test: programs ## Run reads through NIXL over RDMA, in an emulated guest with a software device (VERBS_CASES=all: every case)
	$(CLUSTER)/packages.sh
	VERBS_CASES=$(VERBS_CASES) tests/verbs/run.sh

.PHONY: gdr-image-test
gdr-image-test: programs ## Build the image with NIXL from files alone, and open NIXL in it (as root)
	tests/cluster/gdr-image.sh target/debug/weightsync

.PHONY: test-previous
test-previous: programs ## Replace agents of an earlier build by those of this one and back, under either coordinator (PREVIOUS=COMMIT)
	WEIGHTSYNC_PREVIOUS=$$(tests/tools/previous.sh $(PREVIOUS)) && export WEIGHTSYNC_PREVIOUS && cargo test --locked --workspace --test host -- --ignored upgrade::

.PHONY: edges-test
edges-test: programs ## Measure edges between pods in network namespaces, one of them slow (a minute; as root)
	$(CLUSTER)/packages.sh
	cargo test --locked --workspace --test edges

.PHONY: chaos-test
chaos-test: programs ## Inject about 120 faults into processes of this machine, each kind in each phase at least once (a few minutes; as root)
	$(CLUSTER)/packages.sh
	WEIGHTSYNC_CHAOS_SEED=$${WEIGHTSYNC_CHAOS_SEED:-13} WEIGHTSYNC_CHAOS_WORLDS=$${WEIGHTSYNC_CHAOS_WORLDS:-5} cargo test --locked --workspace --test chaos

.PHONY: chaos
chaos: programs ## Inject 1,000 random faults, each kind in each phase at least five times; WEIGHTSYNC_CHAOS_SEED repeats a run
	$(CLUSTER)/packages.sh
	WEIGHTSYNC_CHAOS_FAULTS=1000 WEIGHTSYNC_CHAOS_ROUNDS=5 cargo test --locked --workspace --test chaos every_fault

.PHONY: fuzz
fuzz: ## Fuzz messages, headers, frames, engines' responses and objects (an hour; unit tests do it for seconds)
	PROPTEST_CASES=$${CASES:-20000} cargo test --locked --workspace --lib -- fuzz:: hostile:: frames:: wire:: pruning:: worker::

.PHONY: python-test
python-test: venv programs ## Check and test the Python client, and the code blocks of all documents
	$(CLUSTER)/tools.sh
	$$(tests/tools/python.sh)/ruff check python tests examples
	cd python; $$(../tests/tools/python.sh)/mypy weightsync build_wheel.py
	cd tests/gpu; $$(../tools/python.sh)/mypy --config-file ../../mypy.ini engine_code.py engine_ranks.py
	$$(tests/tools/python.sh)/mypy tests/chaos tests/engine tests/e2e tests/cluster/image.py tests/cluster/node deploy/sbom.py
	$(CLUSTER_ENV) venv=$$($(CLUSTER)/vllm-venv.sh --print); xdist=$$(tests/tools/xdist.sh); cd python; \
	PYTHONPATH=$$PWD:$$xdist "$$venv/bin/python" -m pytest -q -n $(PYTHON_PROCESSES) tests

.PHONY: trainers-test
trainers-test: venv programs ## Train with TRL, with two real vLLM servers of which one is killed, and run verl's manager, on a CPU
	tests/tools/upstream.sh trl
	tests/tools/upstream.sh trl-grpo
	tests/tools/upstream.sh verl

.PHONY: upstream-test
upstream-test: venv programs ## Run a framework's own classes against the client (FRAMEWORK=trl, or another of tests/tools/upstream.sh): downloads them
	tests/tools/upstream.sh $(FRAMEWORK)

.PHONY: upstream
upstream: venv programs ## Run the newest release of every framework, and write the table of docs/integrations/README.md (FRAMEWORKS='trl verl': these only)
	tests/tools/upstream-all.sh $(FRAMEWORKS)

.PHONY: chart-lint
chart-lint: ## Check the chart, its rendered objects and those of the examples, and its alerts
	$(CLUSTER)/tools.sh
	$(CLUSTER_ENV) helm lint --strict charts/weightsync
	deploy/render.sh | diff -u deploy/install.yaml - || { echo 'stale: make install-yaml'; exit 1; }
	tests/tools/kubeconform.sh
	tests/tools/kube-score.sh
	$$(tests/tools/promtool.sh) check rules charts/weightsync/files/alerts.yaml
	$$(tests/tools/promtool.sh) test rules tests/chart/alerts-test.yaml

.PHONY: install-yaml
install-yaml: ## Write deploy/install.yaml: the chart with its defaults, for kubectl apply
	$(CLUSTER)/tools.sh
	deploy/render.sh >deploy/install.yaml.part
	mv deploy/install.yaml.part deploy/install.yaml

.PHONY: engine-test
engine-test: venv programs ## Run the adapter against the real vLLM, and the store against the engines' group code (CPU=avx2 for a processor without AVX-512)
	export WEIGHTSYNC_TEST_CPU=$(CPU); \
	export WEIGHTSYNC_ENGINE_CODE=$$(tests/tools/engine-code.sh); \
	WEIGHTSYNC_VENV=$$($(CLUSTER)/vllm-venv.sh --print) && export WEIGHTSYNC_VENV && \
	cargo test --locked --workspace --test engine -- --test-threads=2 --include-ignored --skip fastdeploy::upstream && \
	cargo test --locked --workspace --lib -- --ignored by_torch::

.PHONY: upstream-fastdeploy
upstream-fastdeploy: programs ## Run FastDeploy's own loader on Paddle for processors against the adapter (fetches FastDeploy's repository)
	WEIGHTSYNC_FASTDEPLOY=$$(tests/tools/fastdeploy.sh) && export WEIGHTSYNC_FASTDEPLOY && \
	cargo test --locked --workspace --test engine -- --test-threads=1 --ignored fastdeploy::

.PHONY: e2e
e2e: cluster-up programs ## Run the end-to-end tests on the kind cluster, with the debug build that all tests use (CPU=avx2 as above)
	WEIGHTSYNC_BINARY=target/debug/weightsync tests/e2e/prepare.sh
	$(CLUSTER_ENV) WEIGHTSYNC_TEST_CPU=$(CPU) cargo test --locked --workspace --test e2e -- --test-threads=$(CLUSTER_THREADS)

# The version stands in the chart's name.
.PHONY: e2e-dist
e2e-dist: cluster-up programs dist ## Run the end-to-end tests with the chart and the image that `make dist` makes (a quarter of an hour more to build)
	WEIGHTSYNC_BINARY=target/dist/weightsync WEIGHTSYNC_LIAR=target/debug/examples/liar WEIGHTSYNC_DIST=$$PWD/dist tests/e2e/prepare.sh
	$(CLUSTER_ENV) WEIGHTSYNC_CHART=$$PWD/dist/weightsync-$$(deploy/release.sh version).tgz WEIGHTSYNC_TEST_CPU=$(CPU) \
	cargo test --locked --workspace --test e2e -- --test-threads=$(CLUSTER_THREADS)

# Programs and benches at once, for the same reason as `programs`.
.PHONY: bench-programs
bench-programs:
	cargo build --release --locked --workspace --bins --benches --examples

.PHONY: bench
bench: bench-programs ## Run the benchmarks of docs/benchmarks.md on one host
	$(CLUSTER)/packages.sh
	cargo bench --locked --workspace --bench transport --bench host

.PHONY: bench-cluster
bench-cluster: bench-programs cluster-up ## Run the benchmarks of docs/benchmarks.md on a cluster
	tests/e2e/prepare.sh
	$(CLUSTER_ENV) cargo bench --locked --workspace --bench cluster

.PHONY: bench-scale
bench-scale: bench-programs ## Measure one controller with 50 and 500 objects (SCALE='20 --idle 60' for other runs; half an hour)
	$(CLUSTER)/control-plane.sh
	$(CLUSTER_ENV) cargo bench --locked --workspace --bench scale -- $(SCALE)

.PHONY: cluster-up
cluster-up: ## Start the kind cluster (first time: 15 minutes; then half a minute)
	$(CLUSTER)/up.sh

.PHONY: cluster-down
cluster-down: ## Delete the kind cluster, and the docker daemon that was started for it
	$(CLUSTER)/down.sh

.PHONY: venv
venv: ## Build the virtual environment with the real vLLM (first time: 5 minutes, 6 GB)
	$(CLUSTER)/vllm-venv.sh
