"""Tools that set things up: the environment, JPEG files, several hosts on one machine."""
