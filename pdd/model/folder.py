"""Whether a model folder can be served, as far as that is known without reading weights. No torch, no tokenizer.

Looks at what a start would stumble over: the folder, config.json, the headers of the weights and whether they are what
config.json implies, the tokenizer's file. What is wrong inside of the weights or the tokenizer is found when they are loaded.
"""

from __future__ import annotations

from pathlib import Path

from pdd.errors import ConfigError, ModelError
from pdd.model.config import list_folder, load_config
from pdd.model.inventory import take_stock
from pdd.model.safetensors_file import read_directory

TOKENIZER_FILE = "tokenizer.json"
COPY_AGAIN = "Check model.path, and that the user of the daemon may read all files there; else copy the checkpoint again."


def check_folder(model_dir: Path) -> int:
    """The most tokens that the model allows.

    Raises:
        ModelError: the folder is missing, incomplete, unreadable, or of a family that pdd does not run.
    """
    try:
        config = load_config(model_dir)
        take_stock(read_directory(model_dir), config, model_dir)
    except ModelError as error:
        error.hint = error.hint or COPY_AGAIN
        raise
    if TOKENIZER_FILE not in list_folder(model_dir):
        raise ModelError(f"{model_dir / TOKENIZER_FILE} is missing", hint="pdd needs the fast tokenizer's file.")
    return config.max_position


def check_context(max_context: int, model_allows: int) -> None:
    """Raises ConfigError when `max_context` tokens (0: what the model allows) are more than the model takes."""
    if max_context > model_allows:
        raise ConfigError(f"max_context {max_context} is more than the {model_allows} tokens of the model",
                          hint=f"Set model.max_context to at most {model_allows}, or to 0: what the model allows.")
