"""The config that `millstream init` writes: the few keys that a first run needs, each with a comment."""

TEMPLATE = """\
# A Millstream run: `millstream train THIS_FILE`. Every key can be changed on the command line: --set pipeline.max_lag=2
# `--dry-run` finds what a start would, and calls the reward once; `--show-config` prints all keys with their values.

seed = 0

[model]
path = "path/to/model"            # a Hugging Face checkpoint with its tokenizer: a folder, or a name on the hub

[data]
path = "data.jsonl"               # one object a line
prompt_key = "prompt"             # a string, or a list of {role, content} messages
answer_key = "answer"             # what the reward compares with; optional
# system = "Think step by step."  # makes a chat of every prompt that is a string, for a model with a chat template
holdout = 64                      # tasks kept for evaluation: the mean reward on them is the run's accuracy

[[reward]]
function = "exact_match"          # or one of your own: "my_reward.py:reward", with  def reward(task, completion) -> float
timeout_s = 30.0

[rollout]
group_size = 8                    # rollouts of each prompt
max_tokens = 256                  # tokens of an answer, at most
temperature = 1.0

[pipeline]
steps = 100
groups_per_step = 16              # prompts a step: 16 x 8 rollouts
max_lag = 1                       # how stale a sample may be, in versions; 0 is synchronous

[algorithm]
name = "truncated_is"             # or "grpo", "dapo", "cispo", "gspo", ...: docs/algorithms.md

[learner]
learning_rate = 1e-6
"""
