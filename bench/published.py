"""The published figures of ROLL Flash (arXiv 2510.11345) and AsyncFlow (arXiv 2507.01663), on the virtual clock: what the
paper says, what the paper's policy gives in this simulation, and what the production pipeline gives on the same setting.

The settings that the papers state are kept: counts of GPUs, prompts x responses, step latencies, ratios. How ROLL schedules is
taken from its released code (v0.1.3 of October 2025), as plain loops over the same simulated engines, environments and seeds
(`scheduling.py`, `published_sides.py`). What the papers leave open is ASSUMED below, before any figure was computed.

Machines. A decode step takes 1.5 ms + weights / bandwidth + 2 x parameters / FLOP/s for each request + cache bytes / bandwidth
for each token in the cache. A trained token costs 10 x parameters FLOP (forward, backward, recomputation, log-probabilities of
the old policy), a scored one 2. Weights travel at 5 GB/s; an optimizer step takes 1 s.

- GPU (ROLL Flash): 80 GB, 2.4 TB/s, 400 TFLOP/s generating, 350 training; one GPU is one engine, with at most 64 requests.
- NPU (AsyncFlow): 64 GB, 1.1 TB/s, 200 TFLOP/s generating, 150 training; an engine has 2 of them for 7B, 8 for 32B.
- 85% of the memory is for weights and cache. A token of cache: 147 KB (8B), 57 KB (7B), 262 KB (32B); 112 KB (0.6B, 1.7B),
  147 KB (4B).

RLVR (ROLL Flash, Qwen3-8B, 16 to 128 GPUs). A batch is 256 prompts x 16 responses, prompts of 256 tokens, a reward takes 1 s.
Base: log-normal, mean 2,000 tokens, sigma 1, cut at 16,384. Think: mean 11,000, sigma 0.8, cut at 32,768. *Synchronous*: all
GPUs generate, prompts are dealt to the engines in turn, then all GPUs train. *ROLL Flash*: ratio 2; the GPUs are split at the
balance point of the paper's own formula; at most ratio x batch prompts are in its buffer; a batch is the oldest prompts by the
step that they were started in, trained as a whole; engines stop while they load weights, and continue their requests. *Ours*:
the same split, max_lag 2. Scaling is throughput on 128 GPUs over that on 16.

Ratio sweep: 40 GPUs, 64 prompts x 8 responses, Qwen3 of 0.6B, 1.7B, 4B, 8B with the lengths of Think; 8B with means of 1,400,
2,800 and 5,500 tokens cut at 4,096, 8,192 and 16,384. The split is that of ratio 2. A ratio is enough if no higher one of the
sweep (1, 2, 4) is more than 5% faster.

Queue scheduling, prompt replication, environment-level asynchrony: as in `scheduling.py`. ROLL's queue counts *running* prompts
only: with no additional prompts, 8 run at any time until 8 with a signal are complete; the others are then aborted. Of a normal
latency (10 s, 10 s) the paper does not say what becomes of values below 0. Both readings are shown: drawn again, and 0.

Agents (ROLL Flash, 16 groups of 8, 8B on 8 GPUs, half of them for training where that is asynchronous). ALFWorld: 10 to 50
turns of 120 tokens on average (log-normal, sigma 0.8, cut at 1,024), observations of 100 tokens, steps of 1 s on average
(log-normal, sigma 1.5, cut at 300 s). SWE: 20 to 60 turns of 300 tokens (cut at 2,048), observations of 500, steps of 4 s. The
synchronous baseline has environment-level asynchrony already, as ROLL's synchronous pipeline. *ROLL Flash*: ratio 1; every
environment plays one episode after the other and may be 1 ahead; a batch is the first groups to finish; redundant: 20 groups
of 10, of which 16 groups of 8 are used. *Ours*: max_lag 1, once with as many environments as theirs, once with as many as
max_lag allows. The grid: 16, 20, 24 groups x 8, 10, 12 members, ALFWorld's rollouts alone, synchronous.

AsyncFlow (GRPO, Qwen2.5). A batch is 256 prompts x 16 responses, prompts of 256 tokens, responses log-normal, mean 1,000
tokens, sigma 0.6, cut at 2,048. Rollouts, reference and update have NPUs of their own, split at the balance point, reference
to update as their FLOP. *Sequential*: one task after the other. *Streaming*: groups pass through the tasks as they finish;
rollouts wait for the new weights. *Asynchronous workflow*: rollouts run one step ahead, and stop while they load weights.
*Ours*: max_lag 0 without lockstep, and max_lag 1. Linearity: throughput on 16x devices over 16x throughput, with the same
batch: 32 to 512 NPUs (7B), 64 to 1,024 (32B).

    .venv/bin/python bench/published.py [--json] [--smoke] [--seeds 10]
"""
