"""Virtual engines, environments and learners: the shipped fakes of the seams. They run on the virtual clock with the
production pipeline, admission rule and store unchanged, and import neither torch nor transformers."""
