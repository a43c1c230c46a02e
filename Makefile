# `make compare` and `make test` do everything, the set-up included. Settings:
#   VENV=path            where everything is installed (default .venv)
#   PYTHON=python3.12    the Python that the environment is made with (default python3)
#   ARGS="--help"        options for compare/run.py, benchmarks/run.py or pytest
#   TORCH=2.12.1         another torch than the lock's, 2.10 or newer, with its torchvision; lock: back
#   MPI=system           build Horovod with the MPI on PATH, not with the wheel's
#   NCCL=1               build Horovod with NCCL though no GPU is here (a login node); 0: without
#   WITHOUT_HOROVOD=1    set up without a compiler: all but horovod_train/
.DEFAULT_GOAL := help
.PHONY: help setup compare bench bench-gpu gpu-check doctor test test-all test-full test-cluster faults lint lock images clean

VENV ?= .venv
PYTHON ?= python3
ARGS ?=
BIN := $(abspath $(VENV))/bin
# horovodrun looks for mpirun on PATH.
IN_VENV := PATH="$(BIN):$$PATH"

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20
	@sed -n '2,/^\.DEFAULT/s/^#   /  /p' $(MAKEFILE_LIST)

setup:  ## create the environment, install everything, build Horovod
	@VENV="$(VENV)" TORCH="$(TORCH)" MPI="$(MPI)" NCCL="$(NCCL)" WITHOUT_HOROVOD="$(WITHOUT_HOROVOD)" \
		PYTHON="$(if $(filter file,$(origin PYTHON)),,$(PYTHON))" $(PYTHON) tools/set_up.py

compare: setup  ## measure both engines over each transport, on the digits, and report
	$(IN_VENV) python compare/run.py $(ARGS); status=$$?; \
		$(IN_VENV) python compare/report.py && exit $$status

bench: setup  ## measure how fast all this is, against its goals (ARGS="--only checkpoints", "--help")
	$(IN_VENV) python benchmarks/run.py $(ARGS)

bench-gpu: setup  ## the same on this machine's GPU
	$(IN_VENV) python benchmarks/run.py --gpu $(ARGS)

gpu-check: setup  ## ten to fifteen minutes on a GPU, and one file to send back (ARGS=--dry: on the CPU; see docs/gpu.md)
	$(IN_VENV) python -m pytest tests -m gpu --junitxml runs/gpu-check-$$(date -u +%Y%m%d-%H%M%S).xml $(ARGS)

doctor: setup  ## say what this machine can run (ARGS="--hosts a:4,b:4": those hosts)
	$(IN_VENV) python compare/doctor.py $(ARGS)

test: setup  ## run the tests that a change has to pass (ARGS="-k resume": some of them)
	$(IN_VENV) python tests/run.py "not full" $(ARGS)

test-all: setup  ## run all tests, with the rarest pairs of launchers and the long benchmarks
	$(IN_VENV) python tests/run.py "full or not full" $(ARGS)

test-full: setup  ## run only those that test-all has and test has not
	$(IN_VENV) python tests/run.py full $(ARGS)

test-cluster: setup  ## run those that need several hosts (network namespaces, Slurm; as root)
	$(IN_VENV) python -m pytest tests/cluster $(ARGS)

faults: setup  ## kill, stop, starve and cut off trainings, and resume them: three hours or more (ARGS="--trials 1")
	$(IN_VENV) python tests/faults/campaign.py $(ARGS)

lint: setup  ## check style, types, imports and spelling
	$(IN_VENV) ruff check .
	$(IN_VENV) ruff format --check .
	$(IN_VENV) mypy
	$(IN_VENV) lint-imports
	$(IN_VENV) codespell

lock: setup  ## write requirements.lock anew from pyproject.toml
	$(IN_VENV) uv pip compile pyproject.toml --extra horovod --extra dev --universal \
		--python-version 3.10 --no-header --no-annotate --quiet -o requirements.lock

images:  ## build the container images (ARGS="cpu": one; see docs/containers.md)
	@sh docker/build.sh $(ARGS)

clean:  ## delete the environment and what tools have cached here (runs/ stays)
	if [ -f "$(VENV)/pyvenv.cfg" ]; then rm -rf "$(VENV)"; fi
	rm -rf *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path "./.git/*" -prune -exec rm -rf {} +
