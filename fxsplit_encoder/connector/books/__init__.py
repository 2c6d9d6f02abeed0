"""What the connector knows, and how it may change: no threads, no devices, one call at a time."""
