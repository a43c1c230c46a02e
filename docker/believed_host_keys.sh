#!/bin/sh
# Prints the host keys that ssh may trust: the key that all nodes share, for every host.
for key in /home/trainer/.ssh/id_ed25519 /home/trainer/.ssh/id_rsa; do
    if [ -r "$key" ]; then printf '* %s\n' "$(ssh-keygen -y -f "$key")"; fi
done
