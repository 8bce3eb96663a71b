"""The experiments: tasks, models, the one training loop, rows on disk, statistics."""
