"""Asynchronous encoding above the manager: media in, features at their placeholder tokens out."""
