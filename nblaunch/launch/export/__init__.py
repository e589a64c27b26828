"""Export of cells and functions as scripts for torchrun."""
