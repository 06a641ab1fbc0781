"""What tests say about a layout of HunyuanImage-3."""

from hyimg_cli.models.hunyuan_image3.sequence import Layout


def shared_length(layout: Layout) -> int:
    """The index of the first token that the unconditional branch replaces, or the length."""
    pairs = enumerate(zip(layout.ids, layout.unconditional_ids, strict=True))
    return next((at for at, (id_, other) in pairs if id_ != other), layout.length)
