"""The protocol between two processes: messages, channels, and the files and variables that both use."""

from __future__ import annotations

RANK = "NBLAUNCH_RANK"
"""The rank. Set in ranks and their child processes, and nowhere else."""
MATPLOTLIB_BACKEND = "module://nblaunch.ranks.matplotlib_backend"
"""The value of ``MPLBACKEND`` in ranks whose notebook has a backend that needs a kernel."""
BELOW_AGENT = "NBLAUNCH_BELOW_AGENT"
"""The agent's pid, in agents and all below. Slurm sends SIGTERM to every process of a node that it takes back: there
fork servers and reapers ignore it, and ranks take it as an interrupt."""
AGENT_FOLDER = "NBLAUNCH_AGENT_FOLDER"
"""The agent's folder, there too: fork servers and reapers remove it if the agent was killed."""
