"""Every causal LM of the installed transformers through the passes of engine and learner: a tiny model of each, with random
weights and variants of its window, rope and heads, against the library's own pass. Each is right, or refused with a reason.

    .venv/bin/python bench/models.py [--json] [--smoke] [--kinds llama,qwen3] [--plain] [--write docs/models.md]

`--write` replaces the table in that page. `--plain`: without the variants. Some minutes on one core.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from internals_torch import HEADS, PASSES, WINDOW, refusal, set_up_cpu, shrunk_table, strange_layers
from report import Options, Row, alone, publish, say

Table = dict[str, Any]
# What a default config leaves out, and every checkpoint has.
MISSING: dict[str, Table] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
}
ROPES: dict[str, Table] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 128},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "longrope": {
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "factor": 2.0,
        "original_max_position_embeddings": 128,
    },
}
SMOKE = ("llama", "gemma2", "bart")
FIRST, LAST = "<!-- made by bench/models.py -->", "<!-- end -->"


class Found(NamedTuple):
    """The verdicts on one kind: of its plain config, and of the variants whose verdict is another."""

    kind: str
    model_class: str
    verdicts: dict[str, str | None]  # by pass; None: right
    variants: list[str]  # that have the same verdicts
    others: dict[str, str]  # variant -> why it differs


# ---- configs -------------------------------------------------------------------------------------------------------------


def tiny_table(kind: str) -> Table:
    return shrunk_table({**CONFIG_MAPPING[kind]().to_dict(), **MISSING.get(kind, {})}) | MISSING.get(kind, {})


def variants(table: Table) -> Iterator[tuple[str, Table]]:
    """The same model with a window, another rope, other heads: those that its config has a key for."""
    if "sliding_window" in table and not table["sliding_window"]:
        kinds = {"layer_types": ["sliding_attention", "full_attention"]} if table.get("layer_types") else {}
        is_used = {"use_sliding_window": True} if "use_sliding_window" in table else {}
        yield "window", {**table, "sliding_window": WINDOW, **is_used, **kinds}
    rope = table.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        for name, keys in ROPES.items():
            kept = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
            yield name, {**table, "rope_parameters": {"rope_type": name, **kept, **keys}}
    if table.get("num_key_value_heads"):
        for name, count in (("one key head", 1), ("all key heads", HEADS)):
            if table["num_key_value_heads"] != count:
                yield name, {**table, "num_key_value_heads": count}
    if isinstance(table.get("head_dim"), int) and "kv_lora_rank" not in table:
        yield "heads of 24", {**table, "head_dim": 24}
    if table.get("is_decoder") is False:
        yield "is_decoder", {**table, "is_decoder": True}


def config_of(kind: str, table: Table) -> Any:
    """Raises whatever the library raises, if it cannot run a model of this config."""
    config = CONFIG_MAPPING[kind].from_dict(dict(table))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        model(input_ids=torch.arange(4)[None], use_cache=False)
    return CONFIG_MAPPING[kind].from_dict(dict(table))


# ---- verdicts ------------------------------------------------------------------------------------------------------------


def try_kind(kind: str, *, has_variants: bool = True) -> Found:
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    try:
        table = tiny_table(kind)
        config = config_of(kind, table)
    except Exception as error:  # of the library, at sizes that are ours
        kinds = _strange_layers_of(kind)
        reason = f"not tried: no tiny model ({type(error).__name__})"
        if kinds:  # that is said before any model is made
            reason = f"{model_class} has layers of kind {', '.join(kinds)}: not supported"
        return Found(kind, model_class, dict.fromkeys(PASSES, reason), [], {})
    verdicts = {name: refusal(config, name) for name in PASSES}
    found = Found(kind, model_class, verdicts, [], {})
    for name, other in variants(table) if has_variants else ():
        if None in verdicts.values() or name == "is_decoder":  # what is wrong in all passes is not varied
            _try_variant(found, name, other)
    return found


def _strange_layers_of(kind: str) -> list[str]:
    try:
        return list(strange_layers(CONFIG_MAPPING[kind]()))
    except Exception:  # a kind whose default config the library itself refuses
        return []


def _try_variant(found: Found, name: str, table: Table) -> None:
    try:
        config = config_of(found.kind, table)
    except Exception:  # a combination that the library has no model for
        return
    verdicts = {path: refusal(config, path) for path in PASSES}
    changed = {path: reason for path, reason in verdicts.items() if (reason is None) != (found.verdicts[path] is None)}
    if not changed:
        found.variants.append(name)
    elif all(reason is None for reason in changed.values()):
        found.others[name] = f"right ({', '.join(changed)})"
    else:
        reasons = {short(reason) for reason in changed.values() if reason is not None}
        found.others[name] = f"refused ({', '.join(changed)}): {'; '.join(sorted(reasons))}"


def short(reason: str) -> str:
    """A reason without what changes from machine to machine."""
    if reason.startswith("not tried"):
        return reason
    if "gives other numbers" in reason:
        return "other numbers"
    if "attention interface" in reason:
        return "not all of its layers use the attention interface"
    for words in ("attention sinks", "keys and values have different shapes", "did not hand our context"):
        if words in reason:
            return words
    if kinds := re.search(r"has layers of kind ([\w, ]+):", reason):
        return f"layers of kind {kinds[1]}"
    if error := re.search(r"\((\w+Error|RequestRefused)", reason):
        return f"its own code fails ({error[1]})"
    return reason


# ---- the page ------------------------------------------------------------------------------------------------------------


def line_of(found: Found) -> str:
    cells = ["right" if reason is None else "-" for reason in found.verdicts.values()]
    reasons: dict[str, list[str]] = {}
    for path, reason in found.verdicts.items():
        if reason is not None:
            reasons.setdefault(short(reason), []).append(path)
    notes = [
        text if len(paths) == len(PASSES) else f"{', '.join(paths)}: {text}" for text, paths in reasons.items()
    ] + [f"{name}: {text}" for name, text in found.others.items()]
    return f"| {found.kind} | {' | '.join(cells)} | {', '.join(found.variants)} | {'; '.join(notes)} |"


def page_table(all_found: Sequence[Found]) -> str:
    right = sum(not any(found.verdicts.values()) for found in all_found)
    part = sum(None in found.verdicts.values() for found in all_found) - right
    untried = sum("not tried" in str(found.verdicts["slots"]) for found in all_found)
    head = [
        f"transformers {transformers.__version__}: {len(all_found)} kinds, {right} right everywhere, {part} in part, "
        f"{len(all_found) - right - part - untried} refused, {untried} not tried.",
        "",
        "| kind | slots | pages | learner | variants with the same result | refused because |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *map(line_of, all_found)])


def write_page(path: Path, all_found: Sequence[Found]) -> None:
    before, _, rest = path.read_text().partition(FIRST)
    _, _, after = rest.partition(LAST)
    path.write_text(f"{before}{FIRST}\n\n{page_table(all_found)}\n\n{LAST}{after}")


def main(argv: Sequence[str] | None = None) -> None:
    options = Options(__doc__)
    options.add("--kinds", "", smoke=",".join(SMOKE), help="model types, separated by commas; empty: all")
    options.add("--write", "", help="the page whose table is replaced")
    options.add_argument("--plain", action="store_true", help="without variants")
    chosen = options.parse(argv)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    set_up_cpu()
    kinds = chosen.kinds.split(",") if chosen.kinds else list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    all_found = []
    for kind in kinds:
        all_found.append(try_kind(kind, has_variants=not (chosen.plain or chosen.smoke)))
        say(line_of(all_found[-1]))
    if chosen.write:
        write_page(Path(chosen.write), all_found)
    publish([row for found in all_found for row in rows_of(found)], chosen)


def rows_of(found: Found) -> list[Row]:
    """1: right, 0: refused."""
    metrics = {
        name: "right" if reason is None else f"refused: {short(reason)}" for name, reason in found.verdicts.items()
    }
    return [alone(f"{found.kind}, {name}", words, float(words == "right")) for name, words in metrics.items()]


if __name__ == "__main__":
    main()
