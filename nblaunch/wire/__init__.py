"""The protocol between two processes: messages, channels, and the files that both use."""
