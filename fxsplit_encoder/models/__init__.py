"""Published models: their vision towers built, loaded and run eagerly, and their images made to inputs."""
