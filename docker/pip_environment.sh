# Sourced inside a build: pip's configuration and certificates, from the user's secrets (PIP_CONFIG and
# CA_BUNDLE of docker/build.sh). They are in no image.
# shellcheck shell=sh
if [ -s /run/secrets/pip_config ]; then export PIP_CONFIG_FILE=/run/secrets/pip_config; fi
if [ -s /run/secrets/ca_bundle ]; then export PIP_CERT=/run/secrets/ca_bundle; fi
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off
