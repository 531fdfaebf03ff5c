"""Print which causal language models of transformers decode, and what the others lack.

    python docs/lab/family_table.py

Each family is checked by its default configuration, as a target is before its weights are read.
"""

import re
from collections import defaultdict

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from pipedraft.models.families import check_target

# The default has no attention layer, and transformers' own cached forward needs one.
GIVEN = {
    "granitemoehybrid": dict(
        num_hidden_layers=40,
        layer_types=(["linear_attention"] * 9 + ["full_attention"]) * 4,
        mamba_n_heads=128,
        mamba_d_head=64,
        num_local_experts=8,
    )
}


def lack_of(kind: type[transformers.PreTrainedConfig]) -> str:
    """Return "decodes", or what a family lacks."""
    try:
        config = kind(**GIVEN.get(kind.model_type, {}))
    except Exception:  # transformers' own checks
        return "transformers refuses its default configuration"
    try:
        check_target(config, kind.model_type)
    except ValueError as error:
        found = re.search(r"cannot be cut into stages: (.*); give another", str(error))
        assert found is not None, error
        return found[1].replace("|", "/")
    return "decodes"


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    families = defaultdict(set)
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        families[lack_of(kind)].add(kind.model_type)
    print(f"transformers {transformers.__version__}\n")
    print("| Families | Number | Result |\n|---|---|---|")
    for lack, names in sorted(families.items(), key=lambda item: -len(item[1])):
        print(f"| {', '.join(sorted(names))} | {len(names)} | {lack} |")


if __name__ == "__main__":
    main()
