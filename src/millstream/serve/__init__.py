"""Services over HTTP for engines, agents and training loops in any language. They translate requests to the packages below,
and decide nothing themselves.

openai/   a model: chat completions, completions, sessions store/    the store: prompts, experience, notices of new weights;
`store.client` is its client in Python auth.py   tokens, and the limit of requests at once        http.py  request bodies and
responses        listen.py  the socket"""
