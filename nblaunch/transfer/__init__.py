"""Moves objects and memory between processes."""
