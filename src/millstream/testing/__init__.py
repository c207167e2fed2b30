"""What a user's own parts can be held to. Needs pytest: `pip install pytest`."""
