"""The Accelerator: the bases that it is made of, and how it prepares what a loop uses."""
