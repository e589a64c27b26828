"""What runs in the fork server, in reapers and in ranks. Never imports IPython, ipywidgets or nblaunch.launch."""
