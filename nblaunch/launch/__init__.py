"""What runs in the kernel: planning a launch, starting it, watching it, bringing its results back."""
