#!/bin/sh
# Inside a build: compile Horovod with the project's script, which ends with a checked allreduce on two
# ranks, and install it below /horovod, from where it is copied.
set -eu
# shellcheck source=docker/pip_environment.sh
. /tmp/build/pip_environment.sh
apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends g++ python3-dev
# Gloo crashes on a host that cannot resolve its own name, and not every builder makes it resolvable.
name=$(cat /proc/sys/kernel/hostname)
if ! getent hosts "$name" >/dev/null; then echo "127.0.0.1 $name" >>/etc/hosts; fi
export XDG_CACHE_HOME=/mnt/cache
build() { /opt/venv/bin/python /tmp/build/build_horovod.py --mpi wheel "$@"; }
key=$(build "$1" --print-key | tail -n 1)
build "$1"
/opt/venv/bin/python -m pip install --root /horovod --ignore-installed \
    --no-deps --no-index --no-cache-dir --no-compile \
    "/mnt/cache/imagenet-horovod-ddp/horovod-wheels/$key"/horovod-*.whl
/opt/venv/bin/python -m compileall -q --invalidation-mode unchecked-hash -s /horovod -p / /horovod
