"""Write an export's IR beside it, with the packages of OpenVINO's own environment.

    python -m pipedraft.models.exchange.openvino_ir OUT

OUT is a folder from ``models export --format openvino``. The environment needs openvino-genai,
optimum-intel and pipedraft's files, but none of pipedraft's dependencies.
"""

import argparse
import importlib
import json
import tempfile
from pathlib import Path
from typing import Any

IR = "openvino_model.xml"
CLASSES = {
    "LlamaForCausalLMEagle3": "LlamaEagle3ForCausalLM",
    "DFlashDraftModel": "Qwen3DFlashForCausalLM",
}
"""Architecture in config.json -> optimum-intel's class."""


def write_ir(folder: Path) -> Path:
    """Trace the head in float32, and write ``openvino_model.xml`` and ``.bin`` into its folder.

    OpenVINO fuses the outputs of layers 2, L / 2 and L - 3 unless the IR names others. EAGLE-3's
    authors fuse the inputs of these layers, so the IR names the layers of config.json.
    """
    openvino, optimum = map(importlib.import_module, ("openvino", "optimum.exporters.openvino"))
    classes = importlib.import_module("optimum.exporters.openvino.model_patcher")
    settings = json.loads((folder / "config.json").read_text())
    name = CLASSES[settings["architectures"][0]]
    # optimum-intel asks a class for its module's name to find its library.
    head: Any = type(name, (getattr(classes, name),), {"__module__": "transformers"})
    with tempfile.TemporaryDirectory() as place:
        traced = head.from_pretrained(folder, dtype="float32")
        optimum.export_from_model(traced, place, task="text-generation-with-past")
        model = openvino.Core().read_model(Path(place, IR))
        if layers := settings.get("hidden_layers_list"):
            model.set_rt_info(" ".join(map(str, layers)), ["hidden_layers_list"])
        openvino.save_model(model, folder / IR, compress_to_fp16=False)
    return folder / IR


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipedraft.models.exchange.openvino_ir")
    parser.add_argument("folder", type=Path, help="folder from models export --format openvino")
    print(write_ir(parser.parse_args().folder))


if __name__ == "__main__":
    main()
