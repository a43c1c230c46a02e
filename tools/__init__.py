"""What sets things up: the environment, JPEG files, hosts on one machine."""
