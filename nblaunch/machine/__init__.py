"""Facts of this machine and its processes, without torch."""
