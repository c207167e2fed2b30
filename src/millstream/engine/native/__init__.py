"""Our own engine: continuous batching over any causal LM of transformers.

The path of a request: `engine.TorchEngine` sends it as a command to a `worker` (on a thread, or in a process: `process`, and
`remote` on a cluster), whose decode loop calls `batching.Batcher.step`. The batcher decides what is computed; a `runner.Runner`
computes it:

    cache    device  runner             operations of a layer            fused layers  decode step         chosen by
    slots    CPU     slots.SlotRunner   plain.PLAIN, attention of slots  yes           eager               default on a CPU
    slots    GPU     slots.SlotRunner   transformers' own, our attention no            eager               cache = "slots"
    pages    CPU     paged.PagedRunner  plain.PLAIN                      yes           eager               cache = "pages"
    pages    GPU     paged.PagedRunner  kernels.KERNELS                  yes           graphs, one ahead   default on a GPU

Each fast path has a plain twin, and a test that they agree:

    fast path                                  plain twin                                     test
    kernels.KERNELS (Triton)                   plain.PLAIN (torch)                            test_gpu_engine
    layer_kernels, attention_kernels (Triton)  plain.PLAIN (torch)                            test_layer_kernels
    fused.fuse (joined products, one norm)     the library's layers; check.check_engine       test_fused, test_paged
    fused_layer.fuse_layers (5 operations)     the library's layers; check.check_engine       test_fused, test_paged
    graphs.Graphs (replayed decode step)       the same step, launched kernel by kernel       test_paged, test_gpu_engine
    paged.PagedRunner (pages, shared prefixes) slots.SlotRunner                               test_paged
    slots.SlotRunner (continuous batching)     transformers, one request at a time            test_engine

At every start `check.check_engine` compares what the chosen runner samples with the library's own pass: a model that differs is
run without fused layers, or refused. One that cannot be captured is run without graphs. `Runner.path` says which it is and why;
a worker reports it (`WorkerReport.path`), and the engine emits it as the event `PathChosen`.
`sampling` draws a token from its request's own random number, so that it does not depend on the batch.
"""
