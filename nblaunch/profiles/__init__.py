"""What ranks do with their time: the reading of their recordings, in a process of its own, and the comparison."""
