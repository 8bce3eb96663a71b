"""Where a backward pass leaves the samples until they are taken."""
