"""Facts about this machine and its processes, without torch."""
