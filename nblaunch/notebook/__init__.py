"""The only room that imports IPython."""
