"""The only place that knows all stations: the pipeline, the admission rule, and the runtimes that run them."""
