"""The threads around the books: CPU workers, workers with an encoder each, and two that watch the time."""
