"""The threads around the books: CPU workers, workers with an encoder each, and one that watches the time."""
