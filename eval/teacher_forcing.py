"""What the target says at every token of a finished text: one forward pass over all of it."""

# N new tokens, R rows of a chunk, V target vocabulary
import hashlib
import json

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipedraft.eval.traces import TraceFile
from pipedraft.inference.result import DecodeResult

CHUNK_ROWS = 256  # rows whose float32 log-probabilities are held at a time


@torch.inference_mode()
def text_logits(target: PreTrainedModel, prompt_ids: list[int], token_ids: list[int]) -> Tensor:
    """Logits [N, V] from which each token of the text was, or could have been, chosen.

    In the target's own dtype, and without a cache: other matrix shapes than those of decoding.
    """
    input_ids = torch.tensor([[*prompt_ids, *token_ids[:-1]]], device=target.device)
    output = target(input_ids, logits_to_keep=len(token_ids), use_cache=False)
    return output.logits[0]


def entropies(logits_NV: Tensor) -> list[float]:
    """-sum p log p in nats of every row, at temperature 1 whatever the text was drawn at."""
    chunks = [
        torch.special.entr(chunk_RV.float().softmax(-1)).sum(-1)
        for chunk_RV in logits_NV.split(CHUNK_ROWS)
    ]
    return torch.cat(chunks).tolist()


class TextEntropies:
    """The target's entropy at every token of decoded texts, each text computed once.

    Independent of schedule, backend and verifier: the same text has the same entropies.
    """

    def __init__(self, target: PreTrainedModel, traces: TraceFile | None = None) -> None:
        """
        Args:
            traces: texts in there are not computed again, and computed ones are added.
        """
        self.target, self.traces = target, traces
        self._found: dict[str, list[float]] = {}

    def of(self, result: DecodeResult) -> list[float]:
        """One for each of ``token_ids``."""
        text = json.dumps([result.prompt_ids, result.token_ids]).encode()
        key = hashlib.sha256(text).hexdigest()
        if key not in self._found:
            found = None if self.traces is None else self.traces.get([key])
            if found is None:
                logits_NV = text_logits(self.target, result.prompt_ids, result.token_ids)
                found = [round(entropy, 6) for entropy in entropies(logits_NV)]
                if self.traces is not None:
                    self.traces.add([key], found)
            self._found[key] = found
        return self._found[key]
