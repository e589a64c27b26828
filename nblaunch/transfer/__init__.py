"""Objects and memory on their way between processes."""
