"""The networks of the experiments, one a file."""
