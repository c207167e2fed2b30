"""Virtual engines, environments and learners: the shipped fakes of the seams. They run on the virtual clock with the
production pipeline, admission rule and store unchanged, and import neither torch nor transformers.

What they do takes virtual time, and every draw comes from the seed of the request, of the rollout or of the part: the same run
gives the same trace."""
