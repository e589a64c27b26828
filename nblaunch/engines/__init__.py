"""Where ranks run: engines place and start the processes of a worker group."""
