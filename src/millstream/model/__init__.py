"""What the engine and the learner share of transformers: loading, saving, and attention over packed rows.

Models are used through transformers' attention interface; no model's code is copied. Imports torch, but for `where` and
`lora`: only the two torch stations and `runtime` import this package.
"""
