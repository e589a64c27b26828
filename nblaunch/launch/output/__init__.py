"""What ranks print and report, read by the kernel."""
