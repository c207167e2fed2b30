"""The command line: parses and shows; no logic."""
