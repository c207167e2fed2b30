"""Services over HTTP, so that engines, agents and training loops in any language can take part. Nothing here decides anything:
it reads what was sent, asks the parts below, and says what they answered.

serve.store     the store: prompts, experience, notice of new weights
serve.client    the same from Python
serve.openai    a model: chats, completions, sessions
"""
