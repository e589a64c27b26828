"""The Trainer: its settings, the run in the ranks, and what it shows."""
