"""Every timeout and pause of the package, by room; a name ends in its unit."""

from __future__ import annotations

# ------------------------------------------------------------------ transfer, wire, machine
SEND_TIMEOUT_S = 10
"""For a send to a process that does not read; whole seconds."""
FDS_TAKEN_TIMEOUT_S = 600.0
"""For receivers to take descriptors in flight, once the system accepts no more."""
FDS_RETRY_INTERVAL_S = 0.005
"""Between attempts to send descriptors while too many are in flight."""
MEMORY_CHECK_INTERVAL_S = 1.0
"""Between checks of free memory while sent data is cached."""

# ------------------------------------------------------------------ ranks

# ------------------------------------------------------------------ engines

# ------------------------------------------------------------------ launch: groups, tasks, stopping

# ------------------------------------------------------------------ launch: plans, output, results
STOP_GRACE_S = 30.0
"""The default of ``stop_grace``: how long an interrupted rank has for ``finally`` blocks and checkpoints."""

# ------------------------------------------------------------------ launch: views

# ------------------------------------------------------------------ notebook

# ------------------------------------------------------------------ training
