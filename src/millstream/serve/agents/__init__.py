"""Agents that are programs of their own: they call the run's engines over OpenAI's API, and do not know that they are trained.

gateway        the HTTP service of a run: each rollout has a key of its own, its calls become the parts of the rollout
program        one start of a command or call of a function, with its folder, output and time
environment    the environment `agent`: a session, a program, a reward
"""
