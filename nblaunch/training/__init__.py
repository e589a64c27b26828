"""The training toolkit: usable in a launch, under torchrun, and in one process; nothing here needs a notebook."""
