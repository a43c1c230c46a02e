#!/usr/bin/env bash
# Installs what the tests need from Debian or Ubuntu, if it is missing: bash tools/debian_packages.sh
#
# One line a thing: the command, library or folder that must be there, and the packages that bring it,
# the first that the distribution has. (Ubuntu's chromium-browser is a link to a snap, which
# containers cannot run, so it stands last. Slurm's PMIx plugin looks for libpmix.so by that name.)
set -euo pipefail
NEEDED="
chromium|google-chrome|chromium-browser : chromium chromium-browser
ip : iproute2
sshd : openssh-server
ssh : openssh-client
munged : munge
slurmctld : slurm-wlm
libpmix.so : libpmix-dev
/usr/share/datasets/fashion-mnist : dataset-fashion-mnist
"

is_there() {  # is_there NAME|NAME...
    local command
    for command in ${1//|/ }; do
        if command -v "$command" >/dev/null; then return 0; fi
        if [ -d "$command" ]; then return 0; fi
        if compgen -G "/usr/lib/*/$command" >/dev/null; then return 0; fi
    done
    return 1
}

missing=()  # lines of NEEDED
while read -r commands _ packages; do
    if [ -n "$commands" ] && ! is_there "$commands"; then missing+=("$commands $packages"); fi
done <<<"$NEEDED"
if [ ${#missing[@]} -eq 0 ]; then exit 0; fi

if ! command -v apt-get >/dev/null; then
    printf 'missing: %s; install it with the package manager of this system\n' "${missing[@]%% *}" >&2
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    printf 'missing: %s; run this as root:\n' "${missing[@]%% *}" >&2
    printf '    sudo bash %q\n' "$(realpath "$0")" >&2
    exit 1
fi

export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
quietly() { "$@" >"$log" 2>&1 || { cat "$log" >&2; return 1; }; }  # speaks when it fails

quietly apt-get update
packages=()
for line in "${missing[@]}"; do
    found=""
    for package in ${line#* }; do
        if apt-cache show "$package" >/dev/null 2>&1; then found=$package; break; fi
    done
    if [ -z "$found" ]; then
        echo "apt-get knows no package for ${line%% *} (tried: ${line#* })" >&2
        exit 1
    fi
    packages+=("$found")
done
echo "installing ${packages[*]}"
quietly apt-get install --yes --no-install-recommends "${packages[@]}"
