"""nblaunch in kernels with the versions that hosted notebooks have: one file of requirements for each platform."""
