"""Write a target K times as deep with the same outputs, and its EAGLE-3 head.

    python docs/lab/deeper_target.py 12 out/deep                            # SmolLM2's
    python docs/lab/deeper_target.py 20 out/deep --target assets/target --head assets/heads/eagle3

K - 1 layers follow each layer and add nothing, because their last matrices are zero. So
outputs and acceptance stay the same, while a target pass costs K times as much. The draft's cost
relative to the target becomes as small as for a large language model. The script writes
OUT/target and OUT/head.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from pipedraft.models.target import load_target
from pipedraft.models.transformer.fingerprint import target_fingerprint

LAST = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
"""A layer adds these matrices' results to its input."""


def deeper(weights: dict[str, torch.Tensor], times: int) -> dict[str, torch.Tensor]:
    found = {}
    for name, weight in weights.items():
        if not name.startswith("model.layers."):
            found[name] = weight
            continue
        _, _, layer, rest = name.split(".", 3)
        for copy in range(times):
            own = torch.zeros_like(weight) if copy and rest in LAST else weight.clone()
            found[f"model.layers.{int(layer) * times + copy}.{rest}"] = own
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("times", type=int, help="K")
    parser.add_argument("out", type=Path, help="OUT")
    parser.add_argument("--target", type=Path, default=Path("out/smollm2"))
    parser.add_argument("--head", type=Path, default=Path("assets/heads/smollm2_eagle3"))
    options = parser.parse_args()
    source = options.target
    times, target, head = options.times, options.out / "target", options.out / "head"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    config = json.loads((source / "config.json").read_text())
    config["num_hidden_layers"] *= times
    config.pop("layer_types", None)
    (target / "config.json").write_text(json.dumps(config, indent=2))
    weights = deeper(load_file(source / "model.safetensors"), times)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(options.head, head)
    config = json.loads((head / "config.json").read_text())
    config["target"] |= {
        "name": str(target),
        "fingerprint": target_fingerprint(load_target(target)),
    }
    sizes = config["architecture"]
    sizes["feature_layers"] = [layer * times for layer in sizes["feature_layers"]]
    sizes["num_target_layers"] *= times
    (head / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    main()
