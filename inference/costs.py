"""Cost models by name, from data sheets and from a measurement, and those of files."""

import json
from dataclasses import fields
from pathlib import Path

from pipedraft.errors import UsageError
from pipedraft.files import read_text
from pipedraft.inference.clock import CostModel
from pipedraft.inference.config import check_names, convert

# Llama-2-7B in 16 bits (config.json of meta-llama/Llama-2-7b-hf): H = 4096, 32 layers of four H x H
# projections and three of H x 11008, and a vocabulary of 32,000.
HIDDEN, VOCABULARY = 4096, 32_000
LAYER_WEIGHTS = 32 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * 11_008)
HEAD_WEIGHTS = VOCABULARY * HIDDEN


def data_sheet(flops: float, bytes_per_s: float, link_bytes_per_s: float) -> CostModel:
    """Costs of Llama-2-7B in 16 bits, one device a stage, if every device reaches its data sheet.

    A pass over one row reads every weight once. A further row computes two operations a weight, as
    if beside no reading, so a row costs ``bytes_per_s / flops`` of a pass; it sends H values over a
    hop, and reads its logits (float32) once more to choose a token. A hop's latency is not on data
    sheets and is 0 here: measure it (``--calibrate``), or give ``eval replay --link``.

    Args:
        flops: dense, 16-bit products summed in float32.
        link_bytes_per_s: in one direction.
    """
    row = bytes_per_s / flops
    target_pass_s = 2 * LAYER_WEIGHTS / bytes_per_s
    head = HEAD_WEIGHTS / LAYER_WEIGHTS
    return CostModel(
        row=row,
        link_row=2 * HIDDEN / link_bytes_per_s / target_pass_s,
        verify=head,
        head_row=head * row,
        verify_row=4 * VOCABULARY / bytes_per_s / target_pass_s,
    )


PRESETS = {
    # NVIDIA H100 SXM data sheet: 1,979 TFLOPS bf16 with sparsity (half of it dense), 3.35 TB/s,
    # NVLink 900 GB/s (both directions).
    "h100": data_sheet(989.5e12, 3.35e12, 450e9),
    # NVIDIA A100 80GB SXM data sheet: 312 TFLOPS bf16, 2,039 GB/s, NVLink 600 GB/s.
    "a100": data_sheet(312e12, 2.039e12, 300e9),
    # NVIDIA Ada architecture white paper, appendix A: 165.2 TFLOPS bf16 summed in fp32, 1,008 GB/s;
    # no NVLink, PCI Express 4.0 x16: 31.5 GB/s.
    "rtx4090": data_sheet(165.2e12, 1.008e12, 31.5e9),
    # NVIDIA Jetson Orin Nano 8GB data sheet, FlowSpec's device: 20 dense INT8 TOPS, so 10 TFLOPS
    # in 16 bits, 68 GB/s; Gigabit Ethernet of the developer kit. In 4 bits a row costs four times
    # as much.
    "jetson_orin": data_sheet(10e12, 68e9, 125e6),
    # docs/results.md: the embedded target on two processes of two CPU cores, measured.
    "this_cpu": CostModel(
        row=0.035,
        link=0.051,
        verify=0.062,
        draft_forward=0.185,
        is_asynchronous=True,
        draft_on_first_stage=True,
    ),
}
"""Name -> cost model of a machine."""


ROW_COSTS = (0.0, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.1)
"""At which S is shown as a curve."""


def read_cost(text: str) -> CostModel:
    """A preset by its name, or a file as ``--calibrate`` writes it; fields it lacks are 0.

    Raises:
        UsageError: neither, or a value of the wrong type or range.
    """
    if text in PRESETS:
        return PRESETS[text]
    try:
        values = json.loads(read_text(Path(text), "--cost"))
        if isinstance(values, dict):
            check_names(values, [part.name for part in fields(CostModel)], "cost")
        return convert(values, CostModel, "cost")
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"--cost: {text!r} is no cost model ({error}); give {', '.join(PRESETS)}, or a file "
            "that --calibrate wrote"
        ) from error
