# make demo: the small world, trained on this machine. make test, make check: what CI runs. make chaos: 50 kills each in
# and around checkpoint writes, in weight publishes and in learner steps. make chaos-matrix: every kind of fault.
# Each installs what is missing into .venv first.
PYTHON ?= python3.11
BIN := .venv/bin
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1

.PHONY: demo test test-cluster test-configs check chaos chaos-matrix publishes memory watch experiment-smoke clean

.venv/installed: requirements.txt requirements-dev.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

demo: .venv/installed
	rm -rf outputs/demo
	$(BIN)/python launch.py train output_dir=outputs/demo $(ARGS)

test: .venv/installed
	$(BIN)/python -m pytest -q -n 2 --dist worksteal $(ARGS)

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

chaos: .venv/installed
	$(BIN)/python -m tests.chaos --kills 50 $(ARGS)
	$(BIN)/python -m tests.chaos_kills publish --kills 50 $(ARGS)
	$(BIN)/python -m tests.chaos_kills update --kills 50 $(ARGS)

chaos-matrix: .venv/installed
	$(BIN)/python -m tests.chaos_matrix $(ARGS)

publishes: .venv/installed
	$(BIN)/python -m tests.publishes --count 50 $(ARGS)

memory: .venv/installed
	$(BIN)/python -m tests.memory $(ARGS)

# What people watch, with Debian's Prometheus and with wandb beside the rest; without them those tests are skipped.
watch: .venv/installed .venv/prometheus/usr/bin/prometheus .venv/wandb
	$(BIN)/python -m pytest -q tests/watch $(ARGS)

.venv/prometheus/usr/bin/prometheus: | .venv/installed
	mkdir -p .venv/prometheus
	cd .venv/prometheus && apt-get download prometheus && dpkg -x prometheus_*.deb . && touch usr/bin/prometheus

.venv/wandb: | .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $@ wandb==0.31.0
	touch $@

# Every cell of every experiment on the CPU, one seed, two iterations of a few videos, and its report: shows that they
# run, and nothing else. About ten minutes on two cores.
experiment-smoke: .venv/installed
	rm -rf outputs/smoke
	$(BIN)/python launch.py experiment table2_a figure8 figure3 ours figure7 table2_b --budget smoke \
		--runs outputs/smoke/runs --scratch outputs/smoke/work $(ARGS)
	$(BIN)/python -m sage_ray.experiment.gradient_norm --prompts 2 --out outputs/smoke/report
	$(BIN)/python launch.py report all --budget smoke --runs outputs/smoke/runs --out outputs/smoke/report

# Deployment files against the clouds' models, and ray up on hosts that are namespaces of this machine: as root, with
# iproute2, openssh-server and rsync, which it installs where apt-get is there.
.venv/installed-cluster: .venv/installed requirements-cluster.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-cluster.txt
	touch $@

test-cluster: .venv/installed-cluster
	command -v ip rsync /usr/sbin/sshd > /dev/null || apt-get install -y -qq iproute2 openssh-server rsync
	SAGE_HOSTS=1 $(BIN)/python -m pytest -q -n 0 tests/deploy tests/cluster_hosts \
		tests/cluster/test_sweep.py tests/cluster/test_faults.py tests/cluster/test_elastic.py $(ARGS)

# 10,000 damaged configurations; the tests take 200.
test-configs: .venv/installed
	SAGE_CONFIGS=10000 $(BIN)/python -m pytest -q -n 0 --timeout 7200 tests/config/test_mutated_configs.py $(ARGS)

clean:
	rm -rf .venv outputs
