"""model check: whether and how a checkpoint fits. No daemon, no torch; of the weights only the headers are read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pdd.commands.common import Globals, print_json, table
from pdd.errors import EXIT_CHECK, EXIT_OK
from pdd.units import counted, show_bytes, show_count

if TYPE_CHECKING:
    from pdd.commands.documents import ModelCheck, ModelGroup


def check(options: Globals, model: Path) -> int:
    """Prints what the model takes; EXIT_CHECK when it does not fit this machine in any way."""
    document = _look(options, model)
    if options.json:
        import msgspec

        print_json(msgspec.to_builtins(document))
    else:
        print(text(document))
    return EXIT_OK if document.fits else EXIT_CHECK


def _look(options: Globals, model: Path) -> ModelCheck:
    from pdd.commands.documents import ModelCheck, ModelGroup
    from pdd.config_load import load
    from pdd.engine.machine import free_memory
    from pdd.model.config import list_folder, load_config, load_config_file
    from pdd.model.fit import group_fit, sizes_to_look_at
    from pdd.model.inventory import take_stock
    from pdd.model.safetensors_file import read_directory
    from pdd.model.tensor_parallel import num_parameters

    settings = load(options.config, demo=True)[0]
    alone = model.is_file()
    config = load_config_file(model) if alone else load_config(model)
    there = not alone and any(name.endswith((".safetensors", ".safetensors.index.json")) for name in list_folder(model))
    stock = take_stock(read_directory(model), config, model) if there else None
    dtype = config.dtype if settings.model.dtype == "auto" else settings.model.dtype
    free, page_size, fraction = free_memory(), settings.kv.page_size, settings.kv.memory_fraction
    fits = [group_fit(config, tp, dtype=dtype, page_size=page_size, free_bytes=free, fraction=fraction)
            for tp in sizes_to_look_at(config)]
    shape = config.kv_shape(dtype).layout_over(1, page_size, 1)
    return ModelCheck(
        model=str(model), family=config.family, parameters=num_parameters(config), dtype=dtype,
        num_layers=config.num_layers, max_context=config.max_position,
        file_bytes=stock.used_bytes if stock else None, unused_tensors=len(stock.unused) if stock else 0,
        unused_bytes=stock.unused_bytes if stock else 0, kv_token_bytes=shape.region_bytes // page_size,
        page_size=page_size, page_bytes=shape.region_bytes, free_bytes=free, memory_fraction=fraction,
        fits=any(fit.fits for fit in fits),
        groups=tuple(
            ModelGroup(tp=fit.tp, refused=fit.refused, fits=fit.fits, param_bytes=fit.param_bytes,
                       kv_token_bytes=fit.kv_token_bytes, page_bytes=fit.page_bytes, num_pages=fit.num_pages,
                       missing_bytes=fit.missing_bytes) for fit in fits))


# -- for people ---------------------------------------------------------------------------------------------------------
def text(document: ModelCheck) -> str:
    weights = "not there: config.json alone" if document.file_bytes is None else f"{show_bytes(document.file_bytes)}, whole"
    unused = (f"; {counted(document.unused_tensors, 'tensor')} more ({show_bytes(document.unused_bytes)}) not used"
              if document.unused_tensors else "")
    lines = [
        f"{document.family}  {show_count(document.parameters, 6)} parameters  {document.dtype}  "
        f"{counted(document.num_layers, 'layer')}  context {document.max_context}",
        f"weights  {weights}{unused}",
        f"kv       {show_bytes(document.kv_token_bytes)} a token, {show_bytes(document.page_bytes)} a page of "
        f"{document.page_size} tokens",
        f"memory   {show_bytes(document.free_bytes)} free here; {document.memory_fraction:g} of what weights leave is for KV",
        "",
        table([_row(group, document.page_size) for group in document.groups],
              ["TP", "WEIGHTS", "KV A TOKEN", "KV A PAGE", "PAGES", "TOKENS", ""]),
    ]
    if not document.fits:
        lines += ["", "does not fit this machine"]
    return "\n".join(lines)


def _row(group: ModelGroup, page_size: int) -> list[object]:
    if group.refused:
        return [group.tp, None, None, None, None, None, "; ".join(group.refused)]
    why = "" if group.fits else (f"{show_bytes(group.missing_bytes)} of memory are missing" if group.missing_bytes
                                 else "no page fits beside the weights")
    return [group.tp, show_bytes(group.param_bytes), show_bytes(group.kv_token_bytes), show_bytes(group.page_bytes),
            group.num_pages, group.num_pages * page_size, why]
