"""Load the embedded target's tokenizer trainer from its file, which is in no package."""

import importlib.util

from tiny_models import REPOSITORY

_place = REPOSITORY / "assets" / "target" / "byte_pairs.py"
_spec = importlib.util.spec_from_file_location("byte_pairs", _place)
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

CHAT_TEMPLATE, train_tokenizer = _module.CHAT_TEMPLATE, _module.train_tokenizer
