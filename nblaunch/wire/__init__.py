"""What two processes agree on: messages, the channel, and the files both sides use."""
