"""Every timeout and pause of the package, by room; a name ends in its unit."""

from __future__ import annotations

# ------------------------------------------------------------------ transfer, wire, machine

# ------------------------------------------------------------------ ranks

# ------------------------------------------------------------------ engines

# ------------------------------------------------------------------ launch: groups, tasks, stopping

# ------------------------------------------------------------------ launch: plans, output, results

# ------------------------------------------------------------------ launch: views
TEXT_EMIT_INTERVAL_S = 0.2
"""Minimum pause between two emissions of the text view. Jupyter drops output beyond its rate limits."""
TEXT_MESSAGE_INTERVAL_S = 0.1
"""Minimum pause of the text view for each message sent."""
SIGNAL_CHECK_INTERVAL_S = 0.5
"""Longest uninterrupted wait of a main thread. Python misses a signal that arrives as a wait begins, until it ends."""

# ------------------------------------------------------------------ notebook

# ------------------------------------------------------------------ training
