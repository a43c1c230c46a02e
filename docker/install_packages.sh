#!/bin/sh
# Inside a build: make /opt/venv and install what the project needs, in the lock's versions.
# `without-gpu-only-files` leaves out files that only a process with a GPU opens.
set -eu
# shellcheck source=docker/pip_environment.sh
. /tmp/build/pip_environment.sh

# The lock also holds developers' tools, which an image does not need. So it serves as a constraint,
# and pyproject.toml names the packages. The project is installed as editable, as outside of images:
# its folders are still empty here, and a later layer fills them.
cd /workspace
cp /tmp/build/pyproject.toml .
touch README.md LICENSE
mkdir -p recipe horovod_train ddp_train compare
python3 -m venv /opt/venv
export PIP_CONSTRAINT=/tmp/build/requirements.lock # for pip's own build environment too
/opt/venv/bin/python -m pip install --no-cache-dir --no-compile --editable ".[horovod]"
rm -rf pyproject.toml README.md LICENSE recipe horovod_train ddp_train compare ./*.egg-info

if [ "${1:-}" = without-gpu-only-files ]; then
    # A torch for CUDA links most of its libraries even without a GPU: those must stay. It opens these
    # two only when a tensor is on a GPU (cuDNN's parts) or a kernel is compiled for one (triton).
    site=$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
    rm -rf "$site"/triton "$site"/triton-*.dist-info "$site"/nvidia/cudnn/lib/libcudnn_*
fi

# Compiled files that do not depend on time stamps, because all times in the layer are set to one value.
# A few files of torch are for newer Pythons and cannot be compiled: like pip, this ignores them. -f:
# pip's own files are already compiled, with time stamps.
/opt/venv/bin/python -m compileall -q -f --invalidation-mode unchecked-hash /opt/venv/lib || true
rm -rf /root/.cache /tmp/*
