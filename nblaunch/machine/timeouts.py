"""Every timeout and pause of the package, by room; a name ends in its unit."""

from __future__ import annotations

# ------------------------------------------------------------------ transfer, wire, machine

# ------------------------------------------------------------------ ranks

# ------------------------------------------------------------------ engines

# ------------------------------------------------------------------ launch: groups, tasks, stopping

# ------------------------------------------------------------------ launch: plans, output, results
STOP_GRACE_S = 30.0
"""The default of ``stop_grace``: how long an interrupted rank has for ``finally`` blocks and checkpoints."""

# ------------------------------------------------------------------ launch: views

# ------------------------------------------------------------------ notebook

# ------------------------------------------------------------------ training
