#!/bin/sh
# ssh asks this which host keys it may believe: those that the nodes share, from any of them.
for key in /home/trainer/.ssh/id_ed25519 /home/trainer/.ssh/id_rsa; do
    if [ -r "$key" ]; then printf '* %s\n' "$(ssh-keygen -y -f "$key")"; fi
done
