"""From a callable over static buffers to something that replays. Knows nothing of models."""
