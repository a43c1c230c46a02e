#!/bin/sh
# Build the images, cpu and cuda unless others are named: sh docker/build.sh cpu
#
# Works with Docker (buildx), Podman or Buildah. The images' tags contain the project's version, the
# target and the lock's torch: imagenet-horovod-ddp:0.1.0-cpu-torch2.15.0. imagenet-horovod-ddp:cpu
# is the last build. Variables, from the environment or after `make images`:
#   BUILDER=podman       docker, podman or buildah (default: the first that works)
#   BASE=image           a Debian 12 image (default: debian:bookworm-slim)
#   IMAGE_NAME=mine/it   the image's name, before the colon of its tag
#   PIP_CONFIG=file      a pip.conf with your index or mirror, used in the build only
#   CA_BUNDLE=file       certificates for pip (your proxy's), used in the build only
set -eu

fail() {
    echo "images: $1" >&2
    exit 1
}

can_build() {
    case $1 in
        docker) docker buildx ls ;; # fails if there is a client but no engine
        podman | buildah) "$1" version ;;
        *) false ;;
    esac >/dev/null 2>&1
}

[ $# -gt 0 ] || set -- cpu cuda
for target; do
    case $target in
        cpu | cuda | test) ;;
        *) fail "there is no target '$target': choose from cpu, cuda, test" ;;
    esac
done
builder=${BUILDER:-}
for one in docker podman buildah; do
    if [ -z "$builder" ] && can_build $one; then builder=$one; fi
done
help="Start Docker's engine with buildx, or install Podman."
[ "$builder" ] || fail "no builder works here. $help"
can_build "$builder" || fail "$builder does not work here. $help"

root=$(realpath "$(dirname "$0")/..")
# The time stamp of everything in the image. It is the time of the lock's last change, so that a change
# of the sources does not change the layers of the packages.
lock=$root/requirements.lock
epoch=${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct "$lock" 2>/dev/null || true)}
[ "$epoch" ] || fail "no git history here to take a time from: set it, as in SOURCE_DATE_EPOCH=0."
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/pyproject.toml")
# The lock's last line of torch is for the newest Pythons, Debian 12's among them.
torch=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' "$lock" | tail -n 1)
revision=$(git -C "$root" describe --always --abbrev=12 --dirty=+ 2>/dev/null || echo unknown)
name=${IMAGE_NAME:-imagenet-horovod-ddp}

for target; do
    set -- --file "$root/docker/Dockerfile" --target "$target" \
        --tag "$name:$version-$target-torch$torch" --tag "$name:$target" \
        --build-arg "SOURCE_DATE_EPOCH=$epoch" --build-arg "VERSION=$version" \
        --build-arg "REVISION=$revision"
    [ -z "${BASE:-}" ] || set -- "$@" --build-arg "BASE=$BASE"
    [ -z "${PIP_CONFIG:-}" ] || set -- "$@" --secret "id=pip_config,src=$(realpath -m "$PIP_CONFIG")"
    [ -z "${CA_BUNDLE:-}" ] || set -- "$@" --secret "id=ca_bundle,src=$(realpath -m "$CA_BUNDLE")"
    if [ "$builder" = docker ]; then
        set -- docker buildx build --load "$@"
    else # --timestamp also sets the times of all files
        set -- "$builder" build --layers --timestamp "$epoch" "$@"
    fi
    echo "images: $target: $* $root"
    "$@" "$root" </dev/null || fail "$target failed; see the reason above."
done
