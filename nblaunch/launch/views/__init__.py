"""What shows a launch: the interface and its text form."""
