"""Saved states: the folder that they stand in, and what of a loop they hold."""
