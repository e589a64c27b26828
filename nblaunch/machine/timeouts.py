"""Timeouts and pauses that several modules use; others stand where they are used. A name ends in its unit."""

from __future__ import annotations

# ------------------------------------------------------------------ ranks
WATCH_POLL_S = 0.5
"""Between checks of watched processes on systems without pidfds."""
PROGRESS_INTERVAL_S = 0.1
"""Between two progress records of one bar."""

# ------------------------------------------------------------------ engines
SERVER_KILL_TIMEOUT_S = 5.0
"""For a killed fork server to exit; one in uninterruptible sleep exits later."""
SERVER_IDLE_TIMEOUT_S = 600.0
"""Without a launch before a fork server ends; the next cell starts one again."""
QUEUE_POLL_S = 1.0
"""Between two questions about a queued job."""
PROGRAM_TIMEOUT_S = 20.0
"""For a program of an engine to answer, such as squeue or ``ssh -G``."""
NODES_CANCEL_TIMEOUT_S = 5.0
"""After an interrupt or a release, for the wait for nodes to end, with what it has started."""
NODES_POLL_S = 0.2
"""Between two looks at an engine that has not yet started all agents."""
AGENT_EXIT_TIMEOUT_S = 3.0
"""For agents to exit that were told to, before what has started them is ended."""


# ------------------------------------------------------------------ launch: groups, tasks, stopping
LOG_POLL_S = 0.05
"""Between two reads of the ranks' logs."""
QUEUED_NOTE_DELAY_S = 0.5
"""For a question or a restart to have the ranks of a session before a note says what it waits for."""
GROUP_BEGIN_TIMEOUT_S = 10.0
"""For the engine to answer; then a fork of the kernel is given up, and a fork server is woken."""
GROUP_SWEEP_TIMEOUT_S = 8.0
"""For the last event of a group after every rank has exited."""
GROUP_DEAF_TIMEOUT_S = 6.0
"""For killed ranks to exit; the reaper itself gives up on one after 5 s."""
GROUP_TRANSFER_TIMEOUT_S = 120.0
"""For what ranks of other machines have written to arrive, after their end."""
PEER_FAILURE_WAIT_S = 0.1
"""Between the first failure and the stop of the other ranks, which may report failures of their own."""
RESULT_FAILURE_WAIT_S = 5.0
"""The same if only a result could not be sent: the others may still return theirs."""
FAILURE_NOTE_DELAY_S = 0.5
"""Between the first failure and a note of it, if other ranks still run."""
THREADS_NOTE_DELAY_S = 5.0
"""For a returned rank's threads to end before a note names the wait."""
EXIT_TIMEOUT_S = 30.0
"""For a rank's exit (atexit functions, torch's clean-up) after its threads have ended."""
STOP_EXIT_TIMEOUT_S = 1.0
"""The same while the other ranks are being stopped."""
ACK_TIMEOUT_S = 3.0
"""For the acknowledgement of SIGINT. Python handles it between two instructions: a large product delays it."""
STUCK_POLL_S = 1.0
"""Between two looks at the collectives that ranks have begun."""
STUCK_AFTER_S = 10.0
"""Without a new collective on any rank before the ranks are asked whether they wait."""
STUCK_REPEAT_S = 5.0
"""Before waiting ranks are asked again."""
FREE_DELAY_S = 0.5
"""After its interrupt before a kept rank that does not respond is freed from a collective."""
FREE_AFTER_FAILURE_S = 0.1
"""The same after another rank has failed and can no longer join the collective."""
FREE_INTERVAL_S = 1.0
"""Before a kept rank that still does not respond is freed again: a later collective may wait too."""
KEPT_EXIT_TIMEOUT_S = 5.0
"""For the ranks of a stopped session to exit before they are killed."""
RANK_ANSWER_TIMEOUT_S = 60.0
"""For restarted ranks to answer the first time: spawned ones import torch."""
QUESTION_TIMEOUT_S = 0.3
"""For idle kept ranks to answer a completion or an inspection."""
QUESTION_STOP_TIMEOUT_S = 0.2
"""For kept ranks to answer after they were interrupted, before the question is given up."""
QUESTION_FREE_TIMEOUT_S = 2.5
"""The same for an expression of the user's, which is freed from collectives meanwhile."""
SESSION_POLL_S = 0.5
"""Between checks whether a session has been idle for too long."""
STACKS_TIMEOUT_S = 2.0
"""For a rank to answer with its stacks."""
TIMEOUT_STACKS_S = 1.0
"""For the stacks of a launch that has timed out, before it is stopped."""
STACKS_SIGNAL_DELAY_S = 1.0
"""Before a rank that has not answered is sent the signal, at most half of the timeout: C code may hold the GIL."""
STACKS_QUEUE_TIMEOUT_S = 4.0
"""For a supervisor to start on a request for stacks: an earlier one may be pending."""
KILLED_LAUNCH_TIMEOUT_S = 3.0
"""For a launch to end that an interrupt has killed during its start."""


# ------------------------------------------------------------------ launch: debugging
COLLECTIVE_TIMEOUT_S = 1800.0
"""How long ranks may wait in a collective, as in torch's gloo. Time in which the user debugs a rank does not count."""
TYPED_CHECK_INTERVAL_S = 1.0
"""Of a rank that waits for a line, between checks for an interrupt: Python misses one that comes as a wait begins."""
STEP_TIMEOUT_S = 1.0
"""How long a rank that steps stays in front, until another one that has stopped takes its place."""
LOOK_TIMEOUT_S = 2.0
"""For a rank to answer a look: its threads wait while C code runs that holds the GIL."""

# ------------------------------------------------------------------ launch: views
SIGNAL_CHECK_INTERVAL_S = 0.5
"""Longest uninterrupted wait of a main thread. Python misses a signal that arrives as a wait begins, until it ends."""

# ------------------------------------------------------------------ notebook
RESOURCE_SAMPLE_INTERVAL_S = 1.0
"""Pause between two samples of the ranks' CPU, memory and GPU."""
