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
SPARE_DELAY_S = 0.05
"""Without a launch before the fork server forks spare ranks: the present launch needs the CPUs."""
SPARE_IDLE_TIMEOUT_S = 60.0
"""Without a launch before spare ranks exit; the next launch brings others."""
KERNEL_EXIT_TIMEOUT_S = 2.0
"""After the kernel's exit for reapers and successors to exit before the fork server kills them."""
KERNEL_EXIT_POLL_S = 0.1
"""Between checks for their exits."""
WATCH_POLL_S = 0.5
"""Between checks of watched processes on systems without pidfds."""
SWEEP_TIMEOUT_S = 5.0
"""For killed descendants to exit."""
SWEEP_POLL_S = 0.02
"""Between two rounds of a sweep without a child's exit."""
TRACKER_TIMEOUT_S = 2.0
"""For multiprocessing's resource trackers to unlink shared memory once its users are dead."""
TRACKER_KILL_TIMEOUT_S = 0.5
"""The end of a sweep in which resource trackers are killed too."""
FORK_WAIT_S = 0.5
"""For a library's threads to go idle before a rank forks."""
MIN_FORK_WAIT_S = 0.01
"""The same for threads that never go idle, after repeated timeouts."""
FORK_POLL_S = 0.0005
"""Between checks of these threads."""
PROGRESS_INTERVAL_S = 0.1
"""Between two progress records of one bar."""

# ------------------------------------------------------------------ engines

# ------------------------------------------------------------------ launch: groups, tasks, stopping

# ------------------------------------------------------------------ launch: plans, output, results
STOP_GRACE_S = 30.0
"""The default of ``stop_grace``: how long an interrupted rank has for ``finally`` blocks and checkpoints."""

# ------------------------------------------------------------------ launch: views
TEXT_EMIT_INTERVAL_S = 0.2
"""Minimum pause between two emissions of the text view. Jupyter drops output beyond its rate limits."""
TEXT_MESSAGE_INTERVAL_S = 0.1
"""Minimum pause of the text view for each message sent."""
SIGNAL_CHECK_INTERVAL_S = 0.5
"""Longest uninterrupted wait of a main thread. Python misses a signal that arrives as a wait begins, until it ends."""

# ------------------------------------------------------------------ notebook
PANEL_SHOW_DELAY_S = 0.1
"""A launch that ends sooner shows only its record, if the record holds everything."""
PANEL_SEND_INTERVAL_S = 0.125
"""Pause between two messages to the page: with display updates they stay below ten a second."""
PANEL_HEARTBEAT_INTERVAL_S = 2.0
"""Longest silence to the page. After 5 s of silence, the page no longer interrupts the kernel for a click."""
RESOURCE_SAMPLE_INTERVAL_S = 1.0
"""Pause between two samples of the ranks' CPU, memory and GPU."""
LOG_TIME_RESOLUTION_S = 0.2
"""Bytes of a log that arrive within this time get one time."""
SHELL_SERVE_INTERVAL_S = 0.1
"""Pause between two looks at the kernel's shell channel while a cell waits for its launch."""
BUSY_STATUS_INTERVAL_S = 1.0
"""Pause between two "busy" statuses for a page that connects while a cell runs."""
BUSY_STATUS_DURATION_S = 5.0
"""How long a page that connects is sent "busy" statuses: the threads that answer it report "idle"."""

# ------------------------------------------------------------------ training
